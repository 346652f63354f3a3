"""Rows of a fused session: states that move between strategies, members that leave, join, are copied and repacked."""

import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import batch_norm, tables

import carpool
from carpool.adapters.torch import fused
from carpool.adapters.torch.train import TorchAdapter
from carpool.events import GroupResized
from carpool.executors import driver
from carpool.planning.cursor import Chunk, Cursor
from carpool.testing.conformance import assert_identical


def make() -> nn.Module:
    return batch_norm().double()


def job(seed: int, epochs: int = 4, **changes) -> carpool.Job:
    return carpool.Job(
        make,
        tables(True)["vector"],
        name=f"m{seed}",
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=1e-3 * (1 + seed)),
        batch_size=16,
        epochs=epochs,
        seed=seed,
        **changes,
    )


def opened(
    count: int, width: int | None = None
) -> tuple[TorchAdapter, list[carpool.Job], fused.StackedSession]:
    adapter = TorchAdapter(compile=False)
    jobs = [job(seed) for seed in range(count)]
    for one in jobs:
        adapter.describe(one)
    assert adapter.fuser is not None
    session = adapter.fuser.open(jobs, width or count, "cpu", lambda *_: None)
    assert isinstance(session, fused.StackedSession)
    return adapter, jobs, session


def chunk(rows, epoch: int = 0, steps: int = 3) -> Chunk:
    return Chunk(tuple(rows), (Cursor(epoch, 0, 4 * epoch),) * len(rows), 16, steps)


def weights(session, row: int) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in session.state([row])[0].model.items()}


def assert_same(one: dict, other: dict) -> None:
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_a_fused_state_loads_into_a_solo_session_and_goes_on_alike():
    _, _, session = opened(3)
    session.advance(chunk(range(3)))
    state = session.state([1])[0]
    solo_adapter = TorchAdapter()
    twin = job(1)
    solo_adapter.describe(twin)
    solo = solo_adapter.open(twin, "cpu")
    solo.load(0, state)
    session.advance(Chunk((0, 1, 2), (Cursor(1, 0, 3),) * 3, 16, 3))
    solo.advance(Chunk((0,), (Cursor(1, 0, 3),), 16, 3))
    for name, tensor in solo.state([0])[0].model.items():
        torch.testing.assert_close(tensor, session.state([1])[0].model[name], rtol=0, atol=1e-10)


def test_a_solo_state_loads_into_a_row():
    solo_adapter = TorchAdapter()
    twin = job(1)
    solo_adapter.describe(twin)
    solo = solo_adapter.open(twin, "cpu")
    solo.advance(Chunk((0,), (Cursor(),), 16, 3))
    _, _, session = opened(3)
    before = weights(session, 0)
    session.load(1, solo.state([0])[0])
    for name, tensor in solo.state([0])[0].model.items():
        torch.testing.assert_close(tensor, session.state([1])[0].model[name], rtol=0, atol=0)
    assert session.state([1])[0].optimizer["0.weight"]["step"] == 3
    assert_same(before, weights(session, 0))


def test_a_job_takes_a_free_row_and_neighbours_keep_every_bit():
    adapter, _, session = opened(3)
    _, _, other = opened(3)
    for one in (session, other):
        one.advance(chunk(range(3)))
    session.leave([1])
    newcomer = job(7)
    adapter.describe(newcomer)
    session.join(1, newcomer)
    later = Chunk((0, 1, 2), (Cursor(1, 0, 3), Cursor(0, 0, 0), Cursor(1, 0, 3)), 16, 3)
    session.advance(later)
    other.advance(Chunk((0, 2), (Cursor(1, 0, 3),) * 2, 16, 3))
    assert_same(weights(session, 0), weights(other, 0))
    assert_same(weights(session, 2), weights(other, 2))
    twin, fresh = job(7), TorchAdapter()
    fresh.describe(twin)
    alone = fresh.open(twin, "cpu")
    alone.advance(Chunk((0,), (Cursor(),), 16, 3))
    for name, tensor in alone.state([0])[0].model.items():
        torch.testing.assert_close(tensor, session.state([1])[0].model[name], rtol=0, atol=1e-10)


def test_joining_a_taken_row_or_another_structure_is_refused():
    adapter, jobs, session = opened(2)
    with pytest.raises(ValueError, match="row 0 is taken by 'm0'"):
        session.join(0, jobs[0])
    session.leave([0])
    other = replace(job(5), batch_size=8)
    adapter.describe(other)
    with pytest.raises(ValueError, match="another structure"):
        session.join(0, other)
    x, y = tables(True)["vector"]
    stranger = replace(job(6), data=(x.clone(), y))
    adapter.describe(stranger)
    with pytest.raises(ValueError, match="other arrays"):
        session.join(0, stranger)


def test_copy_gives_weights_and_optimizer_state():
    _, _, session = opened(3)
    session.advance(chunk([0, 1]))
    session.copy(0, 2)
    source, target = session.state([0])[0], session.state([2])[0]
    assert_same(dict(source.model), dict(target.model))
    assert target.optimizer["0.weight"]["step"] == source.optimizer["0.weight"]["step"] == 3
    assert torch.equal(source.optimizer["3.bias"]["exp_avg"], target.optimizer["3.bias"]["exp_avg"])


def test_keep_and_revert_restore_weights_and_buffers_of_the_rows_asked_for():
    _, _, session = opened(3)
    session.keep([0, 2])
    at_start = [weights(session, row) for row in range(3)]
    session.advance(chunk(range(3)))
    moved = weights(session, 1)
    session.revert([0, 2])
    assert_same(at_start[0], weights(session, 0))
    assert_same(at_start[2], weights(session, 2))
    assert_same(moved, weights(session, 1))


def test_resizing_keeps_every_member():
    _, _, session = opened(5)
    session.advance(chunk(range(5)))
    session.leave([0, 2, 4])
    before = {row: weights(session, row) for row in (1, 3)}
    moved = session.resize(2)
    assert (session.width, dict(moved)) == (2, {1: 0, 3: 1})
    for old, new in moved.items():
        assert_same(before[old], weights(session, new))
    with pytest.raises(ValueError, match="room for 2 members"):
        session.resize(1)


def test_repacking_in_a_run_leaves_results_within_the_promise(monkeypatch):
    monkeypatch.setattr(driver, "repacked", lambda width, active, *_: 2 if active <= 2 < width else None)
    lengths = {0: 1, 1: 6, 2: 2, 3: 6, 4: 1}
    jobs = [job(seed, epochs) for seed, epochs in lengths.items()]
    events: list = []
    packed = carpool.train(jobs, device="cpu", compile=False, reporters=[events.append])
    resized = [event for event in events if isinstance(event, GroupResized)]
    assert [(event.old_width, event.new_width) for event in resized] == [(5, 2)]
    monkeypatch.undo()
    whole = carpool.train(
        [job(seed, epochs) for seed, epochs in lengths.items()], device="cpu", compile=False, reporters=[]
    )
    for one, other in zip(packed, whole, strict=True):
        for a, b in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-8)
        assert one.steps == other.steps


def test_checking_leaves_no_trace():
    from zoo import shown

    plain = carpool.train([job(s) for s in range(3)], device="cpu", compile=False, reporters=[])
    checked = carpool.train(
        [job(s) for s in range(3)], device="cpu", compile=False, reporters=[], verify=True
    )
    for one, other in zip(plain, checked, strict=True):
        assert_identical(
            shown(one.model, one.optimizer, one.history["loss"]),
            shown(other.model, other.optimizer, other.history["loss"]),
        )


def test_members_predict_together_as_alone():
    _, _, session = opened(3)
    session.advance(chunk(range(3)))
    x = tables(True)["vector"][0][:5]
    together = session.predict(x, rows=[2, 0])
    assert together.shape == (2, 5, 3)
    solo_adapter = TorchAdapter()
    twin = job(2)
    solo_adapter.describe(twin)
    solo = solo_adapter.open(twin, "cpu")
    solo.load(0, session.state([2])[0])
    torch.testing.assert_close(together[0], solo.predict(x), rtol=0, atol=1e-10)


def test_a_closed_session_holds_no_tensor_whoever_holds_it():
    _, _, session = opened(3)
    session.advance(chunk(range(3)))
    held = session._feed, session._verifier()
    weights = weakref.ref(session._tensors["weights"])
    session.close()
    assert weights() is None
    del held


def test_a_short_last_batch_does_not_say_how_long_a_launch_takes(monkeypatch):
    seconds = iter([3.0, 0.1, 6.0])

    class Took:
        def __init__(self, device: str) -> None: ...

        def stop(self) -> "Took":
            return self

        def seconds(self) -> float:
            return next(seconds)

    monkeypatch.setattr(fused, "Clock", Took)
    _, _, session = opened(2)
    tail = Chunk((0, 1), (Cursor(0, 2, 2),) * 2, 7, 1)
    for one, launch_s in ((chunk(range(2)), 1.0), (tail, 1.0), (chunk(range(2), epoch=1), 1.0)):
        session.metrics(session.advance(one))
        assert session.timing()[0] == launch_s
