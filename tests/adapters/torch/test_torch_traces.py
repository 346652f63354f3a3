"""What tracing costs: work that grows as the model does, and no memory that stays when structures change."""

from __future__ import annotations

import gc
import sys
import weakref
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import carpool
from carpool.adapters.torch import fuse, probe, program

X, Y = torch.ones(8, 4), torch.ones(8, 1)


class Deep(nn.Module):
    """Blocks of four operations, one of which draws random numbers."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(depth)])
        self.dropout, self.last = nn.Dropout(0.1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.dropout(torch.relu(block(x))) + x
        return self.last(x)


def train(model: Any) -> carpool.Results:
    adam = partial(torch.optim.Adam, lr=1e-3)
    jobs = [
        carpool.Job(model, (X, Y), loss=nn.functional.mse_loss, optimizer=adam, seed=seed, name=str(seed))
        for seed in range(3)
    ]
    return carpool.train(jobs, device="cpu", strategy="fused", compile=False, reporters=[])


@pytest.fixture(autouse=True)
def untraced(monkeypatch: pytest.MonkeyPatch):
    for module, name in ((program, "_memory"), (probe, "_memory"), (fuse, "_empty")):
        monkeypatch.setattr(module, name, type(getattr(module, name))())


def nodes() -> list[int]:
    return [len(ready.traced.graph.nodes) for ready in program._memory.values()]


def calls(depth: int) -> int:
    """Python functions called for planning and training a net of this depth."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        train(partial(Deep, depth))
    finally:
        sys.setprofile(before)
    return count


def test_four_times_as_deep_is_four_times_the_work():
    """By the functions that are called, since a clock says most of who else is there."""
    FakeTensorMode.cache_clear()  # or it is cleared on the way, where other tests have filled it
    calls(1)  # what is looked up once in a process
    small, middle, large = (calls(depth) for depth in (2, 4, 8))
    assert large - middle < 2.2 * (middle - small)


def test_a_layer_more_is_few_operations_more():
    """Random numbers are one operation of a trace; written out they were three hundred."""
    found = []
    for depth in (3, 6):
        train(partial(Deep, depth))
        found.append(nodes()[-1])
    assert found[1] - found[0] < 3 * 80


@pytest.mark.slow
def test_a_new_structure_in_every_call_leaves_little_behind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(program, "_MOST_NODES", 600)
    monkeypatch.setattr(program, "_MOST_SHAPES", 100)
    gone = []
    for width in range(5, 12):
        results = train(
            lambda width=width: nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))
        )
        gone.append(weakref.ref(results[0].model))
        del results
        assert sum(nodes()) <= max(600, nodes()[-1])
        assert FakeTensorMode.cache_info().size <= 100
    assert 1 <= len(nodes()) < 7
    train(lambda: nn.Linear(4, 1))
    gc.collect()
    assert [model() for model in gone] == [None] * len(gone)


def test_of_a_structure_beyond_all_bounds_the_last_trace_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(program, "_MOST_NODES", 1)
    train(lambda: nn.Linear(4, 1))
    assert len(nodes()) == 1
