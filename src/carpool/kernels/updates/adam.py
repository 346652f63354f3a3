"""The update of torch.optim.Adam and AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from carpool.kernels.updates.update import Columns, Options, Update, descending, toward


class Adam(Update):
    """With weight decay in the gradient or decoupled from it, and amsgrad."""

    hypers = ("lr", "weight_decay", "beta1", "beta2", "eps")
    counts = True

    def __init__(self, decoupled: bool) -> None:
        self._decoupled = decoupled

    def structure(self, group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        return (
            ("amsgrad", group["amsgrad"]),
            ("maximize", group["maximize"]),
            ("decoupled", bool(group.get("decoupled_weight_decay", self._decoupled))),
        )

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))

    def scalars(self, numbers: Mapping[str, Tensor], count: Tensor) -> list[Tensor]:
        lr, decay, beta1, beta2 = (numbers[name] for name in ("lr", "weight_decay", "beta1", "beta2"))
        step_size = lr / (1 - beta1**count)
        root = torch.sqrt(1 - beta2**count)
        return [1 - lr * decay, decay, 1 - beta1, beta2, 1 - beta2, step_size, root, numbers["eps"]]

    def apply(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], columns: Columns, options: Options
    ) -> list[Tensor]:
        shrink, decay, pull, beta2, rest2, step_size, root, eps = columns
        grad = descending(grad, options)
        if options["decoupled"]:
            weight = weight * shrink
        else:
            grad = grad + decay * weight
        mean = toward(slots[0], grad, pull)
        square = slots[1] * beta2 + rest2 * grad * grad
        kept = [torch.maximum(slots[2], square)] if options["amsgrad"] else []
        divisor = kept[0] if kept else square
        return [weight - step_size * mean / (divisor.sqrt() / root + eps), mean, square, *kept]
