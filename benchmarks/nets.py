"""Whether `compile="auto"` chooses well: random small nets by it, and by the step as it is traced, in turns.

`python -m benchmarks nets`. The nets are those of the tests (tests/kernels/resident_nets.py), eight members each, in whole
calls of about a second.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import carpool
from carpool.events import Event, GroupCompiled

MEMBERS, CALL_S, MOST_EPOCHS = 8, 1.0, 20_000
_NETS = Path(__file__).parents[1] / "tests" / "kernels"


class _Forms:
    """How steps of whole batches ran."""

    hears: frozenset[type[Event]] = frozenset({GroupCompiled})

    def __init__(self) -> None:
        self.found: dict[int, str] = {}

    def __call__(self, event: Event) -> None:
        assert isinstance(event, GroupCompiled)
        self.found[event.batch_size] = event.form

    @property
    def form(self) -> str:
        return self.found[max(self.found)]


def run(numbers: Sequence[int], windows: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Seconds of `auto` as a share of the traced step's, by net: the median of each way's windows."""
    sys.path.insert(0, str(_NETS))
    from resident_nets import net  # pyright: ignore[reportMissingImports]

    found: dict[str, dict[str, Any]] = {}
    for number in numbers:
        drawn = net(number, MEMBERS)
        try:
            found[str(number)] = own = _compared(drawn.jobs, windows)
        except Exception as error:  # a net whose loss grows without bounds, say
            say(f"{number}: left out ({type(error).__name__}: {str(error)[:80]})")
            continue
        say(f"{number}: {own['share']:.2f} ({own['form']}; {' '.join(drawn.words)})")
    shares = sorted(own["share"] for own in found.values())
    made = [own["share"] for own in found.values() if own["form"] == "resident"]
    scores = {
        "nets": len(shares),
        "resident": len(made),
        "worst": shares[-1],
        "more than 1.05": sum(share > 1.05 for share in shares),
        "median": round(statistics.median(shares), 3),
        "median of resident": round(statistics.median(made), 3) if made else None,
    }
    settings = {"windows": windows, "members": MEMBERS, "torch_threads": torch.get_num_threads()}
    return {"settings": settings, "scores": scores, "nets": found}


def _compared(jobs: Sequence[carpool.Job], windows: int) -> dict[str, Any]:
    epochs = _epochs(jobs)
    forms = _Forms()
    _seconds(jobs, "auto", epochs, forms)  # makes the code
    taken: dict[str | bool, list[float]] = {"auto": [], False: []}
    for _ in range(windows):
        for way, seconds in taken.items():
            seconds.append(_seconds(jobs, way, epochs))
    auto_s, traced_s = (statistics.median(seconds) for seconds in taken.values())
    seconds = {"auto_s": round(auto_s, 4), "traced_s": round(traced_s, 4)}
    return {"share": round(auto_s / traced_s, 3), "form": forms.form, "epochs": epochs, **seconds}


def _epochs(jobs: Sequence[carpool.Job]) -> int:
    """As many as the traced step takes about a second for."""
    _seconds(jobs, False, 1)
    once_s = _seconds(jobs, False, 2)
    each_s = max(1e-5, (_seconds(jobs, False, 12) - once_s) / 10)
    return max(2, min(MOST_EPOCHS, int(CALL_S / each_s)))


def _seconds(
    jobs: Sequence[carpool.Job], compile: str | bool, epochs: int, forms: _Forms | None = None
) -> float:
    asked = [replace(job, epochs=epochs, scheduler=None) for job in jobs]
    started = time.perf_counter()
    reporters = [forms] if forms is not None else []
    results = carpool.train(asked, device="cpu", strategy="fused", compile=compile, reporters=reporters)
    seconds = time.perf_counter() - started
    if any(result.outcome is not carpool.Outcome.COMPLETED for result in results):
        raise RuntimeError(f"not all completed: {[result.outcome.word for result in results]}")
    return seconds
