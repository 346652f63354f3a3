"""Ten-fold cross-validation: ten models train together on views of one copy of the data."""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import KFold
from torch import nn

import carpool

EPOCHS = 5

images, labels = load_digits(return_X_y=True)
x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()
folds = list(KFold(n_splits=10, shuffle=True, random_state=0).split(images))


def job(fold: int) -> carpool.Job:
    train, held_out = folds[fold]
    return carpool.Job(
        lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        data=(x, y),  # the same two arrays for every fold, held once ...
        index=train,  # ... and the part of them that this fold reads
        validation_data=(x[held_out], y[held_out]),
        loss=F.cross_entropy,
        metrics={"accuracy": lambda prediction, target: (prediction.argmax(-1) == target).float().mean()},
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        epochs=EPOCHS,
    )


results = carpool.train(carpool.grid(job, fold=range(10)))
scores = [result.last("val_accuracy") for result in results]
print(f"accuracy over {len(scores)} folds: {np.mean(scores):.3f} ± {np.std(scores):.3f}")
