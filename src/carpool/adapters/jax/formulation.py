"""How the rows of a stack with convolutions are computed: grouped, as matrix products, or one after another. Measured, and remembered."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from carpool import recall
from carpool.adapters.jax.lift import Traced
from carpool.adapters.jax.program import APART, IN_TURN, MAPPED, PRODUCT, PRODUCT_APART, Formulation
from carpool.adapters.jax.telling import names_of
from carpool.planning.trials import Trial
from carpool.windows import measured


def convolves(traced: Traced) -> bool:
    return "conv_general_dilated" in names_of(traced.closed)


def candidates(platform: str) -> tuple[Formulation, ...]:
    """Those that may be the fastest, the one to take unmeasured first.

    On a CPU rows cannot be taken in turn inside a program: a convolution in a loop takes many times as long there; and not every
    convolution keeps the rows of a stack apart.
    """
    return (PRODUCT_APART, APART) if platform == "cpu" else (IN_TURN, PRODUCT, MAPPED)


def length_limit(way: Formulation, platform: str, most: int) -> int:
    """Steps in a launch of such a stack: on a CPU a loop around a convolution costs more than launches."""
    return 1 if platform == "cpu" and way is not PRODUCT_APART else most


class Trials:
    """What was measured of one stack, by formulation."""

    def __init__(self, key: Any, members: int, device: Any) -> None:
        text = repr((key, members, device.platform, device.device_kind)).encode()
        self._name = "jax " + hashlib.blake2b(text, digest_size=12).hexdigest()
        self._members = members
        self._ways = candidates(device.platform)

    def remembered(self) -> Mapping[str, Trial]:
        found = {way.name: recall.remembered(f"{self._name} {way.name}") for way in self._ways}
        return {name: trial for name, trial in found.items() if trial is not None}

    def measured(
        self, runs: Mapping[str, Callable[[], float]], alone: Callable[[], float]
    ) -> Mapping[str, Trial]:
        """Seconds of a step in each formulation beside those of a member alone; none where the windows disagree."""
        found = measured([*runs.values(), alone])
        if not found.agrees:
            return {}
        *together, alone_s = found.seconds
        trials = {
            name: Trial(self._members, seconds, alone_s, True, name)
            for name, seconds in zip(runs, together, strict=True)
        }
        for name, trial in trials.items():
            recall.remember(f"{self._name} {name}", trial, found.busy)
        return trials

    @property
    def ways(self) -> Sequence[Formulation]:
        """What may be taken."""
        return self._ways

    def best(self, found: Mapping[str, Trial]) -> tuple[Formulation, Trial]:
        way = min(
            (way for way in self._ways if way.name in found), key=lambda way: found[way.name].together_s
        )
        return way, found[way.name]
