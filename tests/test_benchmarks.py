"""The benchmarks' own arithmetic on fakes, and one minuscule run of everything."""

from __future__ import annotations

import doctest
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import cpu, gpu, hardware, ours, plot, precision, tables
from benchmarks import report as reporting
from benchmarks.peers_cuda import Steps, repeated
from benchmarks.record import (
    OURS,
    Ceilings,
    Cold,
    ColdCall,
    Fidelity,
    Measured,
    Mix,
    Need,
    Report,
    Row,
    Window,
    from_json,
    to_json,
)
from benchmarks.sizes import ColdSize, MixSize, Size
from benchmarks.windows import Called, Unavailable, measure, measure_apart
from benchmarks.workloads import WORKLOADS, sampled, sweep
from carpool.events import EpochEnded, Event, GroupAdvanced, GroupStarted, GroupVerified


class FakeClock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, name: str, seconds: Iterator[float], log: list[str]) -> Callable[[], int]:
        """A way's run of ten model-steps that lasts the next of these seconds."""

        def run() -> int:
            log.append(name)
            self.now += next(seconds)
            return 10

        return run


# Windows


def test_windows_alternate_and_the_median_window_counts() -> None:
    clock, log = FakeClock(), []
    fast = Called("fast", 1, clock.takes("fast", iter([9.0, 1.0, 5.0, 2.0]), log), clock=clock)
    slow = Called("slow", 1, clock.takes("slow", iter([9.0, 4.0, 4.0, 8.0]), log), clock=clock)

    one, other = measure([fast, slow], windows=3, clock=clock)

    assert log == ["fast", "slow"] * 4
    assert one.first == Window(9.0, 10)
    assert (one.rate, one.seconds) == (5.0, 2.0)
    assert (other.rate, other.seconds) == (2.5, 4.0)


@pytest.mark.parametrize(
    ("windows", "rounds", "expected"), [(5, 2, [0, 4]), (5, 3, [0, 2, 4]), (5, 1, [0]), (2, 3, [0, 1])]
)
def test_a_way_of_few_windows_has_them_spread_over_the_rounds(windows, rounds, expected) -> None:
    clock, log = FakeClock(), []
    few = Called("few", 1, clock.takes("few", iter([1.0] * 9), log), clock=clock)
    few.rounds = rounds
    all_ = Called("all", 1, clock.takes("all", iter([1.0] * 9), log), clock=clock)

    one, other = measure([all_, few], windows, clock=clock)

    assert (len(one.windows), len(other.windows)) == (windows, len(expected))
    turns = "".join({"all": "|", "few": "x"}[name] for name in log[2:]).split("|")[1:]
    assert [place for place, turn in enumerate(turns) if turn] == expected


def test_past_the_deadline_no_way_is_prepared_and_no_second_round_begins() -> None:
    clock, log = FakeClock(), []
    ours_ = Called("ours", 1, clock.takes("ours", iter([9.0] * 9), log), clock=clock)
    peer = Called("peer", 1, clock.takes("peer", iter([9.0] * 9), log), clock=clock)

    one, other = measure([ours_, peer], windows=5, deadline=8.0, clock=clock)

    assert log == ["ours", "ours"]
    assert len(one.windows) == 1
    assert (other.note, other.rate) == ("skipped: out of time", None)


def test_ways_that_do_not_fit_side_by_side_come_one_after_another() -> None:
    clock, log = FakeClock(), []
    ways = [Called(name, 1, clock.takes(name, iter([1.0] * 9), log), clock=clock) for name in ("a", "b", "c")]

    one, other, late = measure_apart(ways, 2, lambda: log.append("|"), deadline=5.5, clock=clock)

    assert log == ["a", "a", "a", "|", "b", "b", "b", "|"]
    assert (len(one.windows), len(other.windows), late.note) == (2, 2, "skipped: out of time")


def test_a_way_that_raises_is_a_note_and_the_others_go_on() -> None:
    def fail() -> int:
        raise MemoryError("too wide")

    bad, good = measure([Called("bad", 1, fail), Called("good", 1, lambda: 7)], windows=2)

    assert bad.note == "failed: MemoryError: too wide"
    assert bad.windows == ()
    assert [window.model_steps for window in good.windows] == [7, 7]


def test_a_way_that_the_machine_lacks_says_so_and_one_that_can_begins_beside_the_others() -> None:
    log: list[str] = []

    class Beside(Called):
        def begin(self) -> None:
            log.append(f"{self.name} begins")
            if self.name == "mps":
                raise Unavailable("needs a GPU: MPS shares one")

    def runs(name: str) -> Callable[[], int]:
        return lambda: log.append(name) or 1

    ways = [Beside(name, 1, runs(name)) for name in ("ours", "peer", "mps")]
    found = measure(ways, windows=1)

    assert log == ["ours", "peer begins", "mps begins", "peer", "ours", "peer"]
    assert [one.note for one in found] == ["", "", "needs a GPU: MPS shares one"]


def test_every_way_is_closed_whatever_happens() -> None:
    closed: list[str] = []

    class Interrupted(Called):
        def close(self) -> None:
            closed.append(self.name)

    def interrupt() -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure([Interrupted("a", 1, lambda: 1), Interrupted("b", 1, interrupt)], windows=1)
    assert closed == ["a", "b"]


def test_steady_steps_fill_their_window() -> None:
    taken: list[None] = []
    way = Steps("steps", 3, lambda: repeated(lambda: taken.append(None), "cpu"), "cpu", window_s=0.005)

    assert way.prepare().model_steps == 3
    way.window()  # settles how many steps a window has
    before = len(taken)
    assert way.window().model_steps == 3 * (len(taken) - before) > 3


# Our own steady figure


def heard(*events: tuple[float, Event]) -> tuple[Window, ...]:
    clock = FakeClock()
    stopwatch = ours.Stopwatch(clock=clock)
    for clock.now, event in events:
        stopwatch(event)
    return stopwatch.windows()


def test_the_stopwatch_starts_after_the_first_check_and_stops_at_the_last_epoch() -> None:
    window = heard(
        (1.0, GroupStarted(0, ("a", "b"), "fused")),
        (4.0, GroupVerified(0, 2, 0.0)),
        (5.0, GroupAdvanced(0, 40)),
        (6.0, EpochEnded("a", 0, {})),
        (6.5, GroupVerified(0, 2, 0.0)),
        (7.0, GroupAdvanced(0, 40)),
        (9.0, EpochEnded("b", 1, {})),
    )
    assert window == (Window(5.0, 80),)


def test_the_stopwatch_starts_when_the_last_group_is_open() -> None:
    window = heard(
        (1.0, GroupStarted(0, ("a",), "fused")),
        (2.0, GroupVerified(0, 1, 0.0)),
        (2.5, GroupAdvanced(0, 10)),
        (3.0, GroupStarted(1, ("b",), "fused")),
        (5.0, GroupVerified(1, 1, 0.0)),
        (6.0, GroupAdvanced(1, 10)),
        (7.0, GroupAdvanced(0, 10)),
        (9.0, EpochEnded("a", 0, {})),
    )
    assert window == (Window(4.0, 20),)


def test_a_run_without_an_epoch_has_no_figure() -> None:
    assert heard((1.0, GroupStarted(0, ("a",), "in_turn"))) == ()


# Reports


def make_report(kind: str = "cpu", date: str = "2026-01-02", quick: bool = False) -> Report:
    peer = Measured("plain loop", 2, windows=(Window(2.0, 2000), Window(1.0, 1000), Window(4.0, 1000)))
    missing = Measured("vmap", 8, note="failed: MemoryError: too wide")
    own = Measured(
        OURS,
        8,
        Window(6.5, 8),
        windows=(Window(0.5, 12_345),),
        steady=(Window(1.0, 30_000),),
        first_step_s=5.2,
        peak_bytes=2**29,
    )
    row = Row("small-mlp", "MLP", 8, 32, 96, (own, peer, missing), Fidelity(2, 96, 1.5e-7, 0.4, 2e-3))
    hardware_ = {"cpu": "Fast CPU", "cores": 2} | ({"gpu": "NVIDIA H200"} if kind == "gpu" else {})
    return Report(kind, date, quick, hardware_, {"torch": "2.13"}, {"torch_threads": 1}, ("A note.",), (row,))


def test_a_report_survives_json() -> None:
    report = make_report()

    plain = json.loads(json.dumps(to_json(report)))

    assert from_json(plain) == report
    assert plain["rows"][0]["measured"][1]["model_steps_per_s"] == 1000.0
    assert plain["rows"][0]["measured"][1]["ratio_of_carpool"] == pytest.approx(24.69)


def test_the_table_has_rates_ratios_and_what_is_missing() -> None:
    head, rule, row, _, peers, _, rates, *rest = reporting.markdown(make_report()).splitlines()

    shown = dict(zip(cells(head), cells(row), strict=True))
    assert rule.count("---") == len(shown)
    assert shown == {
        "models": "8 × MLP, batch 32",
        "first step": "5.2 s",
        "first call": "6.5 s",
        "warm call": "0.5 s, 96 steps",
        "carpool": "**24.7 k**",
        "once open": "30.0 k",
        "÷ eager loop": "24.7× / 30.0×",
        "÷ best torch peer": "24.7× / 30.0×, plain loop",
        "largest Δ weight": "1.5e-07 (2.0e-03) after 96 steps",
    }
    assert dict(zip(cells(peers), cells(rates), strict=True)) == {
        "models": "8 × MLP, batch 32",
        "plain loop": "1.00 k (24.7× / 30.0×)",
        "vmap": "failed",
    }
    assert any(
        line.startswith("Fast CPU, 2 CPU cores, torch with 1 thread; torch 2.13; 2026-01-02;")
        for line in rest
    )
    assert "- A note." in rest
    assert "- 8 × small-mlp, vmap: failed: MemoryError: too wide" in rest


def cells(line: str) -> list[str]:
    return line.strip("| ").split(" | ")


def test_a_gpu_table_shows_memory_the_floor_and_the_gpu() -> None:
    report = make_report("gpu")
    by_bytes = replace(report.rows[0], need=Need(bytes=100, flops=100))
    by_flops = replace(report.rows[0], need=Need(bytes=1, flops=200))
    report = replace(report, rows=(by_bytes, by_flops), ceilings=Ceilings(6e6, 10e6))

    head, _, *rows = (cells(line) for line in reporting.markdown(report).splitlines()[:4])

    assert [dict(zip(head, row, strict=True))["of the floor"] for row in rows] == [
        "0.50 of 60.0 k",
        "0.60 of 50.0 k",
    ]
    assert {dict(zip(head, row, strict=True))["memory a model"] for row in rows} == {"64.0 MiB"}
    assert "NVIDIA H200" in reporting.markdown(report)


def test_cold_calls_are_a_table_of_their_own() -> None:
    cold = Cold("mlp", "MLP", 64, 1000, ColdCall(3.0, 10.0), ColdCall(1.0, 4.0), 100.0, 1000)
    report = replace(make_report("gpu"), cold=(cold, Cold("tfm", "tfm", 64, 100, note="failed: no room")))

    assert from_json(json.loads(json.dumps(to_json(report)))) == report
    text = reporting.markdown(report)
    assert "| 64 × MLP, 1000 steps | 3.0 s | 10.0 s | 1.0 s | 4.0 s | 100.0 s | 10.0×, 25.0× |" in text
    assert "- The eager loop's time is counted up from all steps of two models in a fresh process;" in text
    assert "- 64 × tfm, 100 steps: failed: no room" in text


def test_a_run_that_was_cut_goes_on_with_what_it_lacks(tmp_path: Path) -> None:
    cut = make_report("gpu")
    own = cut.rows[0].measured[0]
    late = replace(cut.rows[0], members=16, measured=(own, Measured("vmap", 16, note="skipped: out of time")))
    failed = replace(cut.rows[0], members=32, measured=(replace(own, windows=(), note="failed: no room"),))
    whole = Cold("mlp", "MLP", 64, 1000, ColdCall(3.0, 10.0), ColdCall(1.0, 4.0), 100.0, 200)
    lost = replace(whole, steps=100, note="failed: no room")
    fresh = replace(cut, rows=())

    assert reporting.resumed(fresh, tmp_path) == fresh
    reporting.write(
        replace(cut, rows=(*cut.rows, late, failed), cold=(whole, lost), ceilings=Ceilings(1.0, 2.0)),
        tmp_path,
    )
    found = reporting.resumed(fresh, tmp_path)
    assert found.ceilings == Ceilings(1.0, 2.0)
    assert (found.rows, found.cold) == ((*cut.rows, late, failed), (whole, lost)), "nothing is thrown away"
    assert [row for row in found.rows if reporting.is_whole(row, 1)] == [*cut.rows]
    again = reporting.grown(reporting.grown(found, replace(late, measured=cut.rows[0].measured)), whole)
    assert [reporting.is_whole(row, 1) for row in again.rows] == [True, True, False]
    assert again.cold == (lost, whole)
    elsewhere = replace(fresh, hardware={**fresh.hardware, "cpu": "Slow CPU"})
    assert reporting.resumed(elsewhere, tmp_path).notes[-1].endswith("other CPUs too: Fast CPU, 2 cores.")
    with pytest.raises(reporting.OtherRun, match=r"'torch': '2.14'.*Move it away"):
        reporting.resumed(replace(fresh, versions={"torch": "2.14"}), tmp_path)
    assert not reporting.is_whole(cut.rows[0], 3), "one window each is not three"


def test_rows_of_a_structure_stand_beside_one_another() -> None:
    report = replace(make_report("gpu"), rows=())
    [row] = make_report().rows
    for name, members in (("mlp", 16), ("tiny", 256), ("mlp", 1), ("tiny", 16)):
        report = reporting.grown(report, replace(row, workload=name, members=members))
    assert [(row.workload, row.members) for row in report.rows] == [
        ("tiny", 16),
        ("tiny", 256),
        ("mlp", 1),
        ("mlp", 16),
    ]


def test_rows_that_differ_in_their_title_alone_are_two() -> None:
    [row] = make_report().rows
    report = replace(make_report("matrix"), rows=())
    for title in ("MLP, one structure", "MLP, each its own", "MLP, each its own"):
        report = reporting.grown(report, replace(row, title=title))
    assert [row.title for row in report.rows] == ["MLP, one structure", "MLP, each its own"]


def test_the_mix_is_a_table_of_scores() -> None:
    makespans = {"threads": (2.0, 4.0, 3.0), "carpool, once open": (1.5, 1.5, 1.0)}
    mix = Mix({"tiny": 8}, (30.0, 60.0, 30.0), makespans, 9.0)
    report = reporting.grown(make_report("gpu"), mix)

    assert from_json(json.loads(json.dumps(to_json(report)))) == report
    assert to_json(report)["mix"]["scores"] == {"threads": 10.0, "carpool, once open": 20.0}
    text = reporting.markdown(report)
    assert "| threads | 3.00 s | 10.0× | 2.00× |" in text
    assert "| carpool, once open | 1.50 s | 20.0× | 1.00× |" in text


def test_what_every_way_took_to_begin_and_held_is_a_table() -> None:
    text = reporting.markdown(make_report("gpu"))
    assert "| built, compiled, warmed up; memory a model | plain loop | vmap | carpool |" in text
    assert "| 8 × MLP, batch 32 | – | – | 6.5 s, 64.0 MiB |" in text


def test_a_budget_that_is_spent_leaves_rows_out_and_says_so() -> None:
    said: list[str] = []
    limits, setting = gpu.Limits(1, 0.1, 30.0), gpu.Setting("cpu", False, "fp32")
    sizes = [Size("tiny", 4, 1, takes_s=60), ColdSize("mlp", 64, 100, takes_s=31), MixSize(1.0)]

    assert list(gpu.run(sizes, limits, setting, said.append, clock=lambda: 5.0)) == []
    assert said[0] == "4 × tiny: left out, 30 s of 60; --resume goes on with it"
    assert len(said) == 3


def test_what_remains_of_a_run_leaves_out_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SIZES", (Size("small-mlp", 8, 1), Size("tiny", 8, 1)))
    monkeypatch.setattr(gpu, "QUICK_SIZES", (Size("tiny", 8, 1),))
    monkeypatch.setattr(gpu, "COLD", (ColdSize("mlp", 64, 100),))
    report = make_report("gpu")

    assert gpu.remaining(report, chosen=False) == [Size("tiny", 8, 1), ColdSize("mlp", 64, 100), gpu.MIX]
    there = replace(report, cold=(Cold("mlp", "MLP", 64, 100),), mix=Mix({}, (), {}, 0.0))
    assert gpu.remaining(there, chosen=False) == [Size("tiny", 8, 1)]
    assert gpu.remaining(replace(report, quick=True), chosen=False) == [Size("tiny", 8, 1)]
    partly = replace(there, settings={"windows": 3}, cold=(Cold("mlp", "MLP", 64, 100, note="failed"),))
    rest = [Size("tiny", 8, 1), Size("small-mlp", 8, 1), ColdSize("mlp", 64, 100)]
    assert gpu.remaining(partly, chosen=False) == rest, "what is missing comes before what is there in part"


def test_files_are_named_by_date_and_hardware(tmp_path: Path) -> None:
    made = [make_report(), make_report("gpu"), make_report(quick=True)]

    names = [reporting.write(report, tmp_path).name for report in made]

    assert names == ["2026-01-02-cpu.json", "2026-01-02-h200.json", "2026-01-02-cpu-quick.json"]
    lowered = replace(make_report("gpu"), settings={"precision": "bf16"})
    assert reporting.write(lowered, tmp_path).name == "2026-01-02-h200-bf16.json"
    assert (tmp_path / "2026-01-02-h200.md").read_text() == reporting.markdown(made[1])


def test_the_newest_full_report_of_each_kind_is_found(tmp_path: Path) -> None:
    newest, gpu_report = make_report(date="2026-03-01"), make_report("gpu")
    lowered = replace(make_report("gpu", date="2026-05-01"), settings={"precision": "fp32"})
    for report in (newest, make_report(), gpu_report, lowered, make_report(date="2026-04-01", quick=True)):
        reporting.write(report, tmp_path)

    assert reporting.newest(tmp_path) == [gpu_report, lowered, newest]


# README


def test_only_what_is_between_the_markers_changes() -> None:
    text = f"# Title\n\n{reporting.START}\nold\n{reporting.END}\n\nEnd\n"

    once = reporting.replaced(text, "| new |\n")

    assert once == f"# Title\n\n{reporting.START}\n| new |\n{reporting.END}\n\nEnd\n"
    assert reporting.replaced(once, "| new |\n") == once


@pytest.mark.parametrize("text", ["", reporting.START, reporting.END, f"{reporting.END}{reporting.START}"])
def test_missing_markers_are_said(text: str) -> None:
    with pytest.raises(reporting.MarkersMissing, match="benchmarks:start"):
        reporting.replaced(text, "table")


def test_the_readme_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(plot, "is_there", lambda: False)
    readme, results = tmp_path / "README.md", tmp_path / "results"
    arguments = ["readme", "--out", str(results)]

    assert command.main(arguments) == 1
    assert "found none" in capsys.readouterr().err
    reporting.write(make_report(), results)
    readme.write_text("no place for a table\n")
    assert command.main(arguments) == 1
    assert "README.md was left as it is" in capsys.readouterr().err
    readme.write_text(f"{reporting.START}\n{reporting.END}\n")
    assert command.main(arguments) == 0
    assert "**24.7 k**" in readme.read_text()
    assert "![" not in readme.read_text()
    monkeypatch.setattr(plot, "is_there", lambda: True)
    monkeypatch.setattr(plot, "draw", lambda report, path: path.write_bytes(b""))
    lowered = replace(make_report(), settings={"precision": "bf16"})
    reporting.write(lowered, results)
    assert command.main(arguments) == 0
    assert "](results/2026-01-02-cpu.png)" in readme.read_text()
    assert "| 8 × MLP, batch 32 | bf16 | **24.7 k** | 30.0 k |" in readme.read_text()


# The rest


def test_samples_are_spread_over_the_sweep() -> None:
    members = sweep(9)

    assert [member.seed for member in sampled(members, 3)] == [0, 4, 8]
    assert sampled(sweep(1), 3) == sweep(1)
    assert (members[0].lr, members[-1].lr) == pytest.approx((1e-4, 1e-2))


@pytest.mark.parametrize("module", [reporting, hardware, precision, tables])
def test_examples_in_docstrings(module: object) -> None:
    outcome = doctest.testmod(module)  # type: ignore[arg-type]

    assert outcome.attempted > 0
    assert outcome.failed == 0


@pytest.mark.slow
def test_the_cpu_benchmark_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "SIZES", (Size("small-mlp", 3, 2),))
    monkeypatch.setattr(cpu, "WINDOW_S", 0.01)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    threads = torch.get_num_threads()

    status = command.main(
        ["cpu", "--windows", "1", "--compile", "off", "--threads", "1", "--out", str(tmp_path)]
    )

    torch.set_num_threads(threads)
    assert status == 0
    (report,) = reporting.newest(tmp_path)
    (row,) = report.rows
    whole, steady = row.measured[:4], row.measured[4:]
    assert [one.way for one in whole] == [OURS, "plain loop", "torch.func vmap", "2 processes"]
    assert [one.way for one in steady] == ["compiled", "vmap + compile", "JAX vmap + scan"]
    assert all(one.rate and not one.note for one in row.measured)
    assert [one.windows[0].model_steps for one in whole] == [3 * 64, 2 * 64, 3 * 64, 2 * 64]
    assert row.fidelity is not None
    assert row.fidelity.max_difference <= 1e-4 * row.fidelity.max_weight


@pytest.mark.gpu
def test_the_gpu_benchmark_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SIZES", (Size("tiny", 4, 2),))

    status = command.main(["gpu", "--windows", "2", "--rows", "tiny", "--out", str(tmp_path)])

    assert status == 0
    (report,) = reporting.newest(tmp_path)
    assert all(one.rate for one in report.rows[0].measured), [one.note for one in report.rows[0].measured]


# Interleaved


def test_the_matrix_compares_whole_calls_with_taking_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import matrix

    monkeypatch.setattr(matrix, "CPU", (matrix.Weight("tiny", (8, 4), 8, 32, 1),))
    monkeypatch.setattr(matrix, "COUNTS", (1, 2))
    rows = list(matrix.run("cpu", 1, 1e9, lambda word, count, same: True, lambda text: None))
    assert [(row.members, row.title.rpartition(", ")[2]) for row in rows] == [
        (1, "one structure"), (2, "one structure"), (2, "each its own")
    ]  # fmt: skip
    assert [row.way("carpool").note for row in rows] == ["ran interleaved", "ran fused", "ran interleaved"]  # type: ignore[union-attr]
    assert all(row.ratio("taking turns") for row in rows)


@pytest.mark.slow
def test_loaders_are_compared_with_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import loaders

    for name, value in {"BATCHES": 2, "WAIT_S": 0.0, "EPOCHS": 1, "IMAGES": 34}.items():
        monkeypatch.setattr(loaders, name, value)
    found = loaders.run("cpu", 1, lambda text: None)
    assert len(found) == 4
    assert all(one["ratio"] > 0 for one in found.values() if isinstance(one, dict))


def test_workers_are_compared_with_one_after_another_and_with_a_loop_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks import workers

    for name, value in {"STEP_S": 0.001, "STEPS": 4, "LOOP_STEPS": 5}.items():
        monkeypatch.setattr(workers, name, value)
    found = workers.run(1, lambda text: None)
    scores = found["scores"]
    assert scores["chosen"] == "interleaved"  # too little work for a worker
    assert scores["times_faster"] == scores["one_after_another_s"] / scores["auto_s"]
    assert scores["between_steps_percent_in_a_worker"] > 0
    assert all(len(values) == 1 for values in found["samples"].values())


def test_what_an_epoch_costs_is_told_by_members_and_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import epochs

    for name, value in {"MEMBERS": (1, 2), "SHORT": 1, "LONG": 3}.items():
        monkeypatch.setattr(epochs, name, value)
    taken = iter([9.0, 0.5, 2.5] * 4)  # seconds of each call: the first warms up
    monkeypatch.setattr(epochs, "_seconds", lambda *_: next(taken))
    scores = epochs.run("cpu", 1, False, lambda text: None)["scores"]
    assert scores == dict.fromkeys(("1 jobs", "1 jobs, validated", "2 jobs", "2 jobs, validated"), 1e6)


def test_the_epochs_that_are_timed_are_trained() -> None:
    from benchmarks import epochs

    assert epochs._seconds(2, True, 1, "cpu", False) > 0


def test_panels_are_compared_with_one_panel_of_the_same_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import panels

    monkeypatch.setattr(panels, "SIZES", (panels.Size(replace(WORKLOADS["small-mlp"], samples=64), 3, 1),))
    monkeypatch.setattr("carpool.adapters.torch.panels.cache_bytes", lambda threads: 400_000)
    monkeypatch.setattr(panels, "_compared", partial(_uncompiled, panels._compared))
    scores = panels.run(1, lambda text: None)["scores"]
    assert [set(one) for one in scores.values()] == [{"1 panel", "2 panels"}] * 2
    assert panels._real is panels.panels.num_panels, "put back"


def _uncompiled(compared: Any, size: Any, compile: bool, windows: int) -> dict[str, float]:
    return compared(size, False, windows)
