"""What was measured, remembered on disk from run to run: a JSON file of trials and holds by structure and device.

Nothing depends on it but speed: a file that makes no sense is an empty one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TypeVar

from carpool import cache
from carpool.fields import is_plain, value_of
from carpool.planning.holds import Hold
from carpool.planning.trials import Trial

Kept = TypeVar("Kept", Trial, Hold)

_FILE = "trials.json"
_MOST = 4096  # measurements kept, the newest


def remembered(key: str, kind: Callable[..., Kept] = Trial) -> Kept | None:
    """What was measured under this key, if there was something of this kind."""
    return value_of(kind, cache.read_json(_FILE).get(key))


def remember(key: str, measured: Trial | Hold) -> None:
    """Keeps what was measured; what is nothing of ours goes."""
    found = cache.read_json(_FILE)
    kept = {name: value for name, value in found.items() if name != key and is_plain(value)}
    kept[key] = asdict(measured)
    cache.keep_json(_FILE, dict(list(kept.items())[-_MOST:]))
