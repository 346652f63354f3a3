"""The command line: parse, call, print. Nothing imports this, and it imports no framework: whoever needs one does."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

import carpool
from carpool import environment, recall, reporters, saving, scripts
from carpool.bench import run as run_bench
from carpool.demo import EPOCHS
from carpool.demo import run as run_demo
from carpool.doctor import PROBLEM, examine, table
from carpool.errors import CarpoolError, Interrupted, OptionError, SaveError, printable, sentence
from carpool.executors.interrupt import Bell
from carpool.executors.scripts import run as run_scripts
from carpool.executors.terms import Wanted, found_device, make_terms, with_folder, with_service
from carpool.job import Job
from carpool.jobfile import load_jobs
from carpool.planning.plan import Plan
from carpool.process import mps as sharing
from carpool.reporters.prefixed import Prefixed
from carpool.stopping import declared, direction
from carpool.train import plan_and_code

app = typer.Typer(
    help="Train many models at once on one GPU, each ending where it would have ended alone.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

File = Annotated[
    Path,
    typer.Argument(
        help="A Python file that names its jobs `jobs`: a sequence of carpool.Job, or a function."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Strategy = Annotated[str, typer.Option(help="auto, fused, interleaved, isolated or in_turn.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

_MISUSE = 2
_INTERRUPTED = 130  # what shells make of Ctrl-C
_SHOWN = 30  # rows of a table that still fit a screen


@app.command()
def demo(
    jobs: Annotated[int, typer.Option(min=1, help="How many classifiers.")] = 64,
    epochs: Annotated[int, typer.Option(min=1, help="How long each is trained.")] = EPOCHS,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train small classifiers together, then one by one, and compare time and weights."""
    with _one_line_errors():
        if as_json:
            report = run_demo(jobs, epochs, device, say=lambda _: None)
            typer.echo(json.dumps(asdict(report)))
        else:
            report = run_demo(jobs, epochs, device, say=typer.echo, reporters=reporters.default())
            typer.echo(report.describe())


@app.command()
def bench(
    jobs: Annotated[int, typer.Option(min=1, help="How many models of each structure.")] = 64,
    windows: Annotated[int, typer.Option(min=1, help="Timed windows of every way.")] = 3,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Time an eager loop, a compiled vmap and carpool on this machine, side by side."""
    with _one_line_errors():
        if as_json:
            found = run_bench(jobs, windows, device, say=lambda _: None)
            typer.echo(json.dumps({**asdict(found), "ratios": found.ratios()}))
        else:
            typer.echo(run_bench(jobs, windows, device, say=typer.echo).describe())


@app.command()
def train(
    file: File,
    strategy: Strategy = "auto",
    device: Device = "auto",
    save: Annotated[
        Path | None, typer.Option(help="A folder for results.json, weights and optimizer states.")
    ] = None,
    sort: Annotated[
        str | None, typer.Option(metavar="METRIC", help="Show the jobs in the order of a metric, best first.")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="Whether --sort's metric is better lower (min) or higher (max).")
    ] = "auto",
    verify: Annotated[
        bool, typer.Option("--verify", help="Keep comparing a sample with training alone.")
    ] = False,
) -> None:
    """Train the jobs of a file; the exit code is 1 when some of them failed."""
    with _one_line_errors():
        if save is not None:
            saving.check(save)
        jobs = load_jobs(file)
        _check_order(jobs, sort, mode)
        try:
            results, ended = carpool.train(jobs, device=device, strategy=strategy, verify=verify), None
        except BaseException as error:
            if not isinstance(getattr(error, "results", None), carpool.Results):
                raise
            results, ended = error.results, error  # pyright: ignore[reportAttributeAccessIssue]
        kept = _kept(results, save)  # before anything is printed: whoever reads that may be gone
        typer.echo(_leaderboard(results, sort, mode))
        if kept:
            typer.echo(kept)
    _exit(results, ended)


@app.command()
def plan(
    file: File,
    strategy: Strategy = "auto",
    device: Device = "auto",
    measure: Annotated[
        bool, typer.Option("--measure", help="Time steps where it is not known yet what is faster.")
    ] = False,
    show_code: Annotated[
        bool, typer.Option("--show-code", help="Print the C of each fused group's training step, too.")
    ] = False,
) -> None:
    """Show what would run together, and why, without running it."""
    with _one_line_errors():
        jobs = load_jobs(file)
        if show_code:
            made, codes = plan_and_code(jobs, device=device, strategy=strategy, measure=measure)
            typer.echo(f"{made.explain()}\n{_code(made, codes)}")
        else:
            made = carpool.plan(jobs, device=device, strategy=strategy, measure=measure)
            typer.echo(made.explain())


@app.command()
def doctor(
    as_json: Json = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Drop what was measured on this machine; it is measured anew.")
    ] = False,
) -> None:
    """Show what this machine has for carpool and what stands in the way; the exit code is 1 when something does."""
    if forget:
        typer.echo(f"carpool: {recall.forget()} measurement(s) dropped", err=True)
    findings = examine(environment.read())
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    else:
        typer.echo(table(findings))
    if any(finding.state == PROBLEM for finding in findings):
        raise typer.Exit(1)


class _Verbatim(TyperCommand):
    """A command whose arguments are another program's: from the first word that is not an option of ours, or `-m`, as they are."""

    def parse_args(self, ctx, args):
        position = 0
        takes_value = {
            name for option in self.params for name in option.opts if not getattr(option, "is_flag", True)
        }
        while position < len(args) and args[position].startswith("--") and args[position] != "--":
            position += 2 if args[position] in takes_value else 1
        if args[position : position + 1] == ["-m"]:
            args = [*args[:position], "--", *args[position:]]
        return super().parse_args(ctx, args)


@app.command("exec", cls=_Verbatim, context_settings={"allow_interspersed_args": False})
def execute(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGUMENTS] [: SCRIPT [ARGUMENTS]]...",
            help="Python files, -m modules or programs, each with its arguments.",
        ),
    ],
    memory: Annotated[
        str, typer.Option(help='Each script\'s cap: "8GiB" or "25%"; the others wait.')
    ] = "auto",
    jobs: Annotated[int | None, typer.Option(min=1, help="How many at once; as many as cores.")] = None,
    share: Annotated[
        float | None, typer.Option(help="Of the GPU's processors, for each script, with MPS: 0.25, say.")
    ] = None,
    grid: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE,VALUE: run with --NAME VALUE for each; repeatable.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="A folder for each script's whole output.")] = None,
    mps: Annotated[
        bool | None,
        typer.Option("--mps/--no-mps", help="Share the GPU through CUDA MPS; on where it is there."),
    ] = None,
    tf1: Annotated[
        bool,
        typer.Option("--tf1", help="They were written for TensorFlow 1: give them tensorflow.compat.v1."),
    ] = False,
) -> None:
    """Run unmodified scripts side by side; the exit code is 1 when some of them failed."""
    with _one_line_errors(), Bell() as bell:
        found = scripts.parse(words, grid or ())
        found = scripts.for_tf1(found) if tf1 else found
        scripts.check(found)
        if meant := scripts.hint(words):
            _tell(
                f"carpool: a lone {scripts.BETWEEN} stands between scripts; did you mean: carpool exec {meant}"
            )
        wanted = Wanted(memory, jobs, share, logs)
        device, is_gpu = found_device()
        terms = with_folder(make_terms(wanted, device, is_gpu, os.environ), wanted)
        asked = is_gpu if mps is None else mps
        with sharing.service() if asked else nullcontext(sharing.Service(False, "no MPS")) as service:
            _say_terms(service, share, asked or share is not None, terms.logs)
            output = _output()
            ended = run_scripts(found, with_service(terms, service), output, bell)
        is_interrupted = bell.rung > 0
    table = scripts.table(ended)
    if not output.say(table):
        _tell(f"{table}\ncarpool: stdout took no more: {output.lost}; the output is in {terms.logs}")
    if is_interrupted or output.lost or not all(each.is_completed and not each.lost for each in ended):
        raise typer.Exit(_INTERRUPTED if is_interrupted else 1)


def main() -> None:
    """The `carpool` command."""
    _hold_descriptors()
    app()


def _hold_descriptors() -> None:
    """What is opened must not take the place of a standard descriptor that is closed: it would be written into."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _output() -> Prefixed:
    if sys.stdout is None:
        return Prefixed(None, False)
    return Prefixed(sys.stdout.buffer, sys.stdout.isatty() and not os.environ.get("NO_COLOR"))


def _tell(text: str) -> None:
    """Says it on stderr, if that takes it; what is left in its buffer would be an error at the very end."""
    try:
        typer.echo(text, err=True)
    except OSError:
        sys.stderr = None


def _say_terms(service: sharing.Service, share: float | None, is_asked: bool, logs: Path) -> None:
    if is_asked:
        lost = "; --share has no effect without it" if share is not None and not service.on else ""
        _tell(f"carpool: {service.story}{lost}")
    _tell(f"carpool: logs in {logs}")


def _check_order(jobs: Sequence[Job], sort: str | None, mode: str) -> None:
    """Before anything runs: whether it will be known which way the metric is better."""
    if mode != "auto" and sort is None:
        raise OptionError(sentence("--mode beside --sort METRIC", f"--mode {mode} alone", "name the metric"))
    told = [declared((job.stop, *job.callbacks)).get(sort or "") for job in jobs]
    if sort is not None and not (mode == "auto" and any(told)):
        direction(sort, mode)


def _kept(results: carpool.Results, folder: Path | None) -> str:
    """Saves the results, and says where: in a temporary folder, where the one that was asked for took them no more."""
    if folder is None:
        return ""
    try:
        return f"saved in {results.save(folder)}"
    except SaveError as error:
        typer.echo(f"carpool: {printable(str(error))}", err=True)
    spare = tempfile.mkdtemp(prefix="carpool-results-")
    return f"saved in {results.save(spare)}, not in {folder}"


def _exit(results: carpool.Results, ended: BaseException | None) -> None:
    """With the code that says how it went; what ended the run and is not ours keeps its traceback."""
    if isinstance(ended, Interrupted):
        raise typer.Exit(_INTERRUPTED)
    if ended is not None and not isinstance(ended, CarpoolError):
        raise ended
    if ended is not None:
        typer.echo(f"carpool: {printable(' '.join(str(ended).split()))}", err=True)
    if ended is not None or results.failed:
        raise typer.Exit(1)


def _leaderboard(results: carpool.Results, sort: str | None = None, mode: str = "auto") -> str:
    """All results when they fit a screen, else the best of them."""
    if sort is not None and sort in results.metrics:
        rest = f"\nand {len(results) - _SHOWN} more" if len(results) > _SHOWN else ""
        return results.table(sort, _SHOWN, mode) + rest
    if sort is not None:
        typer.echo(f"carpool: no job has the metric {sort!r}: not sorted", err=True)
    metric = next((name for name in ("val_loss", "loss") if name in results.metrics), None)
    if len(results) <= _SHOWN or metric is None:
        return results.table()
    rest = f"and {len(results) - _SHOWN} more; --save FOLDER keeps them all"
    return f"the best {_SHOWN} by {metric}:\n{results.table(sort=metric, top=_SHOWN)}\n{rest}"


def _code(plan: Plan, codes: Sequence[str]) -> str:
    """What is shown of each fused group, and of a job alone that is machine code."""
    found: list[str] = []
    for number, (group, code) in enumerate(zip(plan.groups, codes, strict=True)):
        if code or group.strategy == "fused":
            found.append(f"\ngroup {number}\n{code or f'/* none: {group.adapter} makes its own programs */'}")
    return "\n".join(found) or "no group is fused: there is no machine code to show"


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Says a misuse in one line; anything else keeps its traceback."""
    try:
        yield
    except CarpoolError as error:
        typer.echo(f"carpool: {printable(' '.join(str(error).split()))}", err=True)
        raise typer.Exit(_MISUSE) from None
