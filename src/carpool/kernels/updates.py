"""Optimizer updates for stacked parameters, each member with hyper-parameters of its own.

An update reads `columns`: the scalars a real torch optimizer would compute on the host, one per member and parameter
group, made in float64 for a whole chunk at once (`scalars`). What a step then does to the stacked weights (`apply`) is
the arithmetic of torch's own single-tensor implementation, so the results agree to rounding. One table, `UPDATES`,
says which optimizers can be fused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Columns = Sequence[Tensor]


class Update(ABC):
    """How one optimizer class updates a stack."""

    hypers: tuple[str, ...]
    """The numbers read from a parameter group, in the order `scalars` gets them."""
    counts: bool
    """Whether the real optimizer keeps a "step" beside its slots."""

    @abstractmethod
    def structure(self, group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        """The options that change the arithmetic itself: members must agree on them."""

    @abstractmethod
    def refusal(self, group: Mapping[str, Any]) -> str | None:
        """An option that has no stacked form, or None."""

    @abstractmethod
    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the state tensors, as the real optimizer calls them."""

    @abstractmethod
    def numbers(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        """The hyper-parameters of a group now."""

    @abstractmethod
    def scalars(self, numbers: Mapping[str, Tensor], count: Tensor) -> list[Tensor]:
        """The columns for the update number `count` (from 1), all float64."""

    @abstractmethod
    def apply(
        self,
        weight: Tensor,
        grad: Tensor,
        slots: Sequence[Tensor],
        columns: Columns,
        group: Mapping[str, Any],
    ) -> list[Tensor]:
        """The new weight and the new slots."""


class Sgd(Update):
    """torch.optim.SGD: momentum, dampening, Nesterov, weight decay."""

    hypers = ("lr", "weight_decay", "momentum", "dampening")
    counts = False

    def structure(self, group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        return (
            ("momentum", group["momentum"] != 0),
            ("nesterov", group["nesterov"]),
            ("maximize", group["maximize"]),
        )

    def refusal(self, group: Mapping[str, Any]) -> str | None:
        return None

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def numbers(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return (float(group["lr"]), group["weight_decay"], group["momentum"], group["dampening"])

    def scalars(self, numbers: Mapping[str, Tensor], count: Tensor) -> list[Tensor]:
        # torch's first momentum buffer is the gradient itself, undampened.
        gain = torch.where(count <= 1, 1.0, 1.0 - numbers["dampening"])
        return [numbers["lr"], numbers["weight_decay"], numbers["momentum"], gain]

    def apply(
        self,
        weight: Tensor,
        grad: Tensor,
        slots: Sequence[Tensor],
        columns: Columns,
        group: Mapping[str, Any],
    ) -> list[Tensor]:
        lr, decay, momentum, gain = columns
        step = (-grad if group["maximize"] else grad) + decay * weight
        if not slots:
            return [weight - lr * step]
        buffer = momentum * slots[0] + gain * step
        direction = step + momentum * buffer if group["nesterov"] else buffer
        return [weight - lr * direction, buffer]


class Adam(Update):
    """torch.optim.Adam and AdamW, without amsgrad."""

    hypers = ("lr", "weight_decay", "beta1", "beta2", "eps")
    counts = True

    def __init__(self, decoupled: bool) -> None:
        self._decoupled = decoupled

    def structure(self, group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        return (
            ("amsgrad", group["amsgrad"]),
            ("maximize", group["maximize"]),
            ("decoupled", self._is_decoupled(group)),
        )

    def _is_decoupled(self, group: Mapping[str, Any]) -> bool:
        return bool(group.get("decoupled_weight_decay", self._decoupled))

    def refusal(self, group: Mapping[str, Any]) -> str | None:
        return "amsgrad=True has no stacked update yet" if group["amsgrad"] else None

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def numbers(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        return (float(group["lr"]), group["weight_decay"], float(beta1), float(beta2), group["eps"])

    def scalars(self, numbers: Mapping[str, Tensor], count: Tensor) -> list[Tensor]:
        lr, decay, beta1, beta2 = (numbers[name] for name in ("lr", "weight_decay", "beta1", "beta2"))
        step_size = lr / (1 - beta1**count)
        root = torch.sqrt(1 - beta2**count)
        return [1 - lr * decay, decay, 1 - beta1, beta2, 1 - beta2, step_size, root, numbers["eps"]]

    def apply(
        self,
        weight: Tensor,
        grad: Tensor,
        slots: Sequence[Tensor],
        columns: Columns,
        group: Mapping[str, Any],
    ) -> list[Tensor]:
        shrink, decay, pull, beta2, rest2, step_size, root, eps = columns
        grad = -grad if group["maximize"] else grad
        if self._is_decoupled(group):
            weight = weight * shrink
        else:
            grad = grad + decay * weight
        mean = torch.lerp(slots[0], grad, pull.expand_as(grad))
        square = slots[1] * beta2 + rest2 * grad * grad
        return [weight - step_size * mean / (square.sqrt() / root + eps), mean, square]


UPDATES: dict[type[torch.optim.Optimizer], Update] = {
    torch.optim.SGD: Sgd(),
    torch.optim.Adam: Adam(decoupled=False),
    torch.optim.AdamW: Adam(decoupled=True),
}


def clipped(grad: Tensor, limit: Tensor) -> Tensor:
    """Each row's gradient scaled so that its norm is at most its limit, as `clip_grad_norm_` does."""
    norm = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
    return grad * torch.clamp(limit / (norm + 1e-6), max=1.0)
