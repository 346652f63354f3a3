"""A step that is compiled while it runs uncompiled: taken up between chunks, if it holds; and nothing is left behind."""

from __future__ import annotations

import errno
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from live import X, Y
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import carpool
from carpool.adapters.torch import compiler, program, programs
from carpool.adapters.torch.compiler import Background
from carpool.events import Event, GroupCompiled
from patience import PATIENCE_S


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 1))


def jobs(epochs: int = 4, width: int = 3, **options: Any) -> list[carpool.Job]:
    return [
        carpool.Job(
            net,
            (X, Y),
            loss=F.mse_loss,
            optimizer=partial(torch.optim.Adam, lr=0.01 * (1 + i)),
            batch_size=4,
            epochs=epochs,
            seed=i,
            name=str(i),
            **options,
        )
        for i in range(width)
    ]


def train(made: list[carpool.Job], compile: str | bool = "auto") -> tuple[list[Any], list[bool]]:
    """The models' states, and whether each step that was made ready was compiled."""
    events: list[Event] = []
    results = carpool.train(made, device="cpu", strategy="fused", compile=compile, reporters=[events.append])
    assert all(result.outcome is carpool.Outcome.COMPLETED for result in results)
    states = [result.model.state_dict() for result in results]
    return states, [event.compiled for event in events if isinstance(event, GroupCompiled)]


def same(found: list[Any], wanted: list[Any], within: float = 0.0) -> None:
    for one, other in zip(found, wanted, strict=True):
        for name, tensor in one.items():
            torch.testing.assert_close(tensor, other[name], rtol=0, atol=within)


@pytest.fixture(autouse=True)
def pays(monkeypatch: pytest.MonkeyPatch):
    """Every run is long enough, nothing is machine code, and nothing is remembered of other tests."""
    monkeypatch.setattr(programs.Programs, "_code", lambda *_: None)
    monkeypatch.setattr(programs, "FEWEST_LAUNCHES", 1)
    monkeypatch.setattr(programs, "compiling_budget_s", lambda _: math.inf)
    monkeypatch.setattr(program, "_memory", type(program._memory)())


class Patient(Background):
    """Is through when it is first asked."""

    def poll(self) -> int | None:
        self._begin()
        while (code := super().poll()) is None:
            assert self._child is not None
            self._child.wait(PATIENCE_S)
        return code


class Stage:
    """Stands in for the process: `code` is what it ends with, None while it goes on."""

    is_over = False
    spent_s = 0.0

    def __init__(self, code: int | None) -> None:
        self.code, self.closed = code, 0

    def processor_s(self) -> float:
        return self.spent_s

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout_s: float | None = None) -> int | None:
        self.code = self.code or 0
        return self.code

    def told(self) -> str:
        return "no such compiler"

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch):
    """Nothing is really compiled: the process is played, and the compiled step is what `step` makes of the traced one."""

    def begin(code: int | None, step: Any = lambda traced: traced) -> list[Stage]:
        began: list[Stage] = []

        def made(_: Any, budget_s: float) -> Stage:
            began.append(Stage(code))
            return began[-1]

        monkeypatch.setattr(program, "Background", made)
        monkeypatch.setattr(
            program, "compiled", lambda asked: step(next(iter(program._memory.values())).traced)
        )
        return began

    return begin


def test_it_begins_uncompiled_and_goes_on_compiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(program, "Background", Patient)
    counters.clear()
    states, ready = train(jobs(epochs=30))
    assert ready == [False, True]
    assert counters["inductor"]["fxgraph_cache_hit"] == 1, "compiled here what the process had compiled"
    plain, _ = train(jobs(epochs=30), compile=False)
    same(states, plain, within=1e-5)


def test_what_was_compiled_before_needs_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, staged: Any
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    began = staged(0, step=lambda traced: lambda *inputs: traced(*inputs))
    assert train(jobs())[1] == [False, True]
    program._memory.clear()  # as in the next process
    assert train(jobs())[1] == [False, True]
    assert len(began) == 1
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "wiped"))
    program._memory.clear()
    train(jobs())
    assert len(began) == 2


def test_what_spends_more_than_it_may_is_stopped_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, staged: Any
):
    """Preparing costs at most a share of what running uncompiled takes; nothing is said, as nothing went wrong."""
    monkeypatch.setattr(Stage, "is_over", True)
    monkeypatch.setattr(Stage, "spent_s", 20.0)
    began = staged(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states, ready = train(jobs())
    assert ready == [False]
    assert [stage.closed for stage in began] == [1], "stopped while the run went on"
    same(states, train(jobs(), compile=False)[0])
    (remembered,) = program._memory.values()
    assert remembered.too_long_s == 20.0, "so that the next run knows better"
    monkeypatch.setattr(programs, "compiling_budget_s", lambda _: 39.0)
    train(jobs())
    assert len(began) == 1


def test_a_process_that_compiles_is_stopped_at_its_budget(monkeypatch: pytest.MonkeyPatch):
    class Spending(Stage):
        def processor_s(self) -> float:
            self.spent_s += 2.0
            return self.spent_s

        def wait(self, timeout_s: float | None = None) -> int | None:
            return None

        def poll(self) -> int | None:
            return None

    monkeypatch.setattr(compiler, "_running", [])
    monkeypatch.setattr(compiler, "Child", lambda *_, **__: Spending(None))
    asked = compiler.request(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.zeros(2)])
    background = Background(asked, budget_s=3.0)
    assert background.poll() is None
    assert not background.is_over
    assert background.wait() is None, "who waits does not wait for ever"
    assert background.is_over
    background.close()


def test_it_is_begun_only_where_it_is_expected_to_pay(monkeypatch: pytest.MonkeyPatch, staged: Any):
    """Launches that would take a second in all are not worth six seconds of the compiler."""
    monkeypatch.undo()
    monkeypatch.setattr(programs.Programs, "_code", lambda *_: None)
    monkeypatch.setattr(programs, "FEWEST_LAUNCHES", 1)
    monkeypatch.setattr(program, "_memory", type(program._memory)())
    began = staged(None)
    monkeypatch.setattr(program.Program, "launch_s", lambda _: 0.01)
    assert train(jobs(epochs=2))[1] == [False]
    assert not began
    monkeypatch.setattr(program.Program, "launch_s", lambda _: 100.0)
    train(jobs(epochs=2))
    assert len(began) == 1


def test_what_cannot_be_compiled_goes_on_uncompiled(staged: Any):
    seen = staged(1)
    with pytest.warns(UserWarning, match="the step runs uncompiled .no such compiler"):
        states, ready = train(jobs())
    assert ready == [False]
    same(states, train(jobs(), compile=False)[0])
    assert [one.closed for one in seen] == [1]


def test_a_compiled_step_that_does_not_hold_is_not_taken_up(staged: Any):
    def wrong(traced: Any) -> Any:
        def step(*inputs: torch.Tensor) -> None:
            traced(*inputs)
            flags = [one for one in inputs if one.dtype is torch.bool and one.shape == (3,)]
            if all(one.any() for one in flags):  # some row is active
                inputs[0].mul_(1.5)

        return step

    staged(0, step=wrong)
    with pytest.warns(UserWarning, match="differs from its step alone"):
        states, _ = train(jobs())
    same(states, train(jobs(), compile=False)[0])


def test_a_run_that_ends_first_leaves_no_process(staged: Any):
    began = staged(None)
    assert train(jobs())[1] == [False]
    assert [stage.closed for stage in began] == [1]


def test_the_process_itself_is_gone_when_a_run_ends_first(monkeypatch: pytest.MonkeyPatch):
    began: list[Background] = []

    class Noted(Background):
        def __init__(self, asked: Any, budget_s: float) -> None:
            super().__init__(asked, budget_s)
            began.append(self)

        def poll(self) -> int | None:
            return None

    monkeypatch.setattr(program, "Background", Noted)
    train(jobs())
    (one,) = began
    assert one._child is not None
    assert one._child.code is not None
    assert one._request.closed
    assert one._said.closed


def test_steps_are_compiled_side_by_side_as_far_as_there_are_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler, "cores", lambda: 8)
    monkeypatch.setattr(compiler, "_running", [])
    monkeypatch.setattr(compiler, "Child", lambda *_, **__: Stage(None))
    asked = compiler.request(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.zeros(2)])
    first, second, third = (Background(asked) for _ in range(3))
    assert [one._child is not None for one in (first, second, third)] == [True, True, False]
    assert third.poll() is None
    assert second._child is not None
    second._child.code = 0  # nobody asked it
    assert third.poll() is None, "it goes on"
    assert third._child is not None
    fourth = Background(asked)
    assert fourth._child is None
    assert fourth.wait() == 0, "who is waited for begins at once"
    for one in (first, second, third, fourth):
        one.close()


def test_half_gathered_gradients_are_not_switched_under(staged: Any):
    staged(0, step=lambda traced: lambda *inputs: traced(*inputs))
    states, ready = train(jobs(accumulate=2))
    assert ready == [False, True]
    same(states, train(jobs(accumulate=2), compile=False)[0])


@pytest.mark.parametrize(("uncompiled_pays", "asked"), [(True, 1), (False, 2)])
def test_a_trial_waits_for_the_compiler_only_where_it_matters(
    monkeypatch: pytest.MonkeyPatch, staged: Any, trials: None, uncompiled_pays: bool, asked: int
):
    from carpool.adapters.torch import fused

    launches: list[bool] = []

    def launch(session: Any, chunk: Any) -> tuple[Callable[[], float], bool]:
        made = session._train_program(chunk.size).compiled
        launches.append(made)
        return lambda: 1e-6 if made or uncompiled_pays else 1e3, made

    staged(None, step=lambda traced: lambda *inputs: traced(*inputs))
    monkeypatch.setattr(fused.StackedSession, "_launch", launch)
    monkeypatch.setattr(fused, "alone_step", lambda *_: lambda: 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = carpool.train(jobs(), device="cpu", reporters=[])
    assert {result.strategy for result in results} == {"fused"}
    assert launches == [False, True][:asked]


def test_a_request_tells_what_is_baked_in():
    traced = torch.fx.symbolic_trace(torch.nn.ReLU())
    one = compiler.request(traced, [torch.zeros(2, 3)])
    assert compiler._mark(one) == compiler._mark(compiler.request(traced, [torch.ones(2, 3)]))
    assert compiler._mark(one) != compiler._mark(compiler.request(traced, [torch.zeros(3, 2).t()]))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert compiler._mark(one) != compiler._mark(compiler.request(traced, [torch.zeros(2, 3)]))
    finally:
        torch.set_num_threads(threads)


def asked_for() -> compiler.Request:
    return compiler.request(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.zeros(2)])


@pytest.mark.parametrize("where", ["tempfile.TemporaryFile", "Child"])
def test_a_full_disk_or_process_table_means_uncompiled(monkeypatch: pytest.MonkeyPatch, where: str):
    """A full disk: the process that compiles is not started, and that is its end, not the run's."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compiler, "_running", [])
    holder = compiler.tempfile if "." in where else compiler
    monkeypatch.setattr(holder, where.rpartition(".")[2], full)
    background = Background(asked_for())
    assert background.poll() == background.wait() == 1
    assert background.told() == "OSError: [Errno 28] No space left on device"
    background.close()


def test_a_compilers_cache_that_others_may_write_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Who may run code: what the compiler finds in its cache it runs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    compiler._check_folder()
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(RuntimeError, match="others may write into it; set TORCHINDUCTOR_CACHE_DIR"):
        compiler.compiled(asked_for())
