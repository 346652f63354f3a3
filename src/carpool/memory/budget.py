"""Jobs that cannot fit, found before anything runs: beyond the device, or beyond a budget of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from carpool.errors import BudgetError, sentence
from carpool.memory.estimate import Estimate
from carpool.memory.size import shown

if TYPE_CHECKING:
    from carpool.planning.spec import ModelSpec

_LESS = "make the model or its data smaller"


def check_fits(specs: Sequence[ModelSpec], capacity_bytes: int) -> None:
    """Raises for a job that needs more than there is, whatever else runs."""
    for spec in specs:
        if spec.least_bytes > capacity_bytes:
            raise BudgetError(
                _says(
                    spec,
                    f"at least {shown(spec.least_bytes)} of memory, for weights, gradients, optimizer state and data",
                    f"{shown(capacity_bytes)} available",
                    f"raise memory=, use a larger device, or {_LESS}",
                )
            )


def check_budgets(specs: Sequence[ModelSpec], whole: Estimate) -> None:
    """Raises for a job whose budget is below what it needs: for certain, or as measured."""
    for spec in specs:
        if spec.budget_bytes is None:
            continue
        own = sum(size for _, size in spec.data)
        needed = max(spec.least_bytes, whole.member_bytes + own if whole.measured else 0)
        if needed > spec.budget_bytes:
            raise BudgetError(
                _says(
                    spec,
                    f"a budget of at least {shown(needed)}",
                    shown(spec.budget_bytes),
                    f"raise budget=, take smaller batches, or {_LESS}",
                )
            )


def _says(spec: ModelSpec, expected: str, received: str, remedy: str) -> str:
    return f"Job {spec.name!r}: " + sentence(expected, received, remedy)
