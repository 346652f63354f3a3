"""Whether a step that raised can be taken again: it can while it has written neither weights nor optimizer state."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from carpool.adapters.torch.build import Built


class Mark:
    """How a job's own objects stand at the beginning of a step, by torch's counts of writes."""

    def __init__(self, built: Built) -> None:
        self._built = built
        self.dirty = False
        """Set where something is written that torch does not count, or that was meant: a whole update, or a fused kernel's."""
        self._weights = self._weight_writes()
        self._slots = self._slot_writes()

    def retakes(self) -> bool:
        """Whether the step can be taken again. State that an optimizer began to make in its first update is dropped for it."""
        if self.dirty or self._weights != self._weight_writes():
            return False
        if self._slots == self._slot_writes():
            return True
        if self._slots != (0, 0):
            return False
        for phase in self._built.phases:
            phase.optimizer.state.clear()
        return True

    def _weight_writes(self) -> int:
        return sum(parameter._version for parameter in self._built.model.parameters())

    def _slot_writes(self) -> tuple[int, int]:
        states = (own for phase in self._built.phases for own in phase.optimizer.state.values())
        slots = [
            s
            for own in states
            if isinstance(own, Mapping)
            for s in own.values()
            if isinstance(s, torch.Tensor)
        ]
        return len(slots), sum(slot._version for slot in slots)
