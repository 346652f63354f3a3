"""Early stopping inside a fused group equals early stopping written by hand."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from zoo import batch_norm, plain_objects, tables

import carpool
from carpool.result import Outcome

X, Y = tables(True)["vector"]
HELD = (X[:20], Y[:20])


def make():
    return batch_norm().double()


def job(seed: int, stop: carpool.EarlyStopping, epochs: int = 30) -> carpool.Job:
    return carpool.Job(
        make,
        (X, Y),
        validation_data=HELD,
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=0.03 * (1 + seed)),
        batch_size=16,
        epochs=epochs,
        seed=seed,
        stop=stop,
    )


def by_hand(one: carpool.Job) -> tuple[torch.nn.Module, int]:
    """Trains until the held-out loss has not improved by min_delta for `patience` epochs."""
    model, optimizer, _ = plain_objects(one)
    best, waited, kept, epoch = float("inf"), 0, None, 0
    stop = one.stop
    assert stop is not None
    for epoch in range(one.epochs):
        model.train()
        for index in torch.from_numpy(carpool.batch_order(one.seed, epoch, len(X))).split(16):
            optimizer.zero_grad()
            F.cross_entropy(model(X[index]), Y[index]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = (
                sum(
                    F.cross_entropy(model(HELD[0][i]), HELD[1][i]).item() * len(i)
                    for i in torch.arange(20).split(16)
                )
                / 20
            )
        if loss < best - stop.min_delta:
            best, waited, kept = loss, 0, copy.deepcopy(model.state_dict())
        else:
            waited += 1
        if waited >= max(1, stop.patience):
            break
    if stop.restore_best and kept is not None:
        model.load_state_dict(kept)
    return model, epoch + 1


@pytest.mark.parametrize("strategy", ["fused", "in_turn"])
@pytest.mark.parametrize("restore", [False, True])
def test_members_stop_where_a_loop_by_hand_stops(strategy, restore):
    stop = carpool.EarlyStopping("val_loss", patience=2, min_delta=1e-3, restore_best=restore)
    jobs = [job(seed, stop) for seed in range(5)]
    results = carpool.train(jobs, device="cpu", compile=False, reporters=[], strategy=strategy)
    ends = []
    for one, result in zip(jobs, results, strict=True):
        model, epochs = by_hand(one)
        ends.append(epochs)
        assert len(result.history["loss"]) == epochs
        assert result.outcome is (Outcome.STOPPED if epochs < one.epochs else Outcome.COMPLETED)
        for (name, got), expected in zip(
            result.model.state_dict().items(), model.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-7, msg=name)
    assert len(set(ends)) > 1, "the case is only worth something if members stop at different epochs"


def test_the_last_epoch_too_restores_the_best():
    stop = carpool.EarlyStopping("val_loss", patience=50, restore_best=True)
    jobs = [job(seed, stop, epochs=6) for seed in range(3)]
    for one, result in zip(jobs, carpool.train(jobs, device="cpu", compile=False, reporters=[]), strict=True):
        model, _ = by_hand(one)
        for got, expected in zip(result.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-7)
