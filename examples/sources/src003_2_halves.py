"""Two models of one structure, each on its half of the data, trained on one device in the same launches."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import carpool

random = torch.Generator().manual_seed(0)
x = torch.randn(128, 8, generator=random)
y = (x[:, :1] > 0).long().squeeze(1)
HALVES = {"first": range(64), "second": range(64, 128)}


def job(name, seed):
    """Each reads a view of the one copy of the data."""
    return carpool.Job(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), (x, y), index=HALVES[name],
        loss=F.cross_entropy, optimizer=partial(torch.optim.Adam, lr=0.01), epochs=5, seed=seed, name=name,
    )  # fmt: skip


def main():
    results = carpool.train([job("first", 1), job("second", 2)], device="cpu", strategy="fused", reporters=[])
    [alone] = carpool.train([job("second", 2)], device="cpu", reporters=[])
    pairs = zip(results["second"].model.parameters(), alone.model.parameters(), strict=True)
    return {
        "strategies": [result.strategy for result in results],
        "losses": {result.name: list(result.history["loss"]) for result in results},
        "apart": max(float((one - other).abs().max().detach()) for one, other in pairs),
    }


if __name__ == "__main__":
    print(main())
