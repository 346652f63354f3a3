"""GANs: a training step of two phases. Four of them learn a ring of points at once, each with its own learning rate."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import carpool

angles = torch.rand(1024) * 2 * torch.pi
ring = torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(1024, 2)


def networks() -> nn.Module:
    maker = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
    judge = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    return nn.ModuleDict({"maker": maker, "judge": judge})


def judging(model: Any, real: Tensor) -> Tensor:
    fake = model["maker"](torch.randn(len(real), 4, device=real.device))
    return F.softplus(-model["judge"](real)).mean() + F.softplus(model["judge"](fake)).mean()


def making(model: Any, real: Tensor) -> dict[str, Tensor]:
    fake = model["maker"](torch.randn(len(real), 4, device=real.device))
    return {"loss": F.softplus(-model["judge"](fake)).mean(), "radius": fake.norm(dim=1).mean()}


def job(lr: float) -> carpool.Job:
    adam = partial(torch.optim.Adam, lr=lr, betas=(0.5, 0.999))
    phases = [carpool.Phase(judging, adam, of="judge"), carpool.Phase(making, adam, of="maker")]
    return carpool.Job(networks, ring, phases=phases, batch_size=128, epochs=20)


results = carpool.train(carpool.grid(job, lr=[3e-4, 1e-3, 3e-3, 1e-2]))
print(results.table(sort="making_loss"))
