"""The benchmark's peers, floor, cold calls and plot, each minuscule and on a CPU."""

from __future__ import annotations

import json
import subprocess
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import cold, floor, gpu, mix, peers_together, precision
from benchmarks import report as reporting
from benchmarks.pace import Ended, FirstStep, Pace
from benchmarks.peers_cuda import captured_plain_step, plain_step
from benchmarks.peers_torch import Stacked, eager_step, seeded
from benchmarks.record import OURS, Ceilings, ColdCall, Measured, Need, Row, Window
from benchmarks.resnet import resnet
from benchmarks.sizes import ColdSize, MixSize, Size
from benchmarks.workloads import WORKLOADS, sweep
from carpool.events import EpochsEnded, GroupAdvanced


@pytest.fixture
def flags() -> Iterator[None]:
    """Torch's own settings, put back afterwards."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling is torch's matter, and takes longer than all the rest."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


# On a CPU torch's vmap has no norm of 16 bits beside statistics of 32.
@pytest.mark.parametrize(("name", "word"), [("small-resnet", "fp32"), ("small-cnn", "bf16")])
def test_a_stack_takes_the_step_of_the_plain_loop_buffers_included(name: str, word: str) -> None:
    workload = replace(WORKLOADS[name], precision=word)
    data, members = workload.data(), sweep(3)
    rows = torch.arange(24).view(3, 8)
    stack = Stacked(workload, members, "cpu")

    shown = stack.step(data.x[rows], data.y[rows])

    for place, member in enumerate(members):
        model = seeded(workload, member)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        values = eager_step(model, optimizer, data.x[rows[place]], data.y[rows[place]], word)
        rough = 2e-2 if word == "bf16" else 1e-5
        torch.testing.assert_close(shown[place, 0], values[0], rtol=rough, atol=rough)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(stack.buffers[name][place], buffer, rtol=rough, atol=rough)


def test_bf16_is_another_number_than_float32() -> None:
    losses = []
    for word in ("fp32", "bf16"):
        workload = replace(WORKLOADS["tiny"], precision=word)
        data = workload.data()
        stack = Stacked(workload, sweep(2), "cpu")
        losses.append(stack.step(data.x[:64].view(2, 32, -1), data.y[:64].view(2, 32))[0, 0].item())
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_the_captured_loop_takes_the_plain_loop_s_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    uncompiled(monkeypatch)
    built: list[torch.nn.Module] = []
    workload = WORKLOADS["small-mlp"]
    tracked = replace(workload, make=lambda: built.append(workload.make()) or built[-1])
    for make in (plain_step, captured_plain_step):
        torch.manual_seed(0)
        step = make(tracked, sweep(1)[0], workload.data())
        step()
        step()
    weights = [list(model.parameters()) for model in built]
    fresh = list(seeded(workload, sweep(1)[0]).parameters())
    for plain, captured, before in zip(*weights, fresh, strict=True):
        torch.testing.assert_close(plain, captured)
        assert not torch.equal(plain, before)


def test_resnet_18_has_the_usual_size() -> None:
    model = resnet()
    convolutions = [one for one in model.modules() if isinstance(one, torch.nn.Conv2d)]

    assert sum(leaf.numel() for leaf in model.parameters()) == 11_173_962
    assert len(convolutions) == 1 + 16 + 3
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_resnet_in_jax_has_as_many_parameters_and_moves_its_statistics() -> None:
    jax = pytest.importorskip("jax")
    from benchmarks import peers_jax

    network = peers_jax.NETWORKS["resnet"]
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 11_173_962
    small = peers_jax.resnet((2,), 1)
    x = jax.random.normal(jax.random.key(1), (4, 8, 8, 3))
    logits, moved = jax.jit(lambda key: small.apply(small.init(key), small.stats(), x))(jax.random.key(0))
    assert logits.shape == (4, 10)
    pairs = zip(jax.tree.leaves(small.stats()), jax.tree.leaves(moved), strict=True)
    assert all(old.shape == new.shape and (old != new).any() for old, new in pairs)


@pytest.mark.parametrize("name", ["tiny", "mlp", "cnn", "small-cnn", "tfm", "resnet"])
def test_jax_peers_keep_float32_whatever_they_compute_in(name: str) -> None:
    jax = pytest.importorskip("jax")
    from benchmarks import peers_jax

    network, workload = peers_jax.NETWORKS[name], WORKLOADS[name]
    image = workload.data().x[: workload.batch_size]
    x = (image.movedim(1, -1) if image.ndim == 4 else image).numpy()
    y = workload.data().y[: workload.batch_size].numpy().astype("int32")
    state = jax.eval_shape(lambda key: peers_jax._begin(network, key), jax.random.key(0))
    programs = {}
    for lowered in (False, True):
        step = partial(peers_jax._step, network, lowered)
        after, shown = jax.eval_shape(step, state, x, y, 0.1)
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), state
        )
        assert shown.shape == (2,)
        programs[lowered] = str(jax.make_jaxpr(step)(state, x, y, 0.1))
    assert "bf16" in programs[True]
    assert "bf16" not in programs[False]


def test_jax_peers_train() -> None:
    jax = pytest.importorskip("jax")
    import numpy as np

    from benchmarks import peers_jax

    data = WORKLOADS["tiny"].data()
    run = peers_jax.epochs(
        "tiny", data.x[:64].numpy(), data.y[:64].numpy(), np.array([1e-3, 1e-2]), 32, "bf16"
    )
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(run.state[0])]
    run.run(1)
    pairs = zip(before, jax.tree.leaves(run.state[0]), strict=True)
    assert all(np.isfinite(new).all() and (np.asarray(new) != old).any() for old, new in pairs)


# The floor


def test_what_a_step_needs_is_counted() -> None:
    workload = WORKLOADS["tiny"]
    parameters = 32 * 64 + 64 + 64 * 10 + 10
    products = (
        2 * 32 * (32 * 64 + 64 * 10)
    )  # of one pass; the backward pass has them again, and the inner gradient

    found = floor.need(workload, workload.data())

    assert found == Need(
        bytes=7 * 4 * parameters + 32 * 32 * 4 + 32 * 8, flops=2 * products + 2 * 32 * 64 * 10
    )


def test_ceilings_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(floor._COPIED, "cpu", 1 << 16)
    monkeypatch.setitem(floor._SIDE, "cpu", 64)

    found = [floor.ceilings("cpu", word) for word in precision.PRECISIONS]

    assert all(one.bytes_per_s > 0 and one.flops_per_s > 0 for one in found)


# Cold calls


def test_a_cold_call_trains_all_steps_and_says_when_the_first_was_on_its_way() -> None:
    found = cold.call(ColdSize("small-mlp", 2, 100), "cpu", "bf16")

    assert 0 < found.first_step_s < found.seconds


def test_a_cold_row_is_a_process_with_empty_caches_and_one_that_finds_them_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[list[str], dict[str, str], bool]] = []

    def run(line: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        folder = Path(env["CARPOOL_CACHE"])
        seen.append((line, env, folder.exists()))
        folder.mkdir(exist_ok=True)
        said = {"first_s": 3.0, "next_s": 0.5} if "--eager" in line else {"first_step_s": 1.0, "seconds": 2.0}
        return subprocess.CompletedProcess(line, 0, f"chatter\n{json.dumps(said)}\n")

    monkeypatch.setattr(subprocess, "run", run)
    found = cold.measure(ColdSize("small-mlp", 64, 8), "cpu", "tf32", 60.0, lambda text: None)

    assert found.first == found.again == ColdCall(1.0, 2.0)
    assert [(full, "--eager" in line) for line, _, full in seen] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    assert {env["TORCHINDUCTOR_CACHE_DIR"] for _, env, _ in seen} == {
        str(Path(seen[0][1]["CARPOOL_CACHE"]).with_name("torchinductor"))
    }
    assert seen[0][0][2:6] == ["benchmarks.cold", "small-mlp", "64", "8"]
    assert (found.eager_s, found.eager_steps) == (3.0 + 63 * 0.5, 8)


def test_the_eager_loop_of_a_cold_call_trains_two_models() -> None:
    found = cold.eager(ColdSize("small-mlp", 64, 8), "cpu", "fp32")
    assert min(found.first_s, found.next_s) > 0


def test_a_cold_row_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(line: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, line, stderr="Traceback\nValueError: no room\n")

    monkeypatch.setattr(subprocess, "run", run)
    found = cold.measure(ColdSize("small-mlp", 2, 2), "cpu", "tf32", 60.0, lambda text: None)

    assert (found.first, found.note) == (None, "failed: ValueError: no room")


def test_the_cold_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cold.main(["small-mlp", "2", "3", "--device", "cpu"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"first_step_s", "seconds"}


def test_the_first_step_and_the_pace_are_heard() -> None:
    times = iter([0.0, 3.0, *range(4, 20)])
    first = FirstStep(clock=lambda: next(times))
    first(GroupAdvanced(0, 8))
    first(GroupAdvanced(0, 8))
    assert first.seconds == 3.0
    pace = Pace(clock=lambda: next(times))
    for _ in range(Pace.ahead + 1):
        pace(GroupAdvanced(0, 8))
    assert (pace.windows(), pace.rate) == ((), None)
    pace(GroupAdvanced(0, 8))
    pace(GroupAdvanced(0, 6))
    assert (pace.windows(), pace.rate) == ((Window(2.0, 14),), 7.0)
    assert pace.windows(5) == (Window(1.0, 8), Window(1.0, 6))


@pytest.mark.parametrize(("groups", "chunks"), [(1, 12), (8, 24), (32, 12)])
def test_the_pace_of_groups_that_enqueue_ahead_is_the_device_s(groups: int, chunks: int) -> None:
    """One queue, a second a chunk; each group may have three under way, and is opened half a second after the one before."""
    now, finished, under_way = 0.0, 0.0, deque[tuple[float, int]]()
    pace = Pace(clock=lambda: now)
    left = dict.fromkeys(range(groups), chunks)
    while any(left.values()):
        while under_way and under_way[0][0] <= now:
            under_way.popleft()
        free = [
            group
            for group in left
            if left[group] and now >= group / 2 and sum(own == group for _, own in under_way) < 3
        ]
        for group in free[:1]:
            left[group] -= 1
            finished = max(now, finished) + 1.0
            under_way.append((finished, group))
            pace(GroupAdvanced(group, 4))
        if not free:
            now += 0.5
    assert pace.rate == pytest.approx(4.0, rel=0.03)


# The whole run


@pytest.mark.slow
def test_the_gpu_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: None) -> None:
    uncompiled(monkeypatch)
    monkeypatch.setattr(gpu, "SIZES", (Size("small-mlp", 2, 1), Size("small-mlp", 1, 1)))
    monkeypatch.setattr(gpu, "COLD", ())
    monkeypatch.setattr(gpu, "MIX", MixSize(worth_s=0.01, takes_s=1))
    monkeypatch.setattr(mix, "MIX", ("small-mlp",) * 2)
    monkeypatch.setattr(gpu, "COUNT", 2)
    monkeypatch.setattr(gpu, "WINDOW_S", 0.01)
    monkeypatch.setitem(floor._SIDE, "cpu", 64)
    arguments = ["gpu", "--device", "cpu", "--windows", "1", "--compile", "off", "--out", str(tmp_path)]

    assert command.main([*arguments, "--precision", "fp32", "--rows", "small-mlp:2"]) == 0
    assert command.main([*arguments, "--precision", "fp32", "--resume"]) == 0

    (path,) = tmp_path.glob("*.json")
    report = reporting.from_json(json.loads(path.read_text()))
    alone, together = report.rows
    assert path.stem.endswith("-cpu-fp32")
    assert [(one.way, one.members) for one in together.measured] == [
        (OURS, 2),
        ("eager loop", 1),
        ("vmap + compile", 2),
        ("JAX vmap + scan", 2),
        ("vmap, eager", 2),
        ("compiled", 1),
        ("threads", 2),
        ("processes", 2),
        ("processes + MPS", 2),
    ]
    *timed, shared = together.measured
    assert all(one.rate for one in timed), [(one.way, one.note) for one in timed]
    assert shared.note.startswith("needs a GPU")
    assert [one.way for one in alone.measured] == [OURS, "eager loop", "compiled"]
    assert report.mix is not None
    assert set(report.mix.makespans) == {mix.GRAPHS, mix.WHOLE, mix.OPEN}
    assert report.ceilings is not None
    assert together.bound(report.ceilings)
    assert together.fidelity is not None
    assert together.fidelity.max_difference <= 1e-3 * together.fidelity.max_weight
    assert "needs a GPU" in path.with_suffix(".md").read_text()


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = replace(WORKLOADS["small-mlp"], batch_size=0)
    way = peers_together.Processes(workload, sweep(1), "cpu", 0.01)
    with pytest.raises(RuntimeError, match="split_size"):
        way.prepare()
    way.close()


# The plot


def test_bars_are_in_order_and_leave_out_what_was_not_measured() -> None:
    from benchmarks import plot

    measured = (
        Measured(OURS, 2, windows=(Window(1.0, 20),), steady=(Window(1.0, 50),)),
        Measured("eager loop", 1, windows=(Window(1.0, 30),)),
        Measured("processes + MPS", 2, note="needs a GPU"),
    )
    row = Row("tiny", "tiny", 2, 32, 8, measured)
    assert plot.bars(row) == [(OURS, 20.0), ("eager loop", 30.0), (f"{OURS}, once open", 50.0)]


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plot
    from benchmarks.record import Report

    measured = (
        Measured(OURS, 2, windows=(Window(1.0, 20),)),
        Measured("eager loop", 1, windows=(Window(1.0, 3),)),
    )
    row = Row("tiny", "tiny", 2, 32, 8, measured, need=Need(10, 10))
    report = Report("cpu", "2026-01-02", False, {"cpu": "Fast", "cores": 2}, {}, {}, rows=(row, row))
    path = plot.draw(replace(report, ceilings=Ceilings(1e3, 1e4)), tmp_path / "made.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_epochs_that_are_told_together_are_counted_in_one_moment():
    """Two epochs of three jobs every tenth of a second, four steps each."""
    now = 0.0
    ended = Ended(4, clock=lambda: now, settled_s=0.1)
    for moment in range(5):
        for late in (0.0, 0.001):
            now = moment / 10 + late
            ended(EpochsEnded(("a", "b", "c"), np.zeros(3), {}))
    (window,) = ended.windows()
    assert window.model_steps == 3 * 2 * 12
    assert window.seconds == pytest.approx(0.3)
    assert Ended(4).windows() == ()
