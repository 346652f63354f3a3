"""The update of torch.optim.RMSprop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from carpool.kernels.updates.update import Columns, Options, Update, descending, toward


class RmsProp(Update):
    """Centered or not, with or without momentum."""

    hypers = ("lr", "weight_decay", "alpha", "eps", "momentum")
    counts = True

    def structure(self, group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        return (
            ("momentum", group["momentum"] > 0),
            ("centered", group["centered"]),
            ("maximize", group["maximize"]),
        )

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
        return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))

    def scalars(self, numbers: Mapping[str, Tensor], count: Tensor) -> list[Tensor]:
        lr, decay, alpha = numbers["lr"], numbers["weight_decay"], numbers["alpha"]
        return [lr, decay, alpha, 1 - alpha, numbers["eps"], numbers["momentum"]]

    def apply(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], columns: Columns, options: Options
    ) -> list[Tensor]:
        lr, decay, alpha, rest, eps, momentum = columns
        grad = descending(grad, options) + decay * weight
        square = slots[0] * alpha + rest * grad * grad
        mean = [toward(slots[-1], grad, rest)] if options["centered"] else []
        spread = square - mean[0] * mean[0] if mean else square
        step = grad / (spread.sqrt() + eps)
        if not options["momentum"]:
            return [weight - lr * step, square, *mean]
        buffer = slots[1] * momentum + step
        return [weight - lr * buffer, square, buffer, *mean]
