"""The update of torch.optim.RAdam."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from carpool.kernels.updates.update import Columns, Options, Update, descending, toward

_RECTIFIED_ABOVE = 5.0  # torch's own threshold for the length of the average


class RAdam(Update):
    """Adam that divides by the mean square only once enough gradients are in it."""

    hypers = ("lr", "weight_decay", "beta1", "beta2", "eps")
    counts = True

    def structure(self, group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        return (("decoupled", group["decoupled_weight_decay"]), ("maximize", group["maximize"]))

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def scalars(self, numbers: Mapping[str, Tensor], count: Tensor) -> list[Tensor]:
        lr, decay, beta1, beta2 = (numbers[name] for name in ("lr", "weight_decay", "beta1", "beta2"))
        correction = 1 - beta2**count
        limit = 2 / (1 - beta2) - 1
        length = limit - 2 * count * beta2**count / correction
        rectified = length > _RECTIFIED_ABOVE
        square = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
        gain = torch.where(rectified, square.sqrt() * correction.sqrt(), 0.0)
        averages = [1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**count)]
        return [1 - lr * decay, decay, *averages, numbers["eps"], rectified.to(torch.float64), gain]

    def apply(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], columns: Columns, options: Options
    ) -> list[Tensor]:
        shrink, decay, pull, beta2, rest2, step_size, eps, rectified, gain = columns
        grad = descending(grad, options)
        if options["decoupled"]:
            weight = weight * shrink
        else:
            grad = grad + decay * weight
        mean = toward(slots[0], grad, pull)
        square = slots[1] * beta2 + rest2 * grad * grad
        factor = torch.where(rectified > 0, gain / (square.sqrt() + eps), 1.0)
        return [weight - step_size * mean * factor, mean, square]
