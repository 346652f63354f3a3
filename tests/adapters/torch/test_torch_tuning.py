"""While a compiled step is first run, Inductor times kernels as captured graphs replay them; afterwards in its own way again."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from carpool.adapters.torch import tuning

benchmarking = pytest.importorskip("torch._inductor.runtime.benchmarking")


def measured(call, **options):
    return benchmarking.benchmarker.benchmark_gpu(call, **options)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(
        type(benchmarking.benchmarker), "benchmark_gpu", lambda _, call, **o: seen.append(call) or 7.0
    )
    return seen


def test_it_measures_captured_graphs_and_then_as_before(monkeypatch: pytest.MonkeyPatch, theirs: list):
    monkeypatch.setattr(tuning, "captured_ms", lambda call: 3.0)
    monkeypatch.setattr(tuning, "_capturable", lambda device: nullcontext())
    with tuning.timed_as_captured(torch.device("cuda")):
        assert measured(print, rep=40) == 3.0
        assert measured(print, return_mode="all") == 7.0, "what asks for more than one figure"
    assert measured(print) == 7.0
    assert theirs == [print, print]


def test_what_cannot_be_captured_is_measured_as_before(monkeypatch: pytest.MonkeyPatch, theirs: list):
    def captured_ms(call):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(tuning, "captured_ms", captured_ms)
    monkeypatch.setattr(tuning, "_capturable", lambda device: nullcontext())
    with tuning.timed_as_captured(torch.device("cuda")):
        assert measured(print) == 7.0


def test_on_a_cpu_nothing_changes(theirs: list):
    with tuning.timed_as_captured(torch.device("cpu")):
        assert measured(print) == 7.0


@pytest.mark.gpu
def test_a_call_is_timed_among_others_on_the_stream_that_was_current():
    x = torch.zeros(1024, device="cuda")
    with tuning.timed_as_captured(x.device):
        fixed = torch.cuda.current_stream()  # as Inductor has it before it measures

        def call() -> None:
            with torch.cuda.stream(fixed):
                x.add_(1)

        assert benchmarking.benchmarker.benchmark_gpu(call) > 0
    torch.cuda.synchronize()
    assert x[0] == 1 + tuning._CALLS * (tuning._REPLAYS + 1), "replays ran it"
