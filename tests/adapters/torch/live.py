"""Jobs in the middle of their training, and everything of them that a step could change."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from carpool.job import Job

X, Y = torch.randn(24, 3), torch.randn(24, 1)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))


def live_jobs(count: int = 3, epochs: int = 2) -> list[Job]:
    """Models, optimizers and schedulers of the caller's own, in the middle of their training."""
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (seed + 1))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        F.mse_loss(model(X), Y).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        settings: dict[str, Any] = {"optimizer": optimizer, "scheduler": schedule, "loss": F.mse_loss}
        made.append(Job(model, (X, Y), name=f"s{seed}", seed=seed, batch_size=8, epochs=epochs, **settings))
    return made


def state_of(job: Job) -> list[Any]:
    """Everything that a step could change, with torch's counts of writes."""
    model, optimizer, schedule = job.model, job.optimizer, job.scheduler
    assert isinstance(model, nn.Module)
    tensors = [*model.parameters(), *model.buffers()]
    state = [model.state_dict(), optimizer.state_dict(), schedule.state_dict(), model.training]  # type: ignore[union-attr]
    return copy.deepcopy([*state, [t._version for t in tensors], [t.grad for t in tensors]])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other
