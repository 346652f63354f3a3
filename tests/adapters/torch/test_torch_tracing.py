"""Tracing changes the whole process's modules: it is done by one thread at a time."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import carpool
from carpool.adapters.torch.tracing import graph_of
from drawing import at_once

SOURCES = Path(carpool.__file__).parent


def test_two_threads_never_trace_at_the_same_time():
    inside, most = 0, 0
    change = threading.Lock()

    def function(x: Tensor) -> Tensor:
        nonlocal inside, most
        with change:
            inside += 1
            most = max(most, inside)
        threading.Event().wait(0.02)
        with change:
            inside -= 1
        return x * 2

    def trace() -> int:
        return len(graph_of(function, torch.ones(3)).graph.nodes)

    assert at_once(*[trace] * 4) == [3] * 4
    assert most == 1


def test_nothing_is_traced_past_the_lock():
    users = [path for path in SOURCES.rglob("*.py") if "import make_fx" in path.read_text().replace("\n", "")]
    users += [path for path in SOURCES.rglob("*.py") if "make_fx(" in path.read_text()]
    assert {path.name for path in users} == {"tracing.py"}


def test_two_threads_that_each_fuse_their_jobs_at_once_complete_them():
    x, y = torch.randn(16, 4), torch.randn(16, 1)

    def train(width: int) -> Any:
        jobs = [
            carpool.Job(
                lambda: nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 1)),
                (x, y),
                loss=nn.functional.mse_loss,
                optimizer=partial(torch.optim.Adam, lr=0.01),
                clip_norm=1.0,
                seed=seed,
            )
            for seed in range(2)
        ]
        return carpool.train(jobs, device="cpu", strategy="fused", compile=False, reporters=[])

    for results in at_once(*(partial(train, width) for width in (5, 6, 7))):
        assert not results.failed
