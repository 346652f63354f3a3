"""The samples that a job reads of its data: `index=` as positions, checked in one place for every framework."""

from __future__ import annotations

from typing import Any

import numpy as np

from carpool.errors import DataError, sentence, shown

_REMEDY = "pass positions as whole numbers in one list or array, or a mask with True or False for each sample"


def positions(index: Any, length: int, name: str | None = None) -> np.ndarray | None:
    """The positions as 64-bit integers, in the order in which they are given; None for all samples.

    >>> positions([True, False, True], 3), positions(range(2), 3), positions(None, 3)
    (array([0, 2]), array([0, 1]), None)
    """
    if index is None:
        return None
    about = f"Job {name!r}: "
    found = _array(index, about)
    if found.dtype == bool:
        if len(found) != length:
            expected = f"index as a mask of {length}, one for each sample"
            raise DataError(
                about + sentence(expected, f"a mask of {len(found)}", "make it for the data passed")
            )
        found = np.flatnonzero(found)
    if not len(found):
        remedy = "pass more positions, or leave the job out"
        raise DataError(about + sentence("at least one sample in index", "0", remedy))
    least, most = int(found.min()), int(found.max())
    if least < 0 or most >= length:
        received, remedy = f"{least}..{most}", "index the data that was passed"
        raise DataError(about + sentence(f"index within 0..{length - 1}", received, remedy))
    return found.astype(np.int64)


def _array(index: Any, about: str) -> np.ndarray:
    """One row of whole numbers or of bools; of nothing, of whole numbers."""
    try:
        found = np.asarray(index.cpu() if hasattr(index, "cpu") else index)
    except (TypeError, ValueError) as error:  # lists of different lengths, say
        raise DataError(about + sentence("index of positions or a mask", shown(index), _REMEDY)) from error
    if found.ndim == 1 and not found.size and not isinstance(index, str):
        return found.astype(np.int64)
    if found.ndim != 1:
        received = f"an array of shape {found.shape}" if found.ndim else shown(index)
        raise DataError(about + sentence("index in one dimension", received, _REMEDY))
    if found.dtype != bool and not np.issubdtype(found.dtype, np.integer):
        raise DataError(
            about + sentence("index of whole numbers or a mask", f"{found.dtype}: {shown(index)}", _REMEDY)
        )
    if (
        found.dtype != bool
        and isinstance(index, list | tuple)
        and any(isinstance(one, bool) for one in index)
    ):
        received = f"both: {shown(index)}"
        raise DataError(about + sentence("index of whole numbers or a mask", received, _REMEDY))
    return found
