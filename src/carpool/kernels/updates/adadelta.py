"""The update of torch.optim.Adadelta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from carpool.kernels.updates.update import Columns, Options, Update, descending


class Adadelta(Update):
    """Steps as large as the ones before them, in units of the gradient."""

    hypers = ("lr", "weight_decay", "rho", "eps")
    counts = True

    def structure(self, group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        return (("maximize", group["maximize"]),)

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    def scalars(self, numbers: Mapping[str, Tensor], count: Tensor) -> list[Tensor]:
        rho = numbers["rho"]
        return [numbers["lr"], numbers["weight_decay"], rho, 1 - rho, numbers["eps"]]

    def apply(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], columns: Columns, options: Options
    ) -> list[Tensor]:
        lr, decay, rho, rest, eps = columns
        grad = descending(grad, options) + decay * weight
        square = slots[0] * rho + rest * grad * grad
        delta = (slots[1] + eps).sqrt() / (square + eps).sqrt() * grad
        return [weight - lr * delta, square, slots[1] * rho + rest * delta * delta]
