"""Jobs in workers of their own: the same bits as in turn, the same events, and crashes that stay where they are."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import make_job, tables

import carpool
from begun import assert_nothing_ran
from carpool.errors import JobError, WorkerError
from carpool.events import EpochEnded, GroupAdvanced, GroupStarted, JobEnded
from carpool.executors import isolated
from carpool.result import Outcome
from carpool.testing import Variant
from carpool.testing.processes import children
from patience import PATIENCE_S


def run(jobs, strategy="isolated", **options):
    return carpool.train(jobs, device="cpu", strategy=strategy, compile=False, reporters=[], **options)


@pytest.fixture(autouse=True)
def nothing_left():
    before = children()
    yield
    assert children() <= before


def same(a, b):
    """Equal to the last bit, type and structure."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same(one, other)
    else:
        assert a == b or (callable(a) and callable(b))


def assert_same_bits(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        if a.error is not None:
            raise a.error
        assert (a.outcome, a.steps, a.history) == (b.outcome, b.steps, b.history)
        assert a.history
        same(a.model.state_dict(), b.model.state_dict())
        same(a.optimizer.state_dict(), b.optimizer.state_dict())
        assert (a.scheduler is None) == (b.scheduler is None)
        if a.scheduler is not None:
            same(a.scheduler.state_dict(), b.scheduler.state_dict())


def noted(event):
    """A callback that does nothing but be called."""
    assert event.metrics


def of_all_kinds():
    """Each of another structure, so that each has a worker."""
    x, y = tables(False)["vector"]
    stop = carpool.EarlyStopping("val_loss", patience=1, min_delta=0.05, restore_best=True)
    plain, watched = (
        Variant(seed=3, epochs=4),
        Variant(
            seed=4,
            epochs=12,
            options={"validation_data": (x[:20], y[:20]), "stop": stop, "callbacks": [noted]},
        ),
    )
    return [
        make_job("mlp", "adamw", "one_cycle", plain, False),
        make_job("batch_norm", "sgd_momentum", "plateau", watched, False),
        make_job("dropout", "adam", "cosine_by_step", plain, False),
        make_job("noisy", "nadam", "lambda", plain, True),
        make_job("conv_norm", "rmsprop_centered", "step", plain, False),
        make_job("attention", "two_groups", "sequential", plain, False),
        make_job("tied", "amsgrad", "constant", plain, False),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, pytest.param(7, marks=pytest.mark.slow)])
def test_bits_are_those_of_a_run_in_turn(count):
    ours, theirs = run(of_all_kinds()[:count]), run(of_all_kinds()[:count], "in_turn")
    assert_same_bits(ours, theirs)
    assert Outcome.STOPPED in {result.outcome for result in ours}
    assert {result.strategy for result in ours} == {"isolated"}


def live_job():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = tables(False)["vector"]
    return carpool.Job(
        model, data, loss=F.cross_entropy, optimizer=optimizer, scheduler=scheduler, epochs=3, batch_size=16
    )


def test_live_objects_are_trained_and_go_on_from_where_they_are(capfd):
    """The weights are large enough to travel in shared memory."""
    ours, theirs = live_job(), live_job()
    pairs = []
    for strategy, job in (("isolated", ours), ("in_turn", theirs)):
        run([job], strategy)
        pairs.append(run([job], strategy))
    assert_same_bits(*pairs)
    assert pairs[0][0].model is ours.model
    assert pairs[0][0].optimizer is ours.optimizer
    assert "Warning" not in capfd.readouterr().err


def test_events_come_from_the_worker_as_they_are():
    jobs = of_all_kinds()[:2]
    seen, expected = [], []
    for events, strategy in ((seen, "isolated"), (expected, "in_turn")):
        jobs = of_all_kinds()[:2]
        carpool.train(jobs, device="cpu", strategy=strategy, reporters=[events.append])
    for name in ("job-0", "job-1"):
        theirs = [e for e in expected if isinstance(e, EpochEnded) and e.name == name]
        assert [e for e in seen if isinstance(e, EpochEnded) and e.name == name] == theirs
        assert sum(isinstance(e, JobEnded) and e.name == name for e in seen) == 1
    for group in (0, 1):
        steps = [
            sum(e.steps for e in of if isinstance(e, GroupAdvanced) and e.group == group)
            for of in (seen, expected)
        ]
        assert steps[0] == steps[1] > 0
        assert sum(isinstance(e, GroupStarted) and e.group == group for e in seen) == 1


def twins(**options):
    return [
        make_job(
            "mlp", "sgd", "constant", Variant(seed=seed, scale=seed + 1.0, epochs=3, options=options), True
        )
        for seed in range(3)
    ]


@pytest.mark.slow
def test_jobs_of_one_structure_share_a_worker_and_are_fused_there():
    seen = []
    ours = carpool.train(twins(), device="cpu", strategy="isolated", compile=False, reporters=[seen.append])
    starts = [event for event in seen if isinstance(event, GroupStarted)]
    assert [len(event.names) for event in starts] == [3]
    assert "share a worker" in ours[0].reason
    for a, b in zip(ours, run(twins(), "in_turn"), strict=True):
        np.testing.assert_allclose(a.history["loss"], b.history["loss"], rtol=1e-10)
        for one, other in zip(a.model.parameters(), b.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


# Callbacks, failures, ends


@pytest.mark.slow
def test_callbacks_run_in_the_worker_on_a_copy(tmp_path):
    seen = []

    def callback(event):
        seen.append(event)
        with (tmp_path / "called").open("a") as file:
            file.write(f"{os.getpid()} {len(seen)}\n")

    result = run([replace(live_job(), callbacks=[callback])])[0]
    assert result.outcome is Outcome.COMPLETED
    lines = [line.split() for line in (tmp_path / "called").read_text().splitlines()]
    assert [line[1] for line in lines] == ["1", "2", "3"]
    assert {line[0] for line in lines} != {str(os.getpid())}
    assert seen == []


class Faulty(nn.Module):
    """Does something at its sixth training step, in a worker."""

    def __init__(self, fault, width):
        super().__init__()
        self.layer, self.fault, self.calls = nn.Linear(6, width), fault, 0

    def forward(self, x):
        self.calls += self.training and torch.is_grad_enabled()
        if self.calls == 6 and os.environ["CARPOOL_TEST_HOME"] != str(os.getpid()):
            self.fault()
        return self.layer(x)[:, :3]


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def refuse():
    raise ArithmeticError("no more")


def hang():
    threading.Event().wait()


@pytest.fixture
def at_home(monkeypatch):
    """Faults happen in workers only: describing a job here runs a step of it too."""
    monkeypatch.setenv("CARPOOL_TEST_HOME", str(os.getpid()))


def faulty(fault, width, **options):
    return carpool.Job(
        partial(Faulty, fault, width),
        tables(False)["vector"],
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD,
        epochs=4,
        name=fault.__name__,
        **options,
    )


@pytest.mark.usefixtures("at_home")
def test_a_crash_fails_its_own_job_and_no_other():
    results = run([faulty(crash, 4), faulty(refuse, 5), live_job()])
    assert [result.outcome.word for result in results] == ["failed", "failed", "completed"]
    assert isinstance(results[0].error, WorkerError)
    assert "was killed by SIGSEGV" in str(results[0].error)
    assert len(results[0].history["loss"]) >= 1  # what it had told before
    assert isinstance(results[1].error, ArithmeticError)
    assert results[1].model.calls == 0  # what a forward pass leaves in its module stays in the worker


@pytest.mark.slow
@pytest.mark.usefixtures("at_home")
def test_a_job_without_progress_is_stopped_and_says_where_it_was():
    jobs = [faulty(hang, 4, timeout_s=5), live_job()]
    results = run(jobs, "auto")
    assert results[0].strategy == "isolated"
    assert results[0].reason == "timeout_s can only be kept by a process of its own"
    assert "no progress for 5 s" in str(results[0].error)
    assert "in hang" in str(results[0].error)
    assert results[1].outcome is Outcome.COMPLETED
    assert results[1].strategy == "interleaved"


def test_a_job_whose_loss_is_not_finite_ends_as_diverged():
    x, y = tables(False)["vector"]
    job = carpool.Job(
        partial(nn.Linear, 6, 3), (x, y.float()), step=lambda m, b: (m(b[0]) * 1e30).square().mean() * 1e30,
        optimizer=torch.optim.SGD, epochs=2,
    )  # fmt: skip
    assert run([job])[0].outcome is Outcome.DIVERGED


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("callbacks", {"callbacks": [threading.Lock().acquire]}),
        ("data", {"data": (pair for pair in [tables(False)["vector"]])}),
        ("config", {"config": {"lock": threading.Lock()}}),
    ],
)
def test_what_cannot_be_pickled_is_refused_before_anything_runs(field, change):
    seen = []
    jobs = [live_job(), replace(live_job(), name="bad", **change)]
    with pytest.raises(JobError, match=f"Job 'bad': Expected a {field} that can be pickled"):
        carpool.train(jobs, device="cpu", strategy="isolated", reporters=[seen.append])
    assert_nothing_ran(seen)


# Loops


def walk(steps, size):
    place = np.zeros(size)
    for _ in range(steps):
        place += np.random.normal(size=size)
        yield {"loss": float(np.abs(place).mean())}
    return place


def test_loops_of_ones_own_run_in_workers():
    jobs = [carpool.Loop(walk, 40, size, seed=size, every=10) for size in (3, 50_000)]
    ours, theirs = run(jobs), run(jobs, "in_turn")
    for a, b in zip(ours, theirs, strict=True):
        assert (a.outcome, a.steps, a.history) == (b.outcome, b.steps, b.history)
        np.testing.assert_array_equal(a.model, b.model)


def holds(what):
    yield {"loss": 0.0}
    return what()


def test_a_loop_that_returns_what_cannot_travel_fails_with_the_reason():
    results = run([carpool.Loop(holds, threading.Lock), carpool.Loop(holds, dict)])
    assert results[0].outcome is Outcome.FAILED
    assert "cannot be handed over" in str(results[0].error)
    assert results[1].model == {}


def lifetime(size):
    began = time.monotonic()
    yield {"loss": 0.0}
    time.sleep(0.3)
    threads, share = os.environ.get("OMP_NUM_THREADS"), os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    return began, time.monotonic(), os.getpid(), threads, share


@pytest.mark.slow
def test_no_more_workers_than_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(isolated, "cores", lambda: 1)
    results = run([carpool.Loop(lifetime, i) for i in range(3)])
    spans = sorted(result.model[:2] for result in results)
    assert all(before[1] < after[0] for before, after in pairwise(spans))
    assert len({result.model[2] for result in results}) == 3
    assert {result.model[3] for result in results} == {"1"}


def test_a_share_is_said_to_the_driver_and_isolates():
    loops = [carpool.Loop(lifetime, 0, share=0.25), carpool.Loop(lifetime, 1)]
    shared, plain = run(loops, "auto")
    assert (shared.strategy, shared.model[4]) == ("isolated", "25")
    assert (plain.strategy, plain.model[2], plain.model[4]) == ("interleaved", os.getpid(), None)


@pytest.mark.parametrize("strategy", ["fused", "interleaved", "in_turn"])
def test_a_share_and_a_strategy_that_cannot_keep_it_are_refused(strategy):
    with pytest.raises(JobError, match='strategy="auto" or "isolated" for a job with share='):
        run([replace(live_job(), share=0.5)], strategy)


# Ctrl-C

INTERRUPTED = """
import os, sys, torch, carpool
from torch import nn
from functools import partial

def slowly(model, batch):
    import time
    time.sleep(0.01)
    return model(batch[0]).square().mean()

def job(width):
    data = (torch.ones(64, 4),)
    return carpool.Job(partial(nn.Linear, 4, width), data, step=slowly, optimizer=partial(torch.optim.SGD, lr=0.1), epochs=100_000)

told = set()
def report(event):
    if type(event).__name__ == "EpochEnded" and event.name not in told:
        told.add(event.name)
        print(event.name, flush=True)

try:
    carpool.train([job(1), job(2), job(3)], device="cpu", strategy="isolated", reporters=[report])
except carpool.Interrupted as interrupted:
    for result in interrupted.results:
        moved = result.model is not None and result.steps > 0 and len(result.history["loss"]) > 0
        print(result.outcome.word, moved, flush=True)
"""


def test_ctrl_c_hands_over_what_every_job_had_reached():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as ran:
        assert ran.stdout is not None
        running = min(3, len(os.sched_getaffinity(0)))
        names = sorted(ran.stdout.readline().strip() for _ in range(running))
        assert names == [f"job-{i}" for i in range(running)]
        tree = Path(f"/proc/{ran.pid}/task/{ran.pid}/children").read_text().split()
        os.kill(ran.pid, signal.SIGINT)
        lines = ran.stdout.read().splitlines()
        assert ran.wait(PATIENCE_S) == 0
    assert lines == ["interrupted True"] * running + ["interrupted False"] * (3 - running)
    assert tree
    assert not any(Path(f"/proc/{pid}").exists() for pid in tree)


def hoard():
    """A step that keeps 300 MiB and then waits: whoever looks finds it."""
    held = np.ones(300 << 20, dtype=np.uint8)
    while len(held):
        time.sleep(0.01)


@pytest.mark.usefixtures("at_home")
def test_a_job_over_its_budget_is_stopped_in_its_worker_and_the_others_go_on():
    results = run([faulty(hoard, 5, budget="64MiB"), live_job()])
    bad, good = results
    assert bad.outcome is Outcome.OUT_OF_MEMORY
    assert "to take at most their budget of 64 MiB. Received:" in str(bad.error)
    assert good.outcome is Outcome.COMPLETED
