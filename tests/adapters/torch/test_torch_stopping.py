"""Early stopping inside a fused group equals early stopping written by hand."""

import copy
from functools import partial
from typing import Any

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


def job(seed: int, stop: carpool.EarlyStopping, epochs: int = 30, **options: Any) -> carpool.Job:
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
        **options,
    )


def held_loss(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(copy.deepcopy(model).eval()(HELD[0]), HELD[1]))


def minus_loss(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -F.cross_entropy(prediction, target)


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


@pytest.mark.parametrize("strategy", ["fused", "in_turn", "isolated"])
def test_a_result_says_whose_epoch_its_weights_are(strategy):
    """And ranks by the value of the weights in hand, not by the last epoch's."""
    stop = carpool.EarlyStopping("val_loss", patience=3, min_delta=1e-3, restore_best=True)
    jobs = [job(seed, stop) for seed in range(3)]
    results = carpool.train(jobs, device="cpu", strategy=strategy, compile=False, reporters=[])
    assert any(result.is_restored for result in results), "or this tells nothing"
    for result in results:
        seen = result.history["val_loss"]
        assert result.epoch is not None
        assert seen[result.epoch] == result.metric("val_loss") == pytest.approx(held_loss(result.model))
    best = results.best("val_loss")
    assert best.metric("val_loss") == min(result.metric("val_loss") for result in results)
    assert results.rows(sort="val_loss")[0]["epoch"] == best.epoch


def test_a_metric_of_unknown_direction_stops_as_its_mode_says():
    """The epoch of the highest value is put back, and the best is known without saying the mode again."""
    with pytest.raises(carpool.CarpoolError, match="'val_map'"):
        carpool.EarlyStopping("val_map", restore_best=True)
    stop = carpool.EarlyStopping("val_map", patience=9, restore_best=True, mode="max")
    jobs = [job(seed, stop, epochs=4, metrics={"map": minus_loss}) for seed in range(3)]
    results = carpool.train(jobs, device="cpu", compile=False, reporters=[])
    for result in results:
        assert (
            result.metric("val_map")
            == max(result.history["val_map"])
            == result.history["val_map"][result.epoch or 0]
        )
    best = results.best("val_map")
    assert best.metric("val_map") == max(result.metric("val_map") for result in results)


def test_the_last_epoch_too_restores_the_best():
    stop = carpool.EarlyStopping("val_loss", patience=50, restore_best=True)
    jobs = [job(seed, stop, epochs=6) for seed in range(3)]
    for one, result in zip(jobs, carpool.train(jobs, device="cpu", compile=False, reporters=[]), strict=True):
        model, _ = by_hand(one)
        for got, expected in zip(result.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-7)
