"""What was measured, remembered on disk from run to run: a JSON file of trials and holds by structure and device.

Nothing depends on it but speed: a file that makes no sense is an empty one. A measurement counts for a month, and only with
the versions that it was made with. What a busy machine showed is kept in this process alone.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any, TypeVar

from carpool import cache
from carpool.fields import value_of
from carpool.planning.holds import Hold
from carpool.planning.trials import Trial

Kept = TypeVar("Kept", Trial, Hold)

EXPIRES_S = 30 * 24 * 3600.0
_FILE = "trials.json"
_MOST = 4096  # measurements kept, the newest
_FORMAT = 2  # of the file; measurements of another one are made anew
_DECIDING = ("carpool", "torch", "jax", "jaxlib", "keras", "tensorflow", "tensorflow-cpu", "numpy")

_here: dict[tuple[str, str], Trial | Hold] = {}
"""What was measured while the machine was busy, by folder and key: good for this process."""


def remembered(key: str, kind: Callable[..., Kept] = Trial) -> Kept | None:
    """What was measured under this key, if there was something of this kind; it says when it was measured."""
    own = _here.get((str(cache.folder()), key))
    if own is not None:
        return own if isinstance(own, kind) else None  # type: ignore[arg-type, return-value]
    record = _read().get(key)
    if not isinstance(record, dict) or not _counts(record):
        return None
    found = value_of(kind, record.get("values"))
    return found and replace(found, on=time.strftime("%Y-%m-%d", time.localtime(record["at"])))


def remember(key: str, measured: Trial | Hold, busy: bool = False) -> None:
    """Keeps what was measured; what a busy machine showed only for this process."""
    place = (str(cache.folder()), key)
    if busy:
        _here[place] = measured
        return
    _here.pop(place, None)
    values = {name: value for name, value in asdict(measured).items() if name != "on"}
    kept = {name: record for name, record in _read().items() if name != key}
    kept[key] = {"values": values, "at": time.time(), "versions": _versions()}
    cache.keep_json(_FILE, {"format": _FORMAT, "measured": dict(list(kept.items())[-_MOST:])})


def forget() -> int:
    """Drops everything that was measured; how many measurements that were."""
    own = [place for place in _here if place[0] == str(cache.folder())]
    dropped = count() + len(own)
    for place in own:
        del _here[place]
    if dropped:
        cache.keep_json(_FILE, {"format": _FORMAT, "measured": {}})
    return dropped


def count() -> int:
    """How many measurements are kept on disk."""
    return len(_read())


def _counts(record: dict[str, Any]) -> bool:
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


def _read() -> dict[str, Any]:
    found = cache.read_json(_FILE)
    kept = found.get("measured") if found.get("format") == _FORMAT else None
    return kept if isinstance(kept, dict) else {}
