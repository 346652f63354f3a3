"""Jobs for the command line: `carpool plan examples/jobs_file.py`, then `carpool train examples/jobs_file.py`."""

from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import carpool

EPOCHS = 5

images, labels = load_digits(return_X_y=True)
x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()


def network(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 10))


def job(hidden: int, lr: float) -> carpool.Job:
    return carpool.Job(
        partial(network, hidden),
        data=(x, y),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=0.9),
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=EPOCHS),
        epochs=EPOCHS,
    )


jobs = carpool.grid(job, hidden=[16, 32], lr=[0.01, 0.03, 0.1])
