"""`carpool bench`: what it compares does what it says, and its table says what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from carpool import bench, cli, peers
from carpool.bench import EAGER, OURS, VMAPPED, Report, Timed

SHORT = peers.Structure("MLP", peers.mlp, (32,), epochs=1)


def uncompiled(function: Callable[[], int], dynamic: bool) -> Callable[[], int]:
    return function


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few samples, and nothing compiled: torch's compiler takes longer than all the rest."""
    monkeypatch.setattr(torch, "compile", uncompiled)
    for module in (bench, peers):
        monkeypatch.setattr(module, "SAMPLES", 64)
        monkeypatch.setattr(module, "STRUCTURES", (SHORT,), raising=False)


def test_every_way_is_timed_and_trains_its_models() -> None:
    said: list[str] = []
    found = bench.run(jobs=3, windows=2, device="cpu", say=said.append)

    assert said == ["3 × MLP on cpu"]
    assert [(one.way, one.models) for one in found.timed] == [(EAGER, 2), (VMAPPED, 3), (OURS, 3)]
    for one in found.timed:
        assert one.model_steps_per_s is not None
        assert one.whole_s == pytest.approx(3 * 2 / one.model_steps_per_s)
    ours = found.timed[-1]
    assert ours.first_step_s is not None
    assert ours.first_call_s is not None
    assert 0 < ours.first_step_s < ours.first_call_s
    assert found.timed[0].first_call_s is None
    assert all(len(ratios) == 2 for ratios in found.ratios().values())


@pytest.mark.parametrize("structure", [peers.STRUCTURES[0], peers.STRUCTURES[1]], ids=["mlp", "cnn"])
def test_vmap_s_adam_is_torch_s(structure: peers.Structure) -> None:
    x, y = peers.drawn(structure)
    rows = torch.arange(64).view(2, 32)
    torch.manual_seed(0)
    models = [structure.make() for _ in range(2)]
    alone = []
    for place, model in enumerate(models):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            loss = cross_entropy(model(x[rows[place]]), y[rows[place]])
            loss.backward()
            optimizer.step()
            alone.append(loss.detach())
    torch.manual_seed(0)
    step = peers.Vmapped(structure, x, y, 2)._made()
    together = torch.stack([step(rows) for _ in range(3)])
    torch.testing.assert_close(together.T.flatten(), torch.stack(alone), rtol=1e-4, atol=1e-5)


def test_a_peer_that_fails_says_so_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Callable[[], int], **_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)
    found = bench.run(jobs=2, windows=1, device="cpu", say=lambda text: None)

    assert [(one.way, one.note) for one in found.timed] == [
        (EAGER, ""),
        (VMAPPED, "failed: RuntimeError"),
        (OURS, ""),
    ]
    assert found.ratios()["MLP"][VMAPPED] is None
    assert "failed: RuntimeError" in found.describe()


def test_the_table() -> None:
    timed = (
        Timed("MLP", EAGER, 2, 1000.0, whole_s=64.0),
        Timed("MLP", VMAPPED, 64, 20_000.0, 9.0, whole_s=3.2),
        Timed("MLP", OURS, 64, 50_000.0, 12.0, 11.5, 1.28),
    )
    lines = Report("cpu", 64, 3, timed).describe().splitlines()

    assert [line.split() for line in lines[1:5]] == [
        ["MLP"],
        ["eager", "loop", "1,000", "64.0", "s", "50.00"],
        ["vmap", "+", "compile", "20,000", "3.2", "s", "9.0", "s", "2.50"],
        ["carpool", "50,000", "1.3", "s", "12.0", "s", "11.5", "s"],
    ]
    assert "64 models" in lines[0]


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = CliRunner().invoke(cli.app, ["bench", "--jobs", "2", "--windows", "1", "--device", "cpu"])
    assert shown.exit_code == 0, shown.output
    assert "carpool ÷" in shown.output
    plain = CliRunner().invoke(
        cli.app, ["bench", "--jobs", "2", "--windows", "1", "--device", "cpu", "--json"]
    )
    found = json.loads(plain.stdout)
    assert (found["device"], found["jobs"]) == ("cpu", 2)
    assert set(found["ratios"]["MLP"]) == {EAGER, VMAPPED}
    assert {one["way"] for one in found["timed"]} == {EAGER, VMAPPED, OURS}


def test_without_torch_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    shown = CliRunner().invoke(cli.app, ["bench"])
    assert shown.exit_code == 2
    assert "carpool[torch]" in shown.stderr
