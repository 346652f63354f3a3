"""An ensemble of 16: each member stops when its own validation loss does and keeps its own best weights."""

from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import carpool

EPOCHS = 12

images, labels = load_digits(return_X_y=True)
x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()


def job(seed: int) -> carpool.Job:
    return carpool.Job(
        lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)),
        data=(x[:1200], y[:1200]),
        validation_data=(x[1200:1500], y[1200:1500]),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=3e-2),
        epochs=EPOCHS,
        seed=seed,
        stop=carpool.EarlyStopping("val_loss", patience=2, restore_best=True),
    )


results = carpool.train(carpool.grid(job, seed=range(16)))
models = [result.model.eval() for result in results]
with torch.no_grad():
    votes = torch.stack([model(x[1500:]).softmax(-1) for model in models])
alone = (votes.argmax(-1) == y[1500:]).float().mean(-1)
together = (votes.mean(0).argmax(-1) == y[1500:]).float().mean()
print(
    f"stopped early: {sum(result.outcome is carpool.Outcome.STOPPED for result in results)} of {len(results)}"
)
print(f"accuracy of one: {alone.mean():.3f}, of the ensemble: {together:.3f}")
