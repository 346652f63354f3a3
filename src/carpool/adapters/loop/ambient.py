"""The random states that a loop of the user's own draws from: put in place while it runs, and kept while it waits.

No framework is imported: torch and NumPy have a state only where someone has imported them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


class Ambient:
    """One loop's generators, from its seed on."""

    def __init__(self, seed: int) -> None:
        self._seed = seed % 2**64
        self._states: dict[str, Any] = {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The loop's own states inside, everybody else's outside."""
        others = _read()
        try:
            self._enter()
            yield
        finally:
            self._states = _read()
            _write(others)

    def _enter(self) -> None:
        fresh = {name for name in ("random", "numpy", "torch") if name not in self._states}
        _write(self._states)
        if "random" in fresh:
            random.seed(self._seed)
        if "numpy" in fresh:
            np.random.seed(self._seed % 2**32)
        if "torch" in fresh and (torch := sys.modules.get("torch")) is not None:
            torch.manual_seed(self._seed)


def _read() -> dict[str, Any]:
    states: dict[str, Any] = {"random": random.getstate(), "numpy": np.random.get_state()}
    if (torch := sys.modules.get("torch")) is not None:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        states["torch"] = (torch.get_rng_state(), cuda)
    return states


def _write(states: dict[str, Any]) -> None:
    if "random" in states:
        random.setstate(states["random"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "torch" in states and (torch := sys.modules.get("torch")) is not None:
        host, cuda = states["torch"]
        torch.set_rng_state(host)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
