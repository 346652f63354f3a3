"""What only a GPU can show: no waiting while chunks are enqueued, memory given back, objects left where they were."""

import gc
import math
import warnings
from dataclasses import replace
from functools import partial
from operator import attrgetter

import pytest
import torch
import torch.nn.functional as F
from zoo import mlp

import carpool
from carpool.adapters.torch import program, programs
from carpool.adapters.torch.compiler import Background
from carpool.adapters.torch.fused import StackedSession
from carpool.adapters.torch.solo import SoloSession
from carpool.adapters.torch.train import TorchAdapter
from carpool.events import Event, GroupCompiled
from carpool.planning.cursor import Chunk, Cursor
from patience import PATIENCE_S

pytestmark = pytest.mark.gpu
X, Y = torch.randn(512, 6), torch.randint(0, 3, (512,))


def job(seed: int) -> carpool.Job:
    optimizer = partial(torch.optim.AdamW, lr=1e-3 * (1 + seed))
    return carpool.Job(
        mlp, (X, Y), name=f"m{seed}", loss=F.cross_entropy, optimizer=optimizer, batch_size=16, seed=seed
    )


def test_nothing_waits_while_chunks_are_enqueued():
    adapter = TorchAdapter(compile=False)
    jobs = [replace(job(seed), validation_data=(X, Y)) for seed in range(4)]
    for one in jobs:
        adapter.describe(one)
    assert adapter.fuser is not None
    session = adapter.fuser.open(jobs, 4, adapter.device("cuda"), lambda *_: None)
    assert isinstance(session, StackedSession)
    rows = (0, 1, 2, 3)
    with session.turn():
        session.advance(Chunk(rows, (Cursor(),) * 4, 16, 17))  # captures both graphs
        session.evaluate(rows)  # and those of validation
        torch.cuda.set_sync_debug_mode("error")
        try:
            session.advance(Chunk(rows, (Cursor(0, 17, 17),) * 4, 16, 15, ends=rows))
            reading = session.begin_evaluating(rows)
            ticket = session.advance(Chunk(rows, (Cursor(1, 0, 32),) * 4, 16, 17))  # lays out another epoch
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [row.steps for row in session.metrics(ticket)] == [17] * 4
        assert reading is not None
        then, now = reading.read(), session.evaluate(rows)  # as the rows were, whatever was enqueued since
        assert then.rows == rows
        assert all(before != after.sums["loss"] for before, after in zip(then.sums["loss"], now, strict=True))
    session.close()


def test_memory_comes_back_after_each_run():
    def held() -> int:
        gc.collect()
        return torch.cuda.memory_allocated()

    carpool.train([job(seed) for seed in range(64)], device="cuda", reporters=[], compile=False)
    after_warm_up = held()
    for _ in range(3):
        carpool.train([job(seed) for seed in range(64)], device="cuda", reporters=[], compile=False)
    assert abs(held() - after_warm_up) < 1 << 20


@pytest.mark.parametrize("strategy", ["fused", "in_turn"])
def test_objects_are_left_on_the_device_they_came_from(strategy):
    live = mlp()
    optimizer = torch.optim.AdamW(live.parameters(), lr=1e-3)
    jobs = [carpool.Job(live, (X, Y), loss=F.cross_entropy, optimizer=optimizer, batch_size=16), job(1)]
    results = carpool.train(jobs, device="cuda", reporters=[], strategy=strategy, compile=False)
    assert results[0].model is live
    assert {parameter.device.type for parameter in live.parameters()} == {"cpu"}
    assert {slot.device.type for state in optimizer.state.values() for slot in state.values()} == {"cpu"}
    assert results[0].peak_bytes


def test_a_step_compiled_in_the_background_is_taken_up_in_graphs_of_its_own(monkeypatch: pytest.MonkeyPatch):
    class Patient(Background):
        """Is through when it is first asked."""

        def poll(self) -> int | None:
            self._begin()
            while (code := super().poll()) is None:
                assert self._child is not None
                self._child.wait(PATIENCE_S)
            return code

    monkeypatch.setattr(program, "Background", Patient)
    monkeypatch.setattr(program, "is_cached", lambda _: False)
    monkeypatch.setattr(program, "_memory", type(program._memory)())
    monkeypatch.setattr(programs, "FEWEST_LAUNCHES", 1)
    monkeypatch.setattr(programs, "compiling_budget_s", lambda _: math.inf)
    ready: list[bool] = []

    def note(event: Event) -> None:
        if isinstance(event, GroupCompiled):
            ready.append(event.compiled)

    def trained(compile: str | bool) -> list[float]:
        jobs = [replace(job(seed), epochs=4) for seed in range(4)]
        results = carpool.train(jobs, device="cuda", strategy="fused", compile=compile, reporters=[note])
        return [value for result in results for value in result.history["loss"]]

    losses = trained("auto")
    assert ready == [False, True]
    assert losses == pytest.approx(trained(False), rel=1e-4)


def test_a_short_job_alone_is_captured_where_it_is_to_be_compiled():
    for compile, kind in ((True, StackedSession), ("auto", SoloSession)):
        adapter = TorchAdapter(compile=compile)
        device = adapter.device("cuda")
        one = job(0)
        adapter.describe(one)
        session = adapter.open(one, device)
        assert isinstance(session, kind)
        session.close()


def test_a_job_alone_whose_loss_holds_numbers_is_compiled():
    """Cross entropy, divided by one: beside the single loss of a stack of one the compiler took such a number for the GPU's memory."""
    program._memory.clear()
    one = replace(job(1), loss=lambda prediction, target: F.cross_entropy(prediction, target) / 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        [compiled] = carpool.train([one], device="cuda", compile=True, reporters=[])
    assert not [warning for warning in told if "compiling failed" in str(warning.message)]
    assert any(ready.compiled is not None for ready in program._memory.values())
    [alone] = carpool.train([one], device="cuda", strategy="in_turn", reporters=[])
    assert compiled.history["loss"] == pytest.approx(alone.history["loss"], rel=1e-3)


def images() -> torch.nn.Module:
    """Wide enough for channels to be laid out innermost."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 72, 3, padding=1, bias=False),
        torch.nn.BatchNorm2d(72),
        torch.nn.ReLU(),
        torch.nn.Conv2d(72, 96, 3, stride=2, padding=1),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(96, 3),
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_images_of_few_jobs_are_read_by_tensor_cores_and_end_where_they_do_alone(count):
    place = attrgetter("cudnn.conv")(torch.backends)
    before, place.fp32_precision = place.fp32_precision, "tf32"
    x, y = torch.randn(64, 3, 16, 16), torch.randint(0, 3, (64,))

    def several() -> list[carpool.Job]:
        optimizer = partial(torch.optim.SGD, lr=0.05)
        return [
            carpool.Job(
                images, (x, y), seed=s, loss=F.cross_entropy, optimizer=optimizer, batch_size=16, epochs=2
            )
            for s in range(count)
        ]

    try:
        strategy = "fused" if count > 1 else "auto"
        together = carpool.train(several(), device="cuda", reporters=[], compile=True, strategy=strategy)
        traced = next(reversed(program._memory.values())).traced
        alone = carpool.train(several(), device="cuda", reporters=[], strategy="in_turn")
    finally:
        place.fp32_precision = before
    kinds = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
    read = [
        arg.meta["val"]
        for node in traced.graph.nodes
        if node.target in kinds
        for arg in node.args[:3]
        if isinstance(arg, torch.fx.Node) and arg.meta["val"].dim() == 4
    ]
    assert len(read) == count * (2 * 2 + 2 * 3)
    assert all(tensor.stride(1) == 1 for tensor in read)
    for one, other in zip(together, alone, strict=True):
        assert "not compiled" not in one.reason
        for ours, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
