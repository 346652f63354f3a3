"""Data that comes in batches: a loader that several jobs share, and a queue of batches made by functions."""

from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import carpool

images, labels = load_digits(return_X_y=True)
x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()
loader = DataLoader(TensorDataset(x[:1437], y[:1437]), batch_size=64, shuffle=True)


def noisy(worker):
    """One worker's batches of an epoch, with noise from a generator of its own."""
    noise = torch.Generator().manual_seed(worker)
    for rows in torch.arange(worker, 1437, 2).split(64):
        yield x[rows] + 0.1 * torch.randn(len(rows), 64, generator=noise), y[rows]


def net(hidden):
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def job(data, name, hidden, lr):
    optimizer = partial(torch.optim.SGD, lr=lr, momentum=0.9)
    return carpool.Job(
        partial(net, hidden), data, name=name, loss=F.cross_entropy, optimizer=optimizer, epochs=4
    )


jobs = [job(loader, f"loader, lr={lr}", 32, lr) for lr in (0.01, 0.03, 0.1)]  # read once for all of them
jobs.append(job(carpool.data.Queue(noisy, capacity=8, workers=2), "queue, wider", 64, 0.03))
print(carpool.plan(jobs).explain())
print(carpool.train(jobs).table(sort="loss"))
