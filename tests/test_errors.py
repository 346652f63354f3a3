"""Every misuse says what was expected, what was received and what to do, and none is a surprise of its type."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import carpool
from carpool import CarpoolError, Outcome, Result, Results, errors
from carpool.errors import (
    DataError,
    DeviceError,
    FusionError,
    JobError,
    LossError,
    ModelError,
    NameTakenError,
    OptimizerError,
    OptionError,
    StepError,
    described,
    sentence,
)

X, Y = torch.ones(6, 2), torch.ones(6, 1)
SGD = partial(torch.optim.SGD, lr=0.1)


def job(**options: Any) -> carpool.Job:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 1),
        "data": (X, Y),
        "loss": F.mse_loss,
        "optimizer": SGD,
    }
    settings |= options
    return carpool.Job(settings.pop("model"), settings.pop("data"), **settings)


def trained(*jobs: carpool.Job, **options: Any) -> Results:
    return carpool.train(jobs or [job()], **{"device": "cpu", "reporters": [], "compile": False, **options})


def with_optimizer_of_another_model() -> Results:
    return trained(
        job(model=nn.Linear(2, 1), optimizer=torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))
    )


def with_scheduler_of_another_optimizer() -> Results:
    other = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    return trained(job(scheduler=torch.optim.lr_scheduler.StepLR(other, 1)))


def with_one_model_twice() -> Results:
    model = nn.Linear(2, 1)
    return trained(job(model=model), job(model=model))


FINISHED = Results([Result("a", Outcome.COMPLETED, history={"loss": [0.5]})])
STOP = carpool.EarlyStopping

MISUSE: dict[str, tuple[type[CarpoolError], Callable[[], Any]]] = {
    "empty name": (NameTakenError, lambda: job(name=" ")),
    "name twice": (NameTakenError, lambda: trained(job(name="a"), job(name="a"))),
    "no jobs": (JobError, lambda: carpool.train([])),
    "not a job": (JobError, lambda: carpool.plan([3])),  # type: ignore[list-item]
    "no data": (DataError, lambda: job(data=None)),
    "empty data": (DataError, lambda: trained(job(data=(X[:0], Y[:0])))),
    "no arrays": (DataError, lambda: trained(job(data=((), ())))),
    "not a pair": (DataError, lambda: trained(job(data=X))),
    "not arrays": (DataError, lambda: trained(job(data=([1.0], [2.0])))),
    "lengths that differ": (DataError, lambda: trained(job(data=(X, Y[:5])))),
    "index too large": (DataError, lambda: trained(job(index=[0, 6]))),
    "index below zero": (DataError, lambda: trained(job(index=[-1]))),
    "index of nothing": (DataError, lambda: trained(job(index=[]))),
    "empty validation data": (DataError, lambda: trained(job(validation_data=(X[:0], Y[:0])))),
    "batch size 0": (JobError, lambda: job(batch_size=0)),
    "epochs 0": (JobError, lambda: job(epochs=0)),
    "seed of no number": (JobError, lambda: job(seed="a")),
    "clip to 0": (JobError, lambda: job(clip_norm=0.0)),
    "loss and step": (LossError, lambda: job(step=lambda model, batch: 0)),
    "neither loss nor step": (LossError, lambda: trained(job(loss=None))),
    "loss of no function": (LossError, lambda: job(loss="mse")),
    "metric of no function": (LossError, lambda: job(metrics={"acc": 1})),
    "loss of no scalar": (LossError, lambda: trained(job(loss=lambda p, t: (p - t) ** 2))),
    "loss of no tensor": (LossError, lambda: trained(job(loss=lambda p, t: 0.5))),
    "metric of no scalar": (LossError, lambda: trained(job(metrics={"gap": lambda p, t: p - t}))),
    "step without loss": (LossError, lambda: trained(job(loss=None, step=lambda m, b: {"acc": m(b[0]).mean()}))),
    "stop of another kind": (OptionError, lambda: job(stop=3)),
    "stop on unknown metric": (OptionError, lambda: job(stop=STOP("accuracy"))),
    "stop without validation": (OptionError, lambda: job(stop=STOP("val_loss"))),
    "stop with impatience": (OptionError, lambda: STOP("loss", patience=-1)),
    "stop in an unknown mode": (OptionError, lambda: STOP("loss", mode="up")),
    "schedule at no time": (OptionError, lambda: carpool.Schedule(print, every="batch")),
    "axis without values": (JobError, lambda: carpool.grid(job, seed=[])),
    "grid of no jobs": (JobError, lambda: carpool.grid(lambda seed: None, seed=[0])[0]),  # type: ignore[arg-type,return-value]
    "model of no framework": (ModelError, lambda: trained(job(model=3))),
    "factory of no model": (ModelError, lambda: trained(job(model=dict))),
    "module that is not there": (ModelError, lambda: trained(job(model="no_such_module:net"))),
    "one model twice": (ModelError, with_one_model_twice),
    "no optimizer": (OptimizerError, lambda: trained(job(optimizer=None))),
    "optimizer of no function": (OptimizerError, lambda: trained(job(optimizer="sgd"))),
    "factory of no optimizer": (OptimizerError, lambda: trained(job(optimizer=list))),
    "optimizer of another model": (OptimizerError, with_optimizer_of_another_model),
    "scheduler of another optimizer": (OptimizerError, with_scheduler_of_another_optimizer),
    "unknown strategy": (OptionError, lambda: trained(strategy="fast")),
    "unknown device": (DeviceError, lambda: trained(device="tpu")),
    "gpu that is not there": (DeviceError, lambda: trained(device="cuda:99")),
    "unknown on_error": (OptionError, lambda: trained(on_error="ignore")),
    "unknown compile": (OptionError, lambda: trained(compile="maybe")),
    "unknown reporters": (OptionError, lambda: trained(reporters="loud")),
    "best by unknown metric": (OptionError, lambda: FINISHED.best("val_loss")),
    "best in an unknown mode": (OptionError, lambda: FINISHED.best("loss", mode="up")),
    "table by unknown metric": (OptionError, lambda: FINISHED.table(sort="acc")),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_says_expected_received_and_remedy(case: str):
    kind, misuse = MISUSE[case]
    with pytest.raises(CarpoolError) as caught:
        misuse()
    assert type(caught.value) is kind
    assert re.fullmatch(r"(Job .+: )?Expected \S.+\. Received: \S.*\. Remedy: \S.+[.?]", str(caught.value))


@pytest.mark.parametrize(
    "case", ["no data", "epochs 0", "loss of no scalar", "no optimizer", "lengths that differ"]
)
def test_misuse_of_one_job_names_it(case: str):
    with pytest.raises(CarpoolError, match=r"^Job (None|'job-0'): "):
        MISUSE[case][1]()


def test_an_unknown_name_of_a_result_is_an_ordinary_key_error():
    with pytest.raises(KeyError, match="Expected the name of a job"):
        FINISHED["b"]


# The tree


OWN = [kind for kind in vars(errors).values() if inspect.isclass(kind) and kind.__module__ == errors.__name__]


def test_every_error_has_one_root():
    assert {kind for kind in OWN if not issubclass(kind, CarpoolError)} == {carpool.Interrupted}


def test_the_drawn_tree_is_the_real_one():
    """A level of the tree is four characters of the drawing."""
    lines = re.findall(r"^([│├└─ ]*)([A-Z]\w+) ", (errors.__doc__ or "") + " ", re.MULTILINE)
    drawn = {name: len(indent) // 4 for indent, name in lines if inspect.isclass(getattr(errors, name, None))}
    real = {kind.__name__: sum(issubclass(base, CarpoolError) for base in kind.__mro__[1:]) for kind in OWN}
    assert drawn == {name: depth for name, depth in real.items() if name != "CarpoolError"}


@pytest.mark.parametrize("kind", [JobError, DeviceError, OptionError, FusionError])
def test_misuse_is_a_value_error_too(kind: type[Exception]):
    assert issubclass(kind, ValueError)


def test_a_failed_step_is_a_runtime_error_too():
    assert issubclass(StepError, RuntimeError)


def test_an_interruption_is_a_keyboard_interrupt_with_results():
    stopped = carpool.Interrupted(FINISHED)
    assert isinstance(stopped, KeyboardInterrupt)
    assert not isinstance(stopped, Exception)
    assert stopped.results is FINISHED


# The words


def test_a_sentence_has_three_parts():
    assert sentence("a", "b", "c") == "Expected a. Received: b. Remedy: c."


def test_an_error_is_described_in_one_line():
    assert described(ValueError("two\n  lines")) == "ValueError: two lines"
    assert described(ValueError()) == "ValueError"
    assert described(ValueError("\x1b[31mred\udc80")) == r"ValueError: \x1b[31mred\udc80"


def test_an_error_whose_text_cannot_be_had_is_described_too():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert described(Mute()) == "Mute: its text cannot be had"
