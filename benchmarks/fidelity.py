"""How far carpool's weights are from the plain loop's, in the run that is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from benchmarks import ours
from benchmarks.peers_torch import train_alone
from benchmarks.precision import allow
from benchmarks.record import Fidelity
from benchmarks.workloads import Member, sampled

PROMISED_STEPS = (
    100  # what the promise about weights is stated for; float32's rounding grows from step to step
)


def compare(order: ours.Order, count: int) -> Fidelity:
    """Trains all members by carpool and a few in the plain loop, for at most 100 steps."""
    workload = order.workload
    epochs = max(1, min(order.epochs, PROMISED_STEPS // workload.epoch_steps))
    results = ours.train(replace(order, epochs=epochs))
    chosen = sampled(order.members, count)
    together = [results[f"{workload.name}-{member.seed}"].model for member in chosen]
    plain = [train_alone(workload, member, order.data, epochs) for member in chosen]
    rounded = workload.precision != "fp32" and order.device != "cpu"  # a CPU has no TF32
    return Fidelity(
        members=len(chosen),
        steps=epochs * workload.epoch_steps,
        max_difference=_difference(together, plain),
        max_weight=max(leaf.abs().max().item() for model in plain for leaf in model.parameters()),
        by_precision=_difference(plain, _in_full(order, chosen, epochs)) if rounded else None,
    )


def _in_full(order: ours.Order, members: Sequence[Member], epochs: int) -> list[nn.Module]:
    """The plain loop's models in strict float32."""
    strict = replace(order.workload, precision="fp32")
    allow("fp32")
    try:
        return [train_alone(strict, member, order.data, epochs) for member in members]
    finally:
        allow(order.workload.precision)


def _difference(ones: Sequence[nn.Module], others: Sequence[nn.Module]) -> float:
    leaves = (
        pair
        for one, other in zip(ones, others, strict=True)
        for pair in zip(one.parameters(), other.parameters(), strict=True)
    )
    return max((a.detach().cpu() - b.detach().cpu()).abs().max().item() for a, b in leaves)
