"""A loop of your own: batches, schedulers and stopping are yours; one fused step advances all models."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import carpool

EPOCHS, PATIENCE = 8, 2

images, labels = load_digits(return_X_y=True)
x, y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()
x_test, y_test = x[1437:], y[1437:]

rates = [0.01, 0.03, 0.1, 0.3]
models = [nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)) for _ in rates]
optimizers = [torch.optim.SGD(m.parameters(), lr, momentum=0.9) for m, lr in zip(models, rates, strict=True)]
schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, EPOCHS) for o in optimizers]
best = torch.full((len(rates),), torch.inf)
since = torch.zeros(len(rates))

with carpool.Stack(models, optimizers) as stack:
    for epoch in range(EPOCHS):
        for rows in torch.randperm(1437).split(64):
            losses = stack.step(F.cross_entropy, x[rows], y[rows])
        for scheduler in schedulers:
            scheduler.step()
        tested = stack.evaluate(F.cross_entropy, x_test, y_test)
        since = torch.where(tested < best, 0, since + 1)
        best = torch.minimum(best, tested)
        for i in stack.active:
            if since[i] >= PATIENCE:
                stack.drop(i)
        print(epoch, [f"{loss:.3f}" for loss in tested.tolist()], f"{len(stack.active)} go on")

outputs = carpool.predict(dict(zip(map(str, rates), models, strict=True)), x_test)
for rate, output in outputs.items():
    print(f"lr={rate}: {(output.argmax(1) == y_test).float().mean():.1%} of the test images read rightly")
