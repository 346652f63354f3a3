"""The update of torch.optim.NAdam."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from carpool.kernels.updates.update import Columns, Options, Update, descending, toward


class NAdam(Update):
    """Adam with Nesterov momentum.

    The product of all momenta so far is a tally, not a scalar of the step: it depends on every beta1 there was, and
    schedulers move beta1.
    """

    hypers = ("lr", "weight_decay", "beta1", "beta2", "eps", "momentum_decay")
    counts = True
    tallies = (("mu_product", 1.0),)

    def structure(self, group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
        return (("decoupled", group["decoupled_weight_decay"]), ("maximize", group["maximize"]))

    def slots(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def scalars(self, numbers: Mapping[str, Tensor], count: Tensor) -> list[Tensor]:
        lr, decay, beta1, beta2 = (numbers[name] for name in ("lr", "weight_decay", "beta1", "beta2"))
        momentum, following = (
            beta1 * (1.0 - 0.5 * 0.96 ** (place * numbers["momentum_decay"])) for place in (count, count + 1)
        )
        averages = [1 - beta1, beta2, 1 - beta2, 1 - beta2**count]
        return [lr, 1 - lr * decay, decay, *averages, numbers["eps"], momentum, following]

    def apply(
        self, weight: Tensor, grad: Tensor, slots: Sequence[Tensor], columns: Columns, options: Options
    ) -> list[Tensor]:
        lr, shrink, decay, pull, beta2, rest2, correction, eps, momentum, following = columns
        grad = descending(grad, options)
        if options["decoupled"]:
            weight = weight * shrink
        else:
            grad = grad + decay * weight
        mean = toward(slots[0], grad, pull)
        square = slots[1] * beta2 + rest2 * grad * grad
        product = slots[2] * momentum.to(
            slots[2].dtype
        )  # rounded to the tally's own type, as torch rounds it
        exact = product.to(torch.float64)
        now = (lr * (1 - momentum) / (1 - exact)).to(momentum.dtype)
        ahead = (lr * following / (1 - exact * following)).to(momentum.dtype)
        divisor = (square / correction).sqrt() + eps
        return [weight - now * grad / divisor - ahead * mean / divisor, mean, square, product]
