"""The update of torch.optim.Adamax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from carpool.kernels.updates.update import Columns, Options, Update, descending, toward


class Adamax(Update):
    """Adam with the largest gradient in place of the mean square."""

    hypers = ("lr", "weight_decay", "beta1", "beta2", "eps")
    counts = True

    def structure(self, group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        return (("maximize", group["maximize"]),)

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_inf")

    def scalars(self, numbers: Mapping[str, Tensor], count: Tensor) -> list[Tensor]:
        beta1 = numbers["beta1"]
        step_size = numbers["lr"] / (1 - beta1**count)
        return [numbers["weight_decay"], 1 - beta1, numbers["beta2"], step_size, numbers["eps"]]

    def apply(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], columns: Columns, options: Options
    ) -> list[Tensor]:
        decay, pull, beta2, step_size, eps = columns
        grad = descending(grad, options) + decay * weight
        mean = toward(slots[0], grad, pull)
        largest = torch.maximum(slots[1] * beta2, grad.abs() + eps)
        return [weight - step_size * mean / largest, mean, largest]
