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
from carpool.errors import CarpoolError, LossError, StepError

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
