"""How far carpool's weights are from the plain loop's, in the run that is timed."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from benchmarks import ours
from benchmarks.peers_torch import train_alone
from benchmarks.record import Fidelity
from benchmarks.workloads import sampled

PROMISED_STEPS = (
    100  # what the promise about weights is stated for; float32's rounding grows from step to step
)


def compare(order: ours.Order, count: int) -> Fidelity:
    """Trains all members by carpool and a few in the plain loop, for at most 100 steps."""
    epochs = max(1, min(order.epochs, PROMISED_STEPS // order.workload.epoch_steps))
    results = ours.train(replace(order, epochs=epochs))
    chosen = sampled(order.members, count)
    pairs = [
        (
            results[f"{order.workload.name}-{member.seed}"].model,
            train_alone(order.workload, member, order.data, epochs),
        )
        for member in chosen
    ]
    return Fidelity(
        members=len(chosen),
        steps=epochs * order.workload.epoch_steps,
        max_difference=max(_difference(one, plain) for one, plain in pairs),
        max_weight=max(leaf.abs().max().item() for _, plain in pairs for leaf in plain.parameters()),
    )


def _difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a.detach().cpu() - b.detach().cpu()).abs().max().item() for a, b in pairs)
