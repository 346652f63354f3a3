"""Every argument of the public functions is refused by type and range before anything runs: a table of wrong values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from fractions import Fraction
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import carpool
from carpool.arguments import Arguments, missing
from carpool.data import Queue, Reader
from carpool.errors import CarpoolError

DATA = ([1.0], [2.0])
NAN, HUGE = float("nan"), 1 << 80
X, Y = torch.ones(6, 2), torch.ones(6, 1)


def make(**options: Any) -> carpool.Job:
    return carpool.Job(**{"model": dict, "data": DATA, "loss": max, "name": "a", **options})


def trainable() -> carpool.Job:
    sgd = partial(torch.optim.SGD, lr=0.1)
    return carpool.Job(lambda: nn.Linear(2, 1), (X, Y), loss=nn.functional.mse_loss, optimizer=sgd)


def train(**options: Any) -> Any:
    return carpool.train(**{"jobs": [trainable()], "device": "cpu", "reporters": [], **options})


def plan(**options: Any) -> Any:
    return carpool.plan(**{"jobs": [trainable()], "device": "cpu", **options})


def steps(to: int) -> Iterator[Mapping[str, float]]:
    yield {"loss": float(to)}


def loop(**options: Any) -> carpool.Job:
    return carpool.Loop(options.pop("function", steps), 3, **options)


def stack(**options: Any) -> carpool.Stack:
    models = [nn.Linear(2, 1) for _ in range(2)]
    made = {"models": models, "optimizers": [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]}
    return carpool.Stack(**{**made, **options})


def step(**options: Any) -> Any:
    return stack().step(nn.functional.mse_loss, X, Y, **options)


def evaluate(**options: Any) -> Any:
    return stack().evaluate(nn.functional.mse_loss, X, Y, **options)


def predict(**options: Any) -> Any:
    return carpool.predict(
        **{"models": [nn.Linear(2, 1)], "inputs": torch.ones(3, 2), "device": "cpu", **options}
    )


def order(**options: Any) -> Any:
    return carpool.batch_order(**{"seed": 0, "epoch": 0, "length": 4, **options})


def mapped(**options: Any) -> Any:
    return carpool.map(**{"function": abs, "configs": [], **options})


def grid(make_job: Any = make, **axes: Any) -> Any:
    return carpool.grid(make_job, **axes)


def fitted(**options: Any) -> Any:
    return carpool.fit(**{"models": {"a": "no_such_module:model"}, "x": X, "y": Y, **options})


def done() -> carpool.Results:
    return carpool.Results([carpool.Result("a", carpool.Outcome.COMPLETED, history={"loss": [0.5]})])


def best(**options: Any) -> Any:
    return done().best(**{"metric": "loss", **options})


def rows(**options: Any) -> Any:
    return done().rows(**options)


def table(**options: Any) -> Any:
    return done().table(**options)


def save(**options: Any) -> Any:
    return done().save(**options)


def reader(**options: Any) -> Reader:
    return Reader(**{"passes": lambda epoch: [1], "capacity": 1, **options})


def queue(**options: Any) -> Queue:
    return Queue(**{"source": lambda worker: [1], **options})


def phase(**options: Any) -> carpool.Phase:
    return carpool.Phase(**{"step": max, "optimizer": print, **options})


WHOLE = (2.5, 2.0, True, "3", None, [1], NAN, np.array([1, 2]), np.bool_(True))
COUNT = (*WHOLE, 0, -1, HUGE)
ROWS = (2.5, 2.0, True, "3", [1], NAN, -1)
PATH = (None, 3, "", "  ", ["a"], b"a")
MODE = ("up", None, 3, True)
PLAIN = (3, 0.1, True, [max], b"adam")
FLAG = (0, 1, None, "yes", "False", 1.0)
POSITIVE = (0, -1.0, NAN, True, "1", [1.0], 1j)
SECONDS = (*POSITIVE, float("inf"))
SHARE = (0, -0.5, 1.5, NAN, True, "0.5", float("inf"))
NAME = ("", "  ", 3, b"a", ["a"])
SIZE = ("", "much", "-1GiB", 0, -5, 1.5, True, "0%", [1], {})
FUNCTION = (3, "f", [max])
NO_LIST = (None, 3, "ab", {"a": 1}, max)

Case = tuple[Callable[..., Any], str, tuple[Any, ...], str]
TABLE: list[Case] = [
    (make, "name", NAME, "a name"),
    (make, "config", ([1], "lr", 3, {1: 2}), "config"),
    (make, "loss", FUNCTION, "loss to be a function"),
    (partial(make, loss=None), "step", FUNCTION, "step to be a function"),
    (make, "optimizer", ("adam", "SGD", "", *PLAIN), "an optimizer, or a function that makes one"),
    (make, "scheduler", ("cosine", "", *PLAIN), "a scheduler, or a function that makes one"),
    (make, "metrics", ([max], max, "accuracy", 3, {1: max}, {"acc": "acc"}, {"acc": None}), "metric"),
    (make, "metrics", ({"loss": max}, {"val_acc": max}, {" ": max}), "metrics with names of their own"),
    (make, "batch_size", COUNT, "batch_size of at "),
    (make, "epochs", COUNT, "epochs of at "),
    (make, "accumulate", COUNT, "accumulate of at "),
    (make, "prefetch", COUNT, "prefetch of at "),
    (make, "seed", WHOLE, "seed that is a whole number"),
    (make, "priority", (*WHOLE, 17, -17, HUGE), "priority"),
    (make, "shuffle", (*FLAG, "batch"), "shuffle=True or shuffle=False"),
    (make, "clip_norm", POSITIVE, "a clip_norm above 0"),
    (make, "precision", ("fp16", 16, None, torch.float32), "a precision out of"),
    (partial(make, loss=None), "phases", ([], 3, max, "phase", [max], carpool.Phase), "phase"),
    (make, "stop", (3, "val_loss", max, carpool.EarlyStopping), "stop=EarlyStopping"),
    (make, "callbacks", NO_LIST, "callbacks as a list"),
    (make, "callbacks", ([1], ["stop"], [max, None]), "callbacks that are functions"),
    (make, "model", (None,), "a model, or a function that makes one"),
    (make, "data", (None,), "data"),
    (make, "budget", ("auto", "50%", *SIZE), "budget as a size"),
    (make, "share", SHARE, "a share above 0 and up to 1"),
    (make, "timeout_s", SECONDS, "a timeout_s "),
    (make, "fit", ([1], "verbose", {1: 2}), "fit"),
    (phase, "step", (None, *FUNCTION), "a phase's step to be a function"),
    (phase, "optimizer", ("adam", None, *PLAIN), "an optimizer, or a function that makes one"),
    (phase, "scheduler", ("cosine", *PLAIN), "a scheduler, or a function that makes one"),
    (phase, "every", COUNT, "a phase's every of at "),
    (phase, "of", NAME, "a submodule's name"),
    (phase, "name", NAME, "a phase's name"),
    (carpool.Schedule, "scheduler", (None, "cosine", *PLAIN), "a scheduler, or a function that makes one"),
    (partial(carpool.Schedule, max), "every", ("batch", None, 1, True), 'every="auto", "step" or "epoch"'),
    (partial(carpool.Schedule, max), "monitor", NAME, "a metric's name as monitor"),
    (carpool.EarlyStopping, "metric", (None, *NAME), "a metric's name"),
    (carpool.EarlyStopping, "patience", (*WHOLE, -1, HUGE), "a patience of at "),
    (carpool.EarlyStopping, "min_delta", (-0.1, NAN, True, "0", None), "a min_delta of at least 0"),
    (carpool.EarlyStopping, "min_delta", (float("inf"),), "a min_delta that is finite"),
    (partial(carpool.EarlyStopping, "loss"), "mode", MODE, 'mode "auto", "min" or "max"'),
    (carpool.EarlyStopping, "restore_best", FLAG, "restore_best=True or restore_best=False"),
    (grid, "make_job", (None, *FUNCTION), "make_job to be a function"),
    (grid, "lr", (0.1, "abc", None, {1: 2}, {3, 4}, b"ab", np.float64(1)), "a list of values for axis 'lr'"),
    (grid, "lr", ([], (), range(0)), "values for axis 'lr'"),
    (train, "jobs", (None, 3, {"a": 1}), "a list of carpool.Job"),
    (train, "jobs", ("ab", [3], [None]), "carpool.Job objects"),
    (train, "jobs", ([], ()), "at least one job"),
    (plan, "jobs", (None, 3, {"a": 1}), "a list of carpool.Job"),
    (plan, "jobs", ("ab", [3], [None]), "carpool.Job objects"),
    (plan, "jobs", ([], ()), "at least one job"),
    (fitted, "models", (None, 3, "ab", [], {}, [None], {"a": torch.nn.Linear(2, 1)}), "model"),
    (fitted, "x", (None,), "data"),
    (fitted, "x", (carpool.each(b=X),), "names out of a"),
    (fitted, "y", (carpool.each(Y, Y),), "with 1 values, one for each model"),
    (fitted, "device", (None, 0), "a device's name as text"),
    (fitted, "memory", (carpool.each(a="1GiB"),), "one memory for the run"),
    (fitted, "epochs", COUNT[:4], "epochs of at "),
    (best, "metric", (None, 3, "lss", ["loss"]), "one of the metrics loss"),
    (best, "mode", MODE, 'mode "auto", "min" or "max"'),
    (rows, "sort", (3, "lss", ["loss"]), "one of the metrics loss"),
    (rows, "top", ROWS, "top "),
    (rows, "mode", MODE, 'mode "auto", "min" or "max"'),
    (table, "sort", (3, "lss", ["loss"]), "one of the metrics loss"),
    (table, "top", ROWS, "top "),
    (table, "mode", MODE, 'mode "auto", "min" or "max"'),
    (save, "folder", PATH, "a folder as a path"),
    (carpool.load, "folder", PATH, "a folder as a path"),
    (train, "device", (None, 0, torch.device("cpu"), ["cpu"]), "a device's name as text"),
    (train, "memory", (None, *SIZE), "memory="),
    (train, "strategy", ("fuse", None, 3, ["auto"]), "a strategy out of"),
    (train, "verify", FLAG, "verify=True or verify=False"),
    (train, "on_error", ("ignore", None, True), "on_error out of"),
    (train, "reporters", ("loud", None, print, [3], {"a": print}), "reporters="),
    (train, "compile", ("yes", None, 1, 0), 'compile="auto", "resident", True or False'),
    (plan, "device", (None, 0), "a device's name as text"),
    (plan, "memory", (None, *SIZE), "memory="),
    (plan, "strategy", ("fuse", None), "a strategy out of"),
    (plan, "measure", FLAG, "measure=True or measure=False"),
    (predict, "models", (None, 3, [], {}, nn.Linear(2, 1)), "model"),
    (predict, "inputs", (None, 3, "ab"), "as inputs"),
    (predict, "batch_size", (*WHOLE[:4], *WHOLE[5:], 0, -1, HUGE), "a batch_size of at "),
    (predict, "device", (None, 0, torch.device("cpu")), "a device's name as text"),
    (mapped, "function", (None, *FUNCTION), "a function"),
    (mapped, "configs", (None, 3, "ab", {"x": 1}), "configs as a list"),
    (mapped, "workers", (*COUNT[:-1], "many"), 'workers="auto" or a number of at least 1'),
    (mapped, "memory", (None, *SIZE), "memory="),
    (mapped, "timeout_s", SECONDS, "a timeout_s "),
    (loop, "function", (None, max, 3), "a generator function"),
    (loop, "seed", WHOLE, "seed that is a whole number"),
    (loop, "name", NAME, "a name"),
    (loop, "config", ([1], {1: 2}), "config"),
    (loop, "every", COUNT, "every of at "),
    (loop, "callbacks", NO_LIST, "callbacks as a list"),
    (loop, "budget", SIZE, "budget as a size"),
    (loop, "priority", (*WHOLE, 17), "priority"),
    (loop, "share", SHARE, "a share above 0 and up to 1"),
    (loop, "timeout_s", SECONDS, "a timeout_s "),
    (stack, "models", (None, 3, nn.Linear(2, 1), []), "model"),
    (stack, "optimizers", (None, 3, []), "optimizers"),
    (stack, "seeds", (3, "ab", [0], [0.5, 1.5], [True, False]), "seeds"),
    (stack, "compile", (*FLAG, "auto"), "compile=True or compile=False"),
    (step, "each", FLAG, "each=True or each=False"),
    (step, "clip_norm", POSITIVE, "a clip_norm above 0"),
    (evaluate, "each", FLAG, "each=True or each=False"),
    (carpool.limit_memory, "memory", (None, *SIZE), "memory="),
    (carpool.limit_memory, "growth", FLAG, "growth=True or growth=False"),
    (order, "seed", WHOLE, "seed that is a whole number"),
    (order, "epoch", (*WHOLE, -1, HUGE), "epoch of at "),
    (order, "length", (*WHOLE, -1, HUGE), "length of at "),
    (queue, "source", (None, *FUNCTION), "a function of a worker's number"),
    (queue, "capacity", COUNT, "capacity of at "),
    (queue, "workers", COUNT, "workers of at "),
    (reader, "passes", (None, *FUNCTION), "passes to be a function"),
    (reader, "capacity", COUNT, "capacity of at "),
]
CASES = [
    pytest.param(call, word, value, expected, id=f"{getattr(call, '__name__', 'make')}-{word}-{value!r:.20}")
    for call, word, values, expected in TABLE
    for value in values
]


@pytest.mark.parametrize(("call", "word", "value", "expected"), CASES)
def test_a_wrong_value_is_refused_with_what_was_expected_received_and_the_remedy(
    call: Callable[..., Any], word: str, value: Any, expected: str
):
    with pytest.raises(CarpoolError) as caught:
        call(**{word: value})
    said = str(caught.value)
    assert re.fullmatch(r"(Job .+: |Phase .+: )?Expected \S.+\. Received: \S.*\. Remedy: \S.+[.?]", said)
    assert expected in said


ANY = "anything at all is taken as it is"
LOOKED_AT = "what it is for looks at it: tests of each adapter's mistakes"
ELSEWHERE: dict[Any, dict[str, str]] = {
    carpool.Job: {
        "validation_data": LOOKED_AT,
        "index": "tests/adapters/*/test_*_mistakes.py: it is held against the data",
    },
    carpool.Loop: {"arguments": "test_a_loop_is_given_what_its_function_takes"},
    carpool.each: {"given": "test_each_has_a_value_for_each", "named": ANY},
    carpool.grid: {"axes": "the rows of `lr`"},
    carpool.fit: {"arguments": "tests/adapters/keras/test_keras_mistakes.py, and the rows of `device`"},
    carpool.Stack.step: {"arguments": LOOKED_AT, "step": LOOKED_AT},
    carpool.Stack.evaluate: {"arguments": LOOKED_AT, "step": LOOKED_AT},
    carpool.Stack.load: {"position": "test_a_place_in_a_stack_is_a_whole_number"},
    carpool.Stack.drop: {"position": "test_a_place_in_a_stack_is_one_of_its_members"},
    carpool.Result.last: {"metric": "a metric that is not there is NaN"},
    carpool.Result.metric: {"name": "a metric that is not there is NaN"},
    carpool.Result.load_into: dict.fromkeys(("model", "optimizer", "scheduler"), LOOKED_AT),
}
"""Arguments that the table leaves out, and why."""
CALLS = {
    carpool.Job: make,
    carpool.Loop: loop,
    carpool.train: train,
    carpool.plan: plan,
    carpool.map: mapped,
    carpool.fit: fitted,
    carpool.grid: grid,
    carpool.Phase: phase,
    carpool.predict: predict,
    carpool.Stack: stack,
    carpool.Stack.step: step,
    carpool.Stack.evaluate: evaluate,
    carpool.batch_order: order,
    carpool.data.Queue: queue,
    carpool.Results.best: best,
    carpool.Results.rows: rows,
    carpool.Results.table: table,
    carpool.Results.save: save,
}
"""The function of this file that calls each; others are called as they are."""


def is_made_by_us(public: Any) -> bool:
    """What users get from us, and raise or compare, but do not make."""
    made = (BaseException, carpool.Outcome, carpool.Result, carpool.Results)
    return isinstance(public, type) and issubclass(public, made)


def public_callables() -> list[Any]:
    named = [getattr(carpool, name) for name in carpool.__all__ if name != "data"]
    methods = [
        method
        for owner in (carpool.Stack, carpool.Result, carpool.Results)
        for name, method in vars(owner).items()
        if callable(method) and not name.startswith("_")
    ]
    return [one for one in (*named, carpool.data.Queue, *methods) if not is_made_by_us(one)]


@pytest.mark.parametrize("public", public_callables(), ids=lambda public: public.__qualname__)
def test_the_table_has_every_argument(public: Any):
    wanted = {name for name in signature(public).parameters if name not in ("self", "_")}
    called = CALLS.get(public, public)
    looked_at = {word for call, word, *_ in TABLE if getattr(call, "func", call) is called}
    assert wanted - looked_at == set(ELSEWHERE.get(public, ()))


def test_numpys_numbers_are_as_welcome_as_pythons():
    job = make(
        batch_size=np.int64(8),
        epochs=np.uint8(3),
        seed=np.array(7),
        accumulate=torch.tensor(2),
        clip_norm=np.float32(0.5),
        share=np.float64(0.25),
        timeout_s=np.int32(3),
        shuffle=np.bool_(False),
        priority=np.int8(-2),
    )
    assert (job.batch_size, job.epochs, job.seed, job.accumulate) == (8, 3, 7, 2)
    assert (job.clip_norm, job.share, job.timeout_s, job.shuffle, job.priority) == (0.5, 0.25, 3, False, -2)
    plain = (job.epochs, job.seed, job.clip_norm, job.shuffle)
    assert [type(value) for value in plain] == [int, int, float, bool]


def test_a_fraction_is_a_number_too():
    assert make(share=Fraction(1, 4)).share == 0.25


def test_the_largest_counts_are_taken():
    assert make(batch_size=(1 << 63) - 1, epochs=1 << 31).epochs == 1 << 31


def test_defaults_are_accepted():
    wanted = {field.name: field.default for field in fields(carpool.Job) if field.default is not MISSING}
    assert carpool.Job(dict, DATA, **wanted).epochs == 1


# Words that are nearly an argument


@pytest.mark.parametrize(
    ("call", "word", "meant"),
    [
        (make, "batchsize", "batch_size"),
        (make, "n_epochs", "epochs"),
        (make, "early_stop", "stop"),
        (phase, "scheduller", "scheduler"),
        (carpool.EarlyStopping, "restore_best_weights", "restore_best"),
        (train, "on_errors", "on_error"),
        (plan, "measured", "measure"),
        (loop, "names", "name"),
        (mapped, "timeout", "timeout_s"),
        (stack, "seed", "seeds"),
    ],
)
def test_a_misspelt_argument_is_told_what_was_meant(call: Callable[..., Any], word: str, meant: str):
    with pytest.raises(CarpoolError, match=rf"Received: {word}=\. Remedy: did you mean '{meant}='\?"):
        call(**{word: 1})


def test_an_argument_that_is_like_none_is_told_all_of_them():
    with pytest.raises(
        CarpoolError, match=r"an argument of Schedule\. .*arguments are scheduler=, every=, monitor="
    ):
        carpool.Schedule(max, colour=1)  # type: ignore[call-arg]


# Positions


@pytest.mark.parametrize("place", [1.0, "a", None, True, [0]])
def test_a_place_in_a_stack_is_a_whole_number(place: Any):
    with pytest.raises(TypeError, match="Expected a position, a whole number"):
        stack()[place]


def test_a_place_in_a_stack_is_one_of_its_members():
    assert Arguments().place(np.int64(-1), 2, "") == 1
    with pytest.raises(IndexError, match=r"a position below 2\. Received: 2"):
        stack().drop(2)


# Arguments of a function of the user's own


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "the arguments of steps. Received: none for to"),
        ((1, 2), "Received: 2 of them, which are too many"),
    ],
)
def test_a_loop_is_given_what_its_function_takes(given: tuple[int, ...], said: str):
    with pytest.raises(CarpoolError, match=said):
        carpool.Loop(steps, *given)


def test_an_axis_is_one_that_the_function_takes():
    def of_rate(learning_rate: float, width: int = 4) -> carpool.Job:
        return make()

    with pytest.raises(
        CarpoolError, match=r"takes\. Received: 'learningrate'\. Remedy: did you mean 'learning_rate'\?"
    ):
        carpool.grid(of_rate, learningrate=[1, 2])
    with pytest.raises(
        CarpoolError, match=r"every axis that of_rate\(learning_rate, width\) needs. Received: none for"
    ):
        carpool.grid(of_rate, width=[1, 2])


class Takes:
    def __init__(self, params: Any, lr: float, *, decay: float = 0.0) -> None:
        self.given = params, lr, decay


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (partial(Takes, lr=0.1), None),
        (partial(Takes, lr=0.2, decay=1.0), None),
        (partial(Takes, lr=0.2, decays=1.0), None),  # type: ignore[call-arg]  # calling it says so
        (partial(Takes), ["lr"]),
        (partial(Takes, [], 0.1), []),
        (partial(Takes, params=[], lr=0.1), []),
        (partial(partial(Takes, decay=1.0), lr=0.1), None),
        (partial(lambda params, lr: 0), ["lr"]),
        (partial(print), None),
    ],
)
def test_a_partial_function_wants_what_the_whole_one_does(function: Any, wanted: list[str] | None):
    for _ in range(2):
        assert missing(function, [1]) == wanted
