"""Plans to report on, made without a framework."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from carpool.planning.cursor import Course
from carpool.planning.plan import Plan, make_plan
from carpool.planning.spec import ModelSpec


def _plan(structures: int, members: int, epochs: int = 5, rejected: tuple[str, ...] = ()) -> Plan:
    specs = [
        ModelSpec(
            f"s{s},m{m}", "torch", (("structure", s),), Course(40, 8, epochs), state_bytes=100, step_bytes=100
        )
        for s in range(structures)
        for m in range(members)
    ]
    errors = {name: ValueError("no data") for name in rejected}
    return make_plan(specs, lambda _: None, device="cpu", free_bytes=1 << 30, rejected=errors)


@pytest.fixture
def plan_of() -> Callable[..., Plan]:
    """Makes a plan of so many structures with so many members each; 25 steps a job unless told otherwise."""
    return _plan
