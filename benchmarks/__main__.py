"""`python -m benchmarks [cpu|gpu|matrix|epochs|nets|panels|predictions|loaders|memory|workers|keras|jax|tensorflow|readme]`: parse, run, print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.caches import empty_compilers
from benchmarks.record import OURS, Cold, Mix, Report, Row

if TYPE_CHECKING:
    from benchmarks.sizes import ColdSize, MixSize, Size

ROOT = Path(__file__).parents[1]


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.command == "readme":
        return _readme(options.out)
    with empty_compilers():
        command = options.command or _default_command()
        runs = {
            "gpu": _gpu,
            "cpu": _cpu,
            "matrix": _matrix,
            "epochs": _epochs,
            "nets": _nets,
            "panels": _panels,
            "predictions": _predictions,
            "loaders": _loaders,
            "memory": _memory,
            "keras": _keras,
            "jax": _jax,
            "tensorflow": _tensorflow,
            "workers": _workers,
        }
        return runs[command](options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Peers beside carpool in one run."
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=[
            "cpu",
            "gpu",
            "matrix",
            "epochs",
            "nets",
            "panels",
            "predictions",
            "loaders",
            "memory",
            "workers",
            "keras",
            "jax",
            "tensorflow",
            "readme",
        ],
        help="default: gpu where there is one, else cpu",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a look: the narrow rows alone, on a CPU with fewer steps; never used by readme",
    )
    parser.add_argument("--windows", type=int, default=5, help="alternating windows of every way (default 5)")
    parser.add_argument(
        "--rows",
        help="only these: tiny,mlp,cnn,tfm,resnet, small-mlp,small-cnn; tiny:256 names a size, cold, cold:mlp and cold:mlp:100"
        " cold calls, mix the mix; keras: three,members; tensorflow: modules,graphs; nets: their numbers",
    )
    parser.add_argument(
        "--budget-s", type=float, default=500.0, help="gpu: seconds to share among the rows (500)"
    )
    parser.add_argument("--resume", action="store_true", help="gpu: keep today's rows, measure the others")
    parser.add_argument(
        "--precision",
        choices=["tf32", "bf16", "fp32"],
        default="tf32",
        help="gpu: what every way computes in (default tf32)",
    )
    parser.add_argument("--threads", type=int, help="torch's threads (default: torch's own choice)")
    parser.add_argument(
        "--compile", choices=["on", "auto", "off"], default="on", help="carpool.train's compile (default on)"
    )
    parser.add_argument(
        "--device", help="gpu: where to run (default cuda:0); cpu tries the ways out without a GPU"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results"
    )
    return parser


def _default_command() -> str:
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"


def _cpu(options: argparse.Namespace) -> int:
    from benchmarks import cpu, floor, hardware

    _set_threads(options.threads)
    compile = _compile(options)
    sizes = [size for size in (cpu.QUICK_SIZES if options.quick else cpu.SIZES) if _wanted(size, options)]
    report = _report(
        "cpu", options, hardware.describe("cpu"), cpu.settings(options.windows, compile), cpu.NOTES
    )
    report = replace(report, ceilings=floor.ceilings("cpu", "fp32"))
    return _record(report, cpu.run(sizes, options.windows, compile, _say), options.out)


def _gpu(options: argparse.Namespace) -> int:
    from benchmarks import floor, gpu, hardware, precision, report

    _set_threads(options.threads)
    precision.allow(options.precision)
    setting = gpu.Setting(options.device or "cuda:0", _compile(options), options.precision)
    limits = gpu.Limits(options.windows, gpu.WINDOW_S, options.budget_s)
    made = _report(
        "gpu", options, hardware.describe(setting.device), gpu.settings(limits, setting), gpu.NOTES
    )
    try:
        made = report.resumed(made, options.out) if options.resume else made
    except report.OtherRun as error:
        _say(str(error))
        return 1
    if made.ceilings is None:
        made = replace(made, ceilings=floor.ceilings(setting.device, options.precision))
    sizes = [size for size in gpu.remaining(made, options.rows is not None) if _wanted(size, options)]
    return _record(made, gpu.run(sizes, limits, setting, _say), options.out)


def _memory(options: argparse.Namespace) -> int:
    from benchmarks import hardware, memory

    device = options.device or ("cuda:0" if _default_command() == "gpu" else "cpu")
    return _plainly("memory", hardware.describe(device), memory.run(device, _say), options.out)


def _matrix(options: argparse.Namespace) -> int:
    from benchmarks import hardware, matrix, precision

    _set_threads(options.threads)
    device = options.device or ("cuda:0" if _default_command() == "gpu" else "cpu")
    precision.allow("tf32")
    report = _report("matrix", options, hardware.describe(device), {"windows": options.windows}, matrix.NOTES)

    def wanted(word: str, count: int, same: bool) -> bool:
        kind = "same" if same else "different"
        named = {word, f"{word}:{count}", f"{word}:{count}:{kind}"}
        return options.rows is None or not named.isdisjoint(options.rows.split(","))

    rows = matrix.run(device, options.windows, options.budget_s, wanted, _say)
    return _record(report, rows, options.out)


def _epochs(options: argparse.Namespace) -> int:
    from benchmarks import epochs, hardware

    device = options.device or ("cuda:0" if _default_command() == "gpu" else "cpu")
    found = epochs.run(device, options.windows, _compile(options), _say)
    return _plainly("epochs", hardware.describe(device), found, options.out)


def _nets(options: argparse.Namespace) -> int:
    from benchmarks import hardware, nets

    _set_threads(options.threads)
    numbers = [int(word) for word in options.rows.split(",")] if options.rows else range(0, 300, 3)
    return _plainly("nets", hardware.describe("cpu"), nets.run(numbers, options.windows, _say), options.out)


def _panels(options: argparse.Namespace) -> int:
    from benchmarks import hardware, panels

    _set_threads(options.threads)
    return _plainly("panels", hardware.describe("cpu"), panels.run(options.windows, _say), options.out)


def _predictions(options: argparse.Namespace) -> int:
    from benchmarks import hardware, predictions

    _set_threads(options.threads)
    found = predictions.run(options.windows, _say)
    return _plainly("predictions", hardware.describe("cpu"), found, options.out)


def _loaders(options: argparse.Namespace) -> int:
    from benchmarks import hardware, loaders

    _set_threads(options.threads)
    device = options.device or "cpu"
    return _plainly(
        "loaders", hardware.describe(device), loaders.run(device, options.windows, _say), options.out
    )


def _workers(options: argparse.Namespace) -> int:
    from benchmarks import hardware, workers

    _set_threads(options.threads or 1)
    return _plainly("workers", hardware.describe("cpu"), workers.run(options.windows, _say), options.out)


def _keras(options: argparse.Namespace) -> int:
    from benchmarks import hardware, keras_fits

    device = "cuda:0" if _default_command() == "gpu" else "cpu"
    rows = options.rows.split(",") if options.rows else ("three", "members")
    found = keras_fits.run(options.windows, options.quick, _say, rows)
    return _plainly(f"keras-{found['backend']}", hardware.describe(device), found, options.out)


def _jax(options: argparse.Namespace) -> int:
    from benchmarks import hardware, jax_ensembles

    device = "cuda:0" if _default_command() == "gpu" else "cpu"
    rows = options.rows.split(",") if options.rows else []
    found = jax_ensembles.run(rows, options.windows, options.quick, _say)
    return _plainly("jax", hardware.describe(device), found, options.out)


def _tensorflow(options: argparse.Namespace) -> int:
    """Each part is a module of its own, and a record of its own."""
    from importlib import import_module

    from benchmarks import hardware

    ended = 0
    for row in options.rows.split(",") if options.rows else ("modules", "graphs"):
        found = import_module(f"benchmarks.tensorflow_{row}").run(options.windows, options.quick, _say)
        ended |= _plainly(f"tensorflow-{row}", hardware.describe("cpu"), found, options.out)
    return ended


def _plainly(kind: str, hardware: dict, found: dict, folder: Path) -> int:
    """A record that is no table of model-steps."""
    from benchmarks.hardware import slug, versions

    today = datetime.now(UTC).date().isoformat()
    record = {"kind": kind, "date": today, "hardware": hardware, "versions": versions(), **found}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}-{today}-{slug(hardware)}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(found.get("scores", found), indent=1), flush=True)
    _say(f"written to {path}")
    return 0


def _readme(results: Path) -> int:
    from benchmarks import plot, report

    reports = report.newest(results)
    for one in reports if plot.is_there() else ():
        if plot.drawn(one):
            plot.draw(one, report.place(one, results).with_suffix(".png"))
    if not reports:
        _say(f"Expected full results in {results}, found none. Run `python -m benchmarks` first.")
        return 1
    try:
        report.rewrite_readme(ROOT / "README.md", reports, results)
    except (report.MarkersMissing, FileNotFoundError) as error:
        _say(f"README.md was left as it is. {error}")
        return 1
    _say("README.md shows " + " and ".join(f"{one.kind} of {one.date}" for one in reports))
    return 0


def _record(report: Report, found: Iterable[Row | Cold | Mix], folder: Path) -> int:
    """Writes after every row, so that a run that is cut off keeps its results; 1 when carpool failed in a row."""
    from benchmarks import plot
    from benchmarks.report import grown, write
    from benchmarks.tables import markdown

    path = write(report, folder)
    for one in found:
        report = grown(report, one)
        path = write(report, folder)
    print(markdown(report), flush=True)
    _say(f"written to {path}")
    if plot.is_there() and plot.drawn(report):
        _say(f"drawn in {plot.draw(report, path.with_suffix('.png'))}")
    else:
        _say("no plot: matplotlib is not installed, or there is nothing to draw")
    failed = [row for row in report.rows if (ours := row.way(OURS)) is None or ours.rate is None]
    return 1 if failed else 0


def _report(
    kind: str, options: argparse.Namespace, hardware: dict, settings: dict, notes: tuple[str, ...]
) -> Report:
    from benchmarks.hardware import versions

    today = datetime.now(UTC).date().isoformat()
    return Report(kind, today, options.quick, hardware, versions(), settings, notes)


def _compile(options: argparse.Namespace) -> str | bool:
    return {"on": True, "off": False, "auto": "auto"}[options.compile]


def _wanted(size: Size | ColdSize | MixSize, options: argparse.Namespace) -> bool:
    return options.rows is None or not size.names.isdisjoint(options.rows.split(","))


def _set_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
