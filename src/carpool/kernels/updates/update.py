"""What carpool must know of an optimizer to update a stack as the real one would update each member.

An update reads `columns`: the scalars a real torch optimizer would compute on the host, one per member and parameter
group, made in float64 for a whole chunk at once (`scalars`). What a step then does to the stacked weights (`apply`) is
the arithmetic of torch's own single-tensor implementation, so the results agree to rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Columns = Sequence[Tensor]
Options = Mapping[str, Any]

_BETAS = {"beta1": 0, "beta2": 1}


class Update(ABC):
    """How one optimizer class updates a stack.

    `hypers` and `apply` are what every update has; the rest has defaults for what an optimizer may not have.
    """

    hypers: tuple[str, ...]
    """The numbers read from a parameter group; "beta1" and "beta2" are the two of its "betas"."""
    counts: bool = False
    """Whether the real optimizer keeps a "step" beside its slots."""
    tallies: tuple[tuple[str, float], ...] = ()
    """State that is one number for each parameter, by name and with its value before the first update."""
    eager: bool = False
    """Whether the real optimizer holds its slots before its first step."""

    def structure(self, group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        """The options that change the arithmetic itself: members must agree on them, and `apply` gets them."""
        return ()

    def refusal(self, group: Mapping[str, Any]) -> str | None:
        """An option that has no stacked form, or None."""
        return None

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the state tensors of a parameter's shape, as the real optimizer calls them."""
        return ()

    def numbers(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """The hyper-parameters of a group now, in the order of `hypers`."""
        return tuple(
            float(group["betas"][_BETAS[name]]) if name in _BETAS else float(group[name])
            for name in self.hypers
        )

    def scalars(self, numbers: Mapping[str, Tensor], count: Tensor) -> list[Tensor]:
        """The columns for the update number `count` (from 1), all float64: unless overridden, the numbers themselves.

        Where the real optimizer keeps no "step", all that is known of `count` is whether it is the first.
        """
        return [numbers[name] for name in self.hypers]

    def counter(self, count: float) -> Any:
        """The "step" of the real optimizer after so many updates: torch's own keep a tensor, others an int."""
        return torch.tensor(count, dtype=number_dtype())

    @abstractmethod
    def apply(
        self,
        weight: Tensor,
        grad: Tensor,
        slots: Sequence[Tensor],
        columns: Columns,
        options: Options,
    ) -> list[Tensor]:
        """The new weight, the new slots and the new tallies, in that order; nothing is changed in place.

        Weight, gradient and slots are [members, elements], all parameters of a group end to end, so what happens to
        an element can depend on nothing but that element. Tallies (after the slots) and columns are [members, 1].
        `options` is what `structure` gave.
        """


def number_dtype() -> torch.dtype:
    """What torch's own optimizers give state that is one number for each parameter."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def descending(grad: Tensor, options: Options) -> Tensor:
    """The gradient to descend along."""
    return -grad if options["maximize"] else grad


def toward(old: Tensor, new: Tensor, share: Tensor) -> Tensor:
    """`old` moved toward `new` by a share of the way, in torch's own arithmetic for moving averages."""
    return torch.lerp(old, new, share.expand_as(new))
