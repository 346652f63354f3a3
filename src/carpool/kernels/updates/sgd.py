"""The update of torch.optim.SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from carpool.kernels.updates.update import Columns, Options, Update, descending


class Sgd(Update):
    """Momentum, dampening, Nesterov, weight decay."""

    hypers = ("lr", "weight_decay", "momentum", "dampening")

    def structure(self, group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        return (
            ("momentum", group["momentum"] != 0),
            ("nesterov", group["nesterov"]),
            ("maximize", group["maximize"]),
        )

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def scalars(self, numbers: Mapping[str, Tensor], count: Tensor) -> list[Tensor]:
        # torch's first momentum buffer is the gradient itself, undampened.
        gain = torch.where(count <= 1, 1.0, 1.0 - numbers["dampening"])
        return [numbers["lr"], numbers["weight_decay"], numbers["momentum"], gain]

    def apply(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], columns: Columns, options: Options
    ) -> list[Tensor]:
        lr, decay, momentum, gain = columns
        step = descending(grad, options) + decay * weight
        if not slots:
            return [weight - lr * step]
        buffer = momentum * slots[0] + gain * step
        direction = step + momentum * buffer if options["nesterov"] else buffer
        return [weight - lr * direction, buffer]
