"""`auto` beside taking turns: 1, 8 and 64 jobs × tiny, medium and saturating × one structure or one each.

Taking turns is a plain eager loop, one job after another, over the same batches and metrics. Of many jobs it trains a sample;
one after another takes as long for each of them, so its rate does not depend on how many follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import nn

import carpool
from benchmarks.ours import Stopwatch
from benchmarks.peers_torch import train_alone
from benchmarks.record import OURS, Measured, Row, Window
from benchmarks.shapes import CLASSES
from benchmarks.windows import Called, Way, measure, timed
from benchmarks.workloads import Workload, accuracy, loss, sampled, sweep, vectors

SAMPLE = 8
NOTES = (
    "carpool's figure is a whole call of `carpool.train` with nothing but its defaults: jobs built, planned, probed, trained, read.",
    "Taking turns is a plain eager loop; of many jobs it trains a sample, 8 on a CPU and 2 on a GPU.",
    "Different jobs have hidden layers of different widths, so no two have one structure.",
)


@dataclass(frozen=True)
class Weight:
    """How heavy a job is: an MLP of these widths, its batch, samples and epochs."""

    word: str
    widths: tuple[int, ...]
    batch_size: int
    samples: int
    epochs: int

    def workload(self, extra: int) -> Workload:
        """The job whose hidden layers are so much wider."""
        inside, *hidden = self.widths
        widths = (inside, *(width + extra for width in hidden), CLASSES)
        title = f"{self.word}, MLP {'-'.join(map(str, self.widths))}-{CLASSES}"
        return Workload(
            self.word, title, partial(_mlp, widths), partial(vectors, inside), self.batch_size, self.samples
        )


CPU = (
    Weight("tiny", (32, 64), 32, 1024, 40),
    Weight("medium", (784, 256, 256), 64, 1024, 8),
    Weight("saturating", (1024, 1024, 1024), 256, 256, 12),
)
GPU = (
    Weight("tiny", (32, 64), 32, 4096, 4),
    Weight("medium", (784, 256, 256), 128, 4096, 16),
    Weight("saturating", (2048, 4096, 4096), 4096, 16384, 64),
)
COUNTS = (1, 8, 64)


def _mlp(widths: Sequence[int]) -> nn.Module:
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def run(
    device: str,
    windows: int,
    budget_s: float,
    wanted: Callable[[str, int, bool], bool],
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Row]:
    """The rows, one by one, while there is time."""
    end = clock() + budget_s
    weights = GPU if device.startswith("cuda") else CPU
    for weight in weights:
        for same in (True, False):
            for count in COUNTS:
                if (count == 1 and not same) or not wanted(weight.word, count, same):
                    continue
                if clock() > end:
                    say(f"out of time before {count} × {weight.word}")
                    return
                row = _row(weight, count, same, device, windows)
                ratio = row.ratio("taking turns")
                say(f"{count} × {row.title}: {ratio:.2f} × taking turns" if ratio else f"{row.title}: failed")
                yield row


def _row(weight: Weight, count: int, same: bool, device: str, windows: int) -> Row:
    members = sweep(count)
    extra = {member.seed: 0 if same else 8 * member.seed for member in members}
    data = weight.workload(0).data().to(device)
    sample = 2 if device.startswith("cuda") else SAMPLE

    def jobs(epochs: int) -> list[carpool.Job]:
        return [
            carpool.Job(
                weight.workload(extra[member.seed]).make,
                data=(data.x, data.y),
                name=f"{weight.word}-{member.seed}",
                loss=loss,
                metrics={"accuracy": accuracy},
                optimizer=partial(torch.optim.Adam, lr=member.lr),
                batch_size=weight.batch_size,
                epochs=epochs,
                seed=member.seed,
            )
            for member in members
        ]

    def in_turn() -> int:
        chosen = sampled(members, sample)
        for member in chosen:
            train_alone(weight.workload(extra[member.seed]), member, data, weight.epochs)
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        return len(chosen) * weight.epochs * (weight.samples // weight.batch_size)

    ways = [Auto(jobs, weight.epochs, device, count), Called("taking turns", min(count, sample), in_turn)]
    measured = measure(ways, windows)
    one = weight.workload(0)
    title = f"{one.title}, {'one structure' if same else 'each its own'}"
    return Row(weight.word, title, count, one.batch_size, weight.epochs * one.epoch_steps, measured)


class Auto(Way):
    """A whole call with carpool's defaults. The first call, which tries what is to be remembered, is a short one where jobs are long."""

    name = OURS
    first_epochs = 8

    def __init__(
        self, jobs: Callable[[int], Sequence[carpool.Job]], epochs: int, device: str, members: int
    ) -> None:
        self._jobs, self._epochs, self._device, self.members = jobs, epochs, device, members
        self._steady: list[Window] = []
        self._notes: dict[str, None] = {}

    def prepare(self) -> Window:
        return timed(partial(self._train, min(self.first_epochs, self._epochs)))

    def window(self) -> Window:
        return timed(partial(self._train, self._epochs))

    def _train(self, epochs: int) -> int:
        watch = Stopwatch()
        results = carpool.train(self._jobs(epochs), device=self._device, reporters=[watch])
        self._steady += watch.windows()
        kinds = {result.strategy for result in results}
        self._notes |= {f"ran {' and '.join(sorted(kinds))}": None}
        for result in results:
            if result.error is not None:
                raise result.error
        return sum(result.steps for result in results)

    def finished(self, measured: Measured) -> Measured:
        note = measured.note or "; ".join(self._notes)
        return replace(measured, steady=tuple(self._steady[1:]), note=note[:300])
