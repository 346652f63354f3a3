"""A step of your own: a batch is a dict, the loss is whatever you compute, the rest of the dict becomes metrics."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import carpool

EPOCHS = 5

images, labels = load_digits(return_X_y=True)
x = torch.from_numpy(images).float() / 16
rare = torch.from_numpy(labels == 8)
data = {"image": x, "label": rare.long(), "weight": torch.where(rare, 5.0, 1.0)}


def step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    logits = model(batch["image"])
    losses = F.cross_entropy(logits, batch["label"], reduction="none")
    guessed = logits.argmax(-1)
    return {
        "loss": (losses * batch["weight"]).mean(),
        "accuracy": (guessed == batch["label"]).float().mean(),
        "guessed": guessed.float().mean(),
    }


def job(lr: float) -> carpool.Job:
    make = partial(nn.Linear, 64, 2)
    return carpool.Job(make, data, step=step, optimizer=partial(torch.optim.SGD, lr=lr), epochs=EPOCHS)


results = carpool.train(carpool.grid(job, lr=[0.01, 0.03, 0.1, 0.3]))
print(results.table(sort="loss"))
