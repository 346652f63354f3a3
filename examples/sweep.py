"""A sweep: four learning rates, eight seeds, one structure, so all 32 models train in one launch."""

from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import carpool

EPOCHS = 5

images, labels = load_digits(return_X_y=True)
x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def job(lr: float, seed: int) -> carpool.Job:
    return carpool.Job(
        make_net,
        data=(x[:1437], y[:1437]),
        validation_data=(x[1437:], y[1437:]),
        loss=F.cross_entropy,
        metrics={"accuracy": lambda prediction, target: (prediction.argmax(-1) == target).float().mean()},
        optimizer=partial(torch.optim.AdamW, lr=lr),
        epochs=EPOCHS,
        seed=seed,
    )


jobs = carpool.grid(job, lr=[1e-3, 3e-3, 1e-2, 3e-2], seed=range(8))
print(carpool.plan(jobs).explain())
results = carpool.train(jobs)
print(results.table(sort="val_accuracy", top=3))
model = results.best("val_accuracy").model  # an ordinary nn.Module
print("the best model reads the first five as", model(x[:5]).argmax(-1).tolist())
