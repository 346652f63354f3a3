"""The command line: parse, call, print. Nothing imports this, and it imports no framework: whoever needs one does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import carpool
from carpool import environment, reporters
from carpool.demo import EPOCHS
from carpool.demo import run as run_demo
from carpool.doctor import PROBLEM, examine, table
from carpool.errors import CarpoolError, Interrupted
from carpool.jobfile import load_jobs

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
def train(
    file: File,
    strategy: Strategy = "auto",
    device: Device = "auto",
    save: Annotated[
        Path | None, typer.Option(help="A folder for results.json and the trained weights.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Keep comparing a sample with training alone.")
    ] = False,
) -> None:
    """Train the jobs of a file; the exit code is 1 when some of them failed."""
    interrupted = False
    with _one_line_errors():
        try:
            results = carpool.train(load_jobs(file), device=device, strategy=strategy, verify=verify)
        except Interrupted as error:
            results, interrupted = error.results, True
        typer.echo(_leaderboard(results))
        if save is not None:
            typer.echo(f"saved in {results.save(save)}")
    if interrupted or results.failed:
        raise typer.Exit(_INTERRUPTED if interrupted else 1)


@app.command()
def plan(file: File, strategy: Strategy = "auto", device: Device = "auto") -> None:
    """Show what would run together, and why, without running it."""
    with _one_line_errors():
        typer.echo(carpool.plan(load_jobs(file), device=device, strategy=strategy).explain())


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show what this machine has for carpool and what stands in the way; the exit code is 1 when something does."""
    findings = examine(environment.read())
    if as_json:
        typer.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    else:
        typer.echo(table(findings))
    if any(finding.state == PROBLEM for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """The `carpool` command."""
    app()


def _leaderboard(results: carpool.Results) -> str:
    """All results when they fit a screen, else the best of them."""
    metric = next((name for name in ("val_loss", "loss") if name in results.metrics), None)
    if len(results) <= _SHOWN or metric is None:
        return results.table()
    rest = f"and {len(results) - _SHOWN} more; --save FOLDER keeps them all"
    return f"the best {_SHOWN} by {metric}:\n{results.table(sort=metric, top=_SHOWN)}\n{rest}"


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Says a misuse in one line; anything else keeps its traceback."""
    try:
        yield
    except CarpoolError as error:
        typer.echo(f"carpool: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(_MISUSE) from None
