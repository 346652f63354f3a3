"""What was measured, remembered on disk from run to run: a JSON file of trials and holds by structure and device.

In `$CARPOOL_CACHE`, or `carpool` in the user's cache folder. Nothing depends on it but speed: a file that cannot be read is
an empty one, and one that cannot be written is left out.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from carpool.planning.holds import Hold
from carpool.planning.trials import Trial

Kept = TypeVar("Kept", Trial, Hold)

_MOST = 4096  # measurements kept, the newest


def folder() -> Path:
    """Where carpool keeps what it remembers."""
    if own := os.environ.get("CARPOOL_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "carpool"


def remembered(key: str, kind: Callable[..., Kept] = Trial) -> Kept | None:
    """What was measured under this key, if there was something of this kind."""
    found = _read().get(key)
    try:
        return kind(**found) if found is not None else None
    except TypeError:
        return None


def remember(key: str, measured: Trial | Hold) -> None:
    """Keeps what was measured. The file is replaced whole, so that another run never reads half of it."""
    kept = {name: value for name, value in _read().items() if name != key}
    kept[key] = asdict(measured)
    newest = dict(list(kept.items())[-_MOST:])
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder(), suffix=".json", delete=False) as file:
            json.dump(newest, file)
        os.replace(file.name, _path())
    except OSError:
        return


def _path() -> Path:
    return folder() / "trials.json"


def _read() -> dict[str, Any]:
    try:
        found = json.loads(_path().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
