"""The update of torch.optim.Adagrad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from carpool.kernels.updates.update import Columns, Options, Update, descending


class Adagrad(Update):
    """Its sum of squares is there from the start, so an initial value is a member's own."""

    hypers = ("lr", "weight_decay", "lr_decay", "eps")
    counts = True
    eager = True

    def structure(self, group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        return (("maximize", group["maximize"]),)

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("sum",)

    def scalars(self, numbers: Mapping[str, Tensor], count: Tensor) -> list[Tensor]:
        step_size = numbers["lr"] / (1 + (count - 1) * numbers["lr_decay"])
        return [numbers["weight_decay"], step_size, numbers["eps"]]

    def apply(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], columns: Columns, options: Options
    ) -> list[Tensor]:
        decay, step_size, eps = columns
        grad = descending(grad, options) + decay * weight
        total = slots[0] + grad * grad
        return [weight - step_size * grad / (total.sqrt() + eps), total]
