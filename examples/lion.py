"""An optimizer of your own, fused: Lion as anyone writes it, and how it updates a stack."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import carpool
from carpool.kernels.updates import Update, register


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> Any:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(lr * torch.sign(beta1 * mean + (1 - beta1) * p.grad))
                mean.lerp_(p.grad, 1 - beta2)


class LionUpdate(Update):
    hypers = ("lr", "weight_decay", "beta1", "beta2")

    def slots(self, group):
        return ("exp_avg",)

    def apply(self, weight, grad, slots, columns, options):
        lr, decay, beta1, beta2 = columns
        direction = torch.sign(beta1 * slots[0] + (1 - beta1) * grad)
        return [weight * (1 - lr * decay) - lr * direction, beta2 * slots[0] + (1 - beta2) * grad]


register(Lion, LionUpdate())
x = torch.randn(256, 8)
y = (x.sum(1) > 0).long()


def job(lr, decay):
    optimizer = partial(Lion, lr=lr, weight_decay=decay)
    return carpool.Job(partial(nn.Linear, 8, 2), (x, y), loss=F.cross_entropy, optimizer=optimizer, epochs=5)


results = carpool.train(carpool.grid(job, lr=[1e-3, 1e-2, 1e-1], decay=[0.0, 0.1]))
print(results.table(sort="loss"))
