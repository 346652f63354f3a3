"""The run on a CPU: small models, every way from seeds to trained weights, the same steps on the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks import fidelity, floor, ours
from benchmarks.jax_worker import Jax
from benchmarks.peers_cuda import Steps, captured_plain_step, captured_step, repeated
from benchmarks.peers_torch import Workers, train_in_turn, train_vmapped
from benchmarks.record import Row
from benchmarks.sizes import Size
from benchmarks.windows import Called, Way, measure
from benchmarks.workloads import WORKLOADS, sampled, sweep

SAMPLED = 2  # models that the plain loop and the processes train: a model's step takes as long whatever N is
COMPARED = 4  # models whose weights are compared
WORKERS = 2
WINDOW_S = 0.4  # of the peers that are steady
NOTES = (
    "Every way follows loss and accuracy. carpool, the plain loop, torch.func's vmap and the processes go from seeds to trained"
    " weights; carpool's window is a whole call of `carpool.train`. What is compiled, and JAX, is steady: once everything is there.",
    f"The plain loop and the processes train {SAMPLED} of the models for all steps: what a model's step takes them does"
    " not depend on how many models follow.",
    f"Weights are compared for {COMPARED} of the models, spread over the learning rates.",
    f"The processes are a pool of {WORKERS} that is already running: starting and importing are left out.",
    "A first call compiles its step anew (the compiler's cache starts empty); the first row that compiles also loads"
    " the compiler.",
)


SIZES = (
    Size("small-mlp", 1, 64),
    Size("small-mlp", 8, 96),
    Size("small-mlp", 64, 32),
    Size("small-mlp", 512, 16),
    Size("small-cnn", 16, 8),
)
QUICK_SIZES = (
    Size("small-mlp", 1, 16),
    Size("small-mlp", 8, 24),
    Size("small-mlp", 64, 8),
    Size("small-cnn", 16, 1),
)


def settings(windows: int, compile: str | bool) -> dict[str, object]:
    """What a reader needs to know to repeat the run."""
    return {
        "windows": windows,
        "compile": compile,
        "torch_threads": torch.get_num_threads(),
        "processes": WORKERS,
        "optimizer": "Adam, learning rates from 1e-4 to 1e-2",
        "dtype": "float32",
    }


def run(
    sizes: Sequence[Size], windows: int, compile: str | bool, say: Callable[[str], None] = print
) -> Iterator[Row]:
    """The rows, one by one."""
    with Workers(WORKERS) as workers:
        for size in sizes:
            say(f"{size.members} × {size.workload}")
            yield _row(size, workers, windows, compile)


def _row(size: Size, workers: Workers, windows: int, compile: str | bool) -> Row:
    workload = WORKLOADS[size.workload]
    order = ours.Order(workload, sweep(size.members), workload.data(), size.epochs, compile=compile)
    measured = measure(_ways(order, workers), windows)
    return Row(
        workload=workload.name,
        title=workload.title,
        members=size.members,
        batch_size=workload.batch_size,
        steps=order.steps,
        measured=measured,
        fidelity=fidelity.compare(order, COMPARED),
        need=floor.need(workload, order.data),
    )


def _ways(order: ours.Order, workers: Workers) -> list[Way]:
    workload, data, epochs, few = order.workload, order.data, order.epochs, sampled(order.members, SAMPLED)
    steps = workload.epoch_steps

    def plain(epochs: int) -> int:
        train_in_turn(workload, few, data, epochs)
        return len(few) * epochs * steps

    def vmapped(epochs: int) -> int:
        train_vmapped(workload, order.members, data, epochs)
        return len(order.members) * epochs * steps

    def spread() -> int:
        workers.train(workload, few, epochs)
        return len(few) * epochs * steps

    def start() -> int:
        workers.warm_up(workload, few)
        return workers.count * steps

    def steady(name: str, count: int, make: Callable[[], Callable[[], None]]) -> Way:
        return Steps(name, count, lambda: repeated(make(), "cpu"), "cpu", WINDOW_S)

    # The first call of those that compile nothing only warms up.
    return [
        ours.Carpool(order),
        Called("plain loop", len(few), lambda: plain(epochs), lambda: plain(1)),
        Called("torch.func vmap", len(order.members), lambda: vmapped(epochs), lambda: vmapped(1)),
        Called(f"{WORKERS} processes", len(few), spread, start),
        steady("compiled", 1, lambda: captured_plain_step(workload, few[0], data)),
        steady("vmap + compile", len(order.members), lambda: captured_step(workload, order.members, data)),
        Jax(workload, order.members, data, "cpu", WINDOW_S),
    ]
