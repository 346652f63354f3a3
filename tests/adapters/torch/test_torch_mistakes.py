"""The most common mistakes with torch: each gets one error that says whose it is, what was expected, what came and what to do."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import carpool
from begun import assert_nothing_ran
from carpool.errors import CarpoolError, DataError, JobError, LossError, StepError

X, Y = torch.ones(6, 2), torch.ones(6, 1)
SGD = partial(torch.optim.SGD, lr=0.1)


def job(**options: Any) -> carpool.Job:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 1),
        "data": (X, Y),
        "loss": F.mse_loss,
        "optimizer": SGD,
        "name": "a",
        **options,
    }
    return carpool.Job(settings.pop("model"), settings.pop("data"), **settings)


def refused(made: carpool.Job, error: type[CarpoolError], match: str) -> None:
    """Before anything runs."""
    seen: list[Any] = []
    with pytest.raises(error, match=match) as caught:
        carpool.train([made], device="cpu", reporters=[seen.append])
    assert str(caught.value).startswith("Job 'a': Expected ")
    assert " Remedy: " in str(caught.value)
    assert_nothing_ran(seen)


# A value under the name of another


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"loss": 1.0, 3: 2.0}, "names of values that are text. Received: 3"),
        ({"loss": 1.0, "val_loss": 2.0}, "'val_loss' to be what validation shows of 'loss'"),
        ({"loss": 1.0, "acc": 0.5, "val_acc": 2.0}, "'val_acc' to be what validation shows of 'acc'"),
    ],
)
def test_a_value_of_a_step_under_the_name_of_another_is_refused(made: dict[Any, float], said: str):
    def step(model: nn.Module, batch: Any) -> Any:
        return {name: value * model(batch[0]).mean() for name, value in made.items()}

    refused(job(loss=None, step=step, validation_data=(X, Y)), LossError, said)


def test_a_loss_of_validation_may_be_shown_by_a_step_where_nothing_else_shows_it():
    def step(model: nn.Module, batch: Any) -> Any:
        loss = model(batch[0]).mean()
        return {"loss": loss, "val_loss": loss}

    [result] = carpool.train(job(loss=None, step=step), device="cpu", reporters=[])
    assert set(result.history) == {"loss", "val_loss"}


def test_a_value_of_a_phase_under_the_name_of_its_loss_is_refused():
    def step(model: nn.Module, batch: Any) -> Any:
        return {"loss": model(batch[0]).mean(), "d_loss": model(batch[0]).sum()}

    phases = [carpool.Phase(step, SGD, name="d")]
    refused(job(loss=None, optimizer=None, phases=phases), LossError, "d_loss to be the loss of phase 'd'")


def test_a_phase_whose_loss_would_be_validations_is_refused():
    phases = [carpool.Phase(lambda model, batch: model(batch[0]).mean(), SGD, name="val")]
    with pytest.raises(CarpoolError, match=r"^Job 'a': Expected a name whose loss is not \"val_loss\""):
        job(loss=None, optimizer=None, phases=phases)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any) -> Any:
        return self.net(batch[0]).mean()

    def validation_step(self, batch: Any) -> Any:
        self.log("acc", self.net(batch[0]).mean())
        self.log("val_acc", self.net(batch[0]).sum())

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters())


def test_a_value_that_validation_logs_twice_is_refused():
    made = carpool.Job(Module, (X, Y), validation_data=(X, Y), name="a")
    refused(made, LossError, "log each value once. Received: both 'acc' and 'val_acc'")


def test_what_a_loop_yields_has_names():
    def steps() -> Any:
        yield {"loss": 1.0, 3: 2.0}

    with pytest.raises(StepError, match=r"^Loop 'a': Expected names of values that are text. Received: 3"):
        carpool.train(carpool.Loop(steps, name="a"), device="cpu", reporters=[])


# Data that the model or the loss does not take

CLASSES = torch.tensor([0, 1, 2, 0, 1, 2])
THREE: dict[str, Any] = {"model": lambda: nn.Linear(2, 3), "loss": F.cross_entropy}
MISFITS: dict[str, tuple[dict[str, Any], str, str]] = {
    "float64 of NumPy": (
        {"data": (X.numpy().astype("float64"), Y.numpy().astype("float64"))},
        "data of the type that the model's weights have. Received: x of (6, 2) float64, y of (6, 1) float64",
        'x.astype("float32")',
    ),
    "pictures of bytes": (
        {"model": lambda: nn.Conv2d(1, 1, 2), "data": (torch.ones(6, 1, 2, 2, dtype=torch.uint8), Y)},
        "the type that the model's weights have. Received: x of (6, 1, 2, 2) uint8",
        "x.float() of torch",
    ),
    "wrong width": (
        {"model": lambda: nn.Linear(3, 1)},
        "data of the shape that the model and the loss take. Received: x of (6, 2) float32",
        "first layer as wide as a sample of x",
    ),
    "wrong channels": (
        {"model": lambda: nn.Conv2d(3, 1, 1), "data": (torch.ones(6, 1, 2, 2), Y)},
        "data of the shape that the model and the loss take. Received: x of (6, 1, 2, 2) float32",
        "first layer as wide as a sample of x",
    ),
    "float targets": (
        {**THREE, "data": (X, CLASSES.float())},
        "class numbers, of an integer type (int64 in torch). Received: x of (6, 2) float32, y of (6,) float32",
        'y.long() of torch, y.astype("int64") of NumPy',
    ),
    "a column of targets": (
        {**THREE, "data": (X, CLASSES[:, None])},
        "targets of the shape that the loss takes, such as one class number for each sample",
        "y.squeeze(1)",
    ),
    "more classes than outputs": (
        {**THREE, "data": (X, CLASSES + 1)},
        "from 0 to one below their count",
        "count from 0",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
@pytest.mark.parametrize("count", [1, 2])
def test_data_that_does_not_fit_is_one_clear_error_and_no_word_before_it(
    case: str, count: int, capfd: pytest.CaptureFixture[str]
):
    options, expected, remedy = MISFITS[case]
    made = [job(**{**options, "name": name}) for name in "ab"[:count]]
    with pytest.raises(DataError) as caught:
        carpool.train(made, device="cpu", reporters=[])
    said = str(caught.value)
    assert said.startswith("Job 'a': Expected ")
    assert expected in said
    assert f"({type(caught.value.__cause__).__name__}: " in said
    assert remedy in said.partition(" Remedy: ")[2]
    assert capfd.readouterr() == ("", "")


def test_data_that_does_not_fit_one_job_costs_the_others_nothing(capfd: pytest.CaptureFixture[str]):
    results = carpool.train(
        [job(name="wide", model=lambda: nn.Linear(3, 1)), job(name="fits")], device="cpu", reporters=[]
    )
    assert [result.outcome for result in results] == [carpool.Outcome.FAILED, carpool.Outcome.COMPLETED]
    assert str(results["wide"].error).startswith("Job 'wide': Expected data of the shape")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("on_error", ["collect", "raise"])
def test_an_error_of_the_users_own_stays_as_it_is_and_says_whose_it_is(on_error: str):
    def loss(prediction: Any, target: Any) -> Any:
        raise RuntimeError("of my own")

    with pytest.raises(RuntimeError, match=r"^of my own") as caught:
        carpool.train([job(loss=loss)], device="cpu", reporters=[], on_error=on_error)
    assert caught.value.__notes__ == ["raised by job 'a'"]


def test_callbacks_of_another_framework_are_refused():
    class Theirs:
        def on_epoch_end(self, epoch: int) -> None: ...

    refused(job(callbacks=[Theirs()]), JobError, "callbacks of a torch job that are functions")


# Words that a newcomer writes


def planned(**options: Any) -> Any:
    return carpool.plan(job(**options), device="cpu")


SCHEDULERS = torch.optim.lr_scheduler
NEWCOMERS: dict[str, tuple[Any, str]] = {
    "a scheduler without its arguments": (
        lambda: planned(scheduler=SCHEDULERS.StepLR),
        "Job 'a': Expected a function of the optimizer alone that makes a scheduler. "
        "Received: StepLR, which also wants step_size. Remedy: pass partial(StepLR, step_size=10).",
    ),
    "one that steps at each batch": (
        lambda: planned(scheduler=SCHEDULERS.OneCycleLR),
        "Received: OneCycleLR, which also wants max_lr. Remedy: pass partial(OneCycleLR, max_lr=0.1).",
    ),
    "an optimizer without its arguments": (
        lambda: planned(optimizer=lambda parameters, lr: None),
        "which also wants lr. Remedy: pass partial(lambda, lr=...).",
    ),
    "a model's class": (
        lambda: planned(model=nn.Linear),
        "Job 'a': Expected a function of nothing that makes a model. Received: Linear, which also wants "
        "in_features, out_features. Remedy: pass partial(Linear, in_features=..., out_features=...).",
    ),
    "an optimizer's name": (
        lambda: job(optimizer="adam"),
        "Job 'a': Expected an optimizer, or a function that makes one. Received: 'adam'. "
        "Remedy: pass a function of parameters: partial(torch.optim.Adam, lr=1e-3), or optax.adam(1e-3)",
    ),
    "a loss's name": (
        lambda: job(loss="cross_entropy"),
        "Job 'a': Expected loss to be a function. Received: 'cross_entropy'. "
        "Remedy: pass a function: loss=torch.nn.functional.cross_entropy, or the mean of optax.",
    ),
    "a loss's name as Keras has it": (
        lambda: job(loss="sparse_categorical_crossentropy"),
        "Remedy: pass a function: loss=torch.nn.functional.cross_entropy",
    ),
    "a list of metrics": (
        lambda: job(metrics=[F.l1_loss]),
        "Job 'a': Expected metrics as a dict of functions by name. Received: [<function l1_loss",
    ),
    "an axis that is one number": (
        lambda: carpool.grid(lambda lr: job(), lr=0.1),  # type: ignore[arg-type]
        "Expected a list of values for axis 'lr'. Received: lr=0.1. Remedy: pass lr=[0.1].",
    ),
    "a job instead of a function": (
        lambda: carpool.grid(job(), lr=[0.1]),  # type: ignore[arg-type]
        "Remedy: pass a function that returns a carpool.Job.",
    ),
    "a word that is nearly an argument": (
        lambda: job(batchsize=3),
        "Expected an argument of Job. Received: batchsize=. Remedy: did you mean 'batch_size='?",
    ),
    "a metric that is nearly there": (
        lambda: carpool.train(job(metrics={"accuracy": F.l1_loss}), device="cpu", reporters=[]).best("acc"),
        "Expected one of the metrics loss, accuracy. Received: 'acc'. Remedy: did you mean 'accuracy'?",
    ),
}


@pytest.mark.parametrize("case", NEWCOMERS)
def test_what_newcomers_write_is_told_what_to_write(case: str, capfd: pytest.CaptureFixture[str]):
    call, said = NEWCOMERS[case]
    with pytest.raises(CarpoolError) as caught:
        call()
    assert said in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_one_job_is_a_list_of_one():
    [result] = carpool.train(job(), device="cpu", reporters=[])
    assert result.outcome is carpool.Outcome.COMPLETED
