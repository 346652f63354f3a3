"""The folder in which carpool keeps something from run to run: `$CARPOOL_CACHE`, or `carpool` in the user's cache folder.

Nothing depends on it but time. Where there is no such folder, or others may write into it, nothing is kept; a file that cannot be
read is not there, and one that cannot be written is left out.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from pathlib import Path
from typing import Any

from carpool.private import fault, make_folder, write_whole


def folder() -> Path | None:
    """Where files are kept, whether or not it is there yet; None where nothing is kept, which is said once."""
    place = _place()
    if place is None:
        _say_once("there is no home folder; set CARPOOL_CACHE to a folder of yours")
        return None
    try:
        wrong = fault(place)
    except OSError:  # not there yet, or out of reach, as reading and writing will find too
        return place
    if wrong is not None:
        _say_once(f"{place} is not used: {wrong}; set CARPOOL_CACHE to a folder that you alone may write")
        return None
    return place


def read(name: str) -> bytes | None:
    """What a file holds, if it is there."""
    place = folder()
    try:
        return (place / name).read_bytes() if place is not None else None
    except OSError:
        return None


def keep(name: str, data: bytes) -> bool:
    """Writes a file whole, so that another run never reads half of it; whether it could."""
    place = folder()
    if place is None:
        return False
    try:
        make_folder(place)
        if (place / name).parent != place:
            make_folder((place / name).parent)
        write_whole(place / name, data)
    except OSError:
        return False
    return True


def read_json(name: str) -> dict[str, Any]:
    """The JSON object of a file; an empty one where the file is not there, or says something else."""
    try:
        found = json.loads(read(name) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def keep_json(name: str, value: dict[str, Any]) -> bool:
    """Writes a JSON object whole; whether it could."""
    return keep(name, json.dumps(value).encode())


def _place() -> Path | None:
    if own := os.environ.get("CARPOOL_CACHE"):
        return Path(own)
    if theirs := os.environ.get("XDG_CACHE_HOME"):
        return Path(theirs) / "carpool"
    try:
        home = Path.home()
    except (RuntimeError, KeyError):  # no HOME, and a user whom the system does not know
        return None
    is_named = os.environ.get("HOME") != "" and home.is_absolute()
    return home / ".cache" / "carpool" if is_named else None


@functools.cache
def _say_once(why: str) -> None:
    warnings.warn(f"carpool: nothing is kept from run to run: {why}", stacklevel=4)
