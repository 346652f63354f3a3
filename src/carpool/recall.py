"""What was measured, remembered on disk from run to run: a JSON file of trials and holds by structure and device.

In `$CARPOOL_CACHE`, or `carpool` in the user's cache folder. Nothing depends on it but speed: a file that cannot be read is
an empty one, and one that cannot be written is left out. A measurement counts for a month, and only with the versions that
it was made with. What a busy machine showed is kept in this process alone.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from carpool.planning.holds import Hold
from carpool.planning.trials import Trial

Kept = TypeVar("Kept", Trial, Hold)

EXPIRES_S = 30 * 24 * 3600.0
_MOST = 4096  # measurements kept, the newest
_FORMAT = 2  # of the file; measurements of another one are made anew
_DECIDING = ("carpool", "torch", "jax", "jaxlib", "keras", "tensorflow", "tensorflow-cpu", "numpy")

_here: dict[tuple[str, str], Trial | Hold] = {}
"""What was measured while the machine was busy, by folder and key: good for this process."""


def folder() -> Path:
    """Where carpool keeps what it remembers."""
    if own := os.environ.get("CARPOOL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "carpool"


def remembered(key: str, kind: type[Kept] | Callable[..., Kept] = Trial) -> Kept | None:
    """What was measured under this key, if there was something of this kind; it says when it was measured."""
    own = _here.get((str(folder()), key))
    if own is not None:
        return own if isinstance(own, kind) else None  # type: ignore[arg-type, return-value]
    record = _read().get(key)
    if not isinstance(record, Mapping) or not _counts(record):
        return None
    try:
        found = kind(**record["values"])
        found.check()
    except (TypeError, ValueError, KeyError):
        return None
    return replace(found, on=time.strftime("%Y-%m-%d", time.localtime(record["at"])))


def remember(key: str, measured: Trial | Hold, busy: bool = False) -> None:
    """Keeps what was measured. The file is replaced whole, so that another run never reads half of it."""
    if busy:
        _here[str(folder()), key] = measured
        return
    _here.pop((str(folder()), key), None)
    values = {name: value for name, value in asdict(measured).items() if name != "on"}
    kept = {name: record for name, record in _read().items() if name != key}
    kept[key] = {"values": values, "at": time.time(), "versions": _versions()}
    _write(dict(list(kept.items())[-_MOST:]))


def forget() -> int:
    """Drops everything that was measured; how many measurements that were."""
    own = [place for place in _here if place[0] == str(folder())]
    dropped = count() + len(own)
    for place in own:
        del _here[place]
    _path().unlink(missing_ok=True)
    return dropped


def count() -> int:
    """How many measurements are kept on disk."""
    return len(_read())


def _counts(record: Mapping[str, Any]) -> bool:
    """Whether a measurement is neither too old nor of other versions."""
    at = record.get("at")
    if isinstance(at, bool) or not isinstance(at, int | float):
        return False
    return 0 <= time.time() - at < EXPIRES_S and record.get("versions") == _versions()


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for package in _DECIDING:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _path() -> Path:
    return folder() / "trials.json"


def _read() -> dict[str, Any]:
    try:
        found = json.loads(_path().read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        return {}
    kept = found.get("measured")
    return kept if isinstance(kept, dict) else {}


def _write(kept: Mapping[str, Any]) -> None:
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder(), suffix=".json", delete=False) as file:
            json.dump({"format": _FORMAT, "measured": kept}, file)
        os.replace(file.name, _path())
    except OSError:
        return
