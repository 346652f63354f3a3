"""How workers share the cores."""

from __future__ import annotations

from collections.abc import Mapping

_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def threads(workers: int, among: int, found: Mapping[str, str]) -> dict[str, str]:
    """What so many workers at once are told about threads: an equal part of the cores each, and never more than was `found` set.

    >>> threads(workers=2, among=8, found={"MKL_NUM_THREADS": "1"})
    {'OMP_NUM_THREADS': '4', 'MKL_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '4'}
    """
    part = max(1, among // max(1, workers))
    return {name: str(min(part, _number(found.get(name), part))) for name in _COUNTS}


def _number(text: str | None, otherwise: int) -> int:
    return int(text) if text and text.isdigit() and int(text) else otherwise
