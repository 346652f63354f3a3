"""What cannot be stacked is refused in a sentence: the jobs, the operation, the user's own line. In turn it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import carpool
from carpool.adapters.torch import fuse, program
from carpool.adapters.torch.fused import StackedSession
from carpool.adapters.torch.train import TorchAdapter
from carpool.errors import FusionError
from carpool.kernels import convolve
from carpool.planning.cursor import Chunk, Cursor

X, Y = torch.randn(12, 5, 4), torch.randint(0, 3, (12,))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], body: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.body, self.out = make(), body, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self.part, x))


def branch(part: nn.Module, x: Tensor) -> Tensor:
    y = part(x).mean(1)
    if y.mean() > 0:  # it asks for a value
        y = y * 2
    return y


def item(part: nn.Module, x: Tensor) -> Tensor:
    y = part(x).mean(1)
    return y * y.mean().item()


def mask(part: nn.Module, x: Tensor) -> Tensor:
    y = part(x)
    return y.mean(1) + y[x > 0].sum()


def own_function(part: nn.Module, x: Tensor) -> Tensor:
    return Doubled.apply(part(x)).mean(1)


def norm(part: nn.Module, x: Tensor) -> Tensor:
    return part(x.mean(1))


def packed(part: nn.Module, x: Tensor) -> Tensor:
    short = nn.utils.rnn.pack_padded_sequence(x, [5] * len(x), batch_first=True)
    return part(short)[1][0]


def packed_by_hand(part: nn.Module, x: Tensor) -> Tensor:
    sizes = torch.full((5,), len(x))
    return part(nn.utils.rnn.PackedSequence(x.transpose(0, 1).flatten(0, 1), sizes))[1][0]


def reentrant(part: nn.Module, x: Tensor) -> Tensor:
    again = checkpoint(part, x.requires_grad_(), use_reentrant=True)
    assert isinstance(again, Tensor)
    return again.mean(1)


def drawn(part: nn.Module, x: Tensor) -> Tensor:
    return part(x).mean(1)[:, torch.randperm(4)]


def unbatched(part: nn.Module, x: Tensor) -> Tensor:
    return part(x).mean(1) + F.pdist(part(x)[0]).sum()


Linear = partial(nn.Linear, 4, 4)
CASES: dict[str, tuple[Callable[..., nn.Module], Callable[[nn.Module, Tensor], Tensor], str, str]] = {
    "if": (
        Linear,
        branch,
        "an `if`, `while` or `assert` on a tensor needs a tensor's value",
        "if y.mean() > 0:",
    ),
    "item": (Linear, item, "`.item()` needs a tensor's value", "return y * y.mean().item()"),
    "mask": (Linear, mask, "indexing by a mask makes a shape that depends on values", "y[x > 0].sum()"),
    "function": (
        Linear,
        own_function,
        "Doubled is a torch.autograd.Function without",
        "Doubled.apply(part(x))",
    ),
    "batch norm": (
        partial(nn.BatchNorm1d, 4, momentum=None),
        norm,
        "in BatchNorm1d(4, eps=1e-05, momentum=None",
        "return part(x.mean(1))",
    ),
    "packed": (
        partial(nn.GRU, 4, 4, batch_first=True),
        packed,
        "packed sequences (pack_padded_sequence) have no form in a stack",
        "nn.utils.rnn.pack_padded_sequence(x, [5] * len(x), batch_first=True)",
    ),
    "packed by hand": (
        partial(nn.GRU, 4, 4),
        packed_by_hand,
        "in GRU(4, 4) needs a tensor's value",
        "return part(nn.utils.rnn.PackedSequence(",
    ),
    "reentrant": (Linear, reentrant, "use_reentrant=True has no form in a stack", "checkpoint(part, x"),
    "drawn": (Linear, drawn, "torch.randperm draws random numbers that are not keyed", "torch.randperm(4)"),
    "unbatched": (
        Linear,
        unbatched,
        "torch has no batching rule for aten::_pdist_forward",
        "F.pdist(part(x)[0])",
    ),
}


def jobs(case: str) -> list[carpool.Job]:
    make, body, *_ = CASES[case]
    rates = (0.01, 0.02)
    return [
        carpool.Job(
            partial(Model, make, body),
            (X, Y),
            name=f"rate-{rate}",
            loss=F.cross_entropy,
            optimizer=partial(torch.optim.SGD, lr=rate),
            batch_size=4,
        )
        for rate in rates
    ]


@pytest.mark.parametrize("case", CASES)
def test_the_reason_names_jobs_operation_and_line(case):
    *_, operation, line = CASES[case]
    with pytest.raises(FusionError) as refused:
        carpool.train(jobs(case), device="cpu", strategy="fused", reporters=[])
    text = str(refused.value)
    assert "'rate-0.01', 'rate-0.02'" in text
    assert operation in text
    assert f"(at {Path(__file__).name}:" in text
    assert line in text


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused_trains_interleaved(case):
    results = carpool.train(jobs(case), device="cpu", reporters=[])
    assert all(result.error is None for result in results)
    assert all(result.strategy == "interleaved" for result in results)


def attended(part: nn.Module, x: Tensor) -> Tensor:
    heads = part(x).unflatten(-1, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).mean(2).flatten(1)


def plainly_drawn(part: nn.Module, x: Tensor) -> Tensor:
    return F.rrelu(part(x), training=True).mean(1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (drawn, "torch.randperm draws random numbers that are not keyed"),
        (plainly_drawn, "draws random numbers that are not keyed"),
        (branch, "needs a tensor's value"),
        (unbatched, None),
        (attended, None),
    ],
)
def test_a_job_alone_is_refused_what_changes_its_numbers_and_needs_no_batching_rule(body, reason):
    adapter = TorchAdapter(compile=True)
    [job] = [replace(job, model=partial(Model, Linear, body)) for job in jobs("if")[:1]]
    adapter.describe(job)
    assert adapter.fuser is not None
    refused = adapter.fuser.refusal([job])
    assert (refused is None) if reason is None else (reason in str(refused))
    [result] = carpool.train([job], device="cpu", reporters=[], compile=True)
    assert result.error is None
    assert (f"; not compiled: {refused}" in result.reason) is (reason is not None)


class Images(nn.Module):
    """A network whose images tensor cores read with channels innermost, and what is made of them."""

    def __init__(self, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 72, 3, padding=1), nn.BatchNorm2d(72)
        self.second, self.last = nn.Conv2d(72, 4, 3, stride=2, padding="valid"), nn.LazyLinear(3)
        self.end = end
        self(torch.zeros(2, 3, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.end(self.second(self.norm(self.first(x)).relu())))


def pooled(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(x, 1).flatten(1)


def viewed(x: Tensor) -> Tensor:
    return x.view(x.size(0), -1)


@pytest.mark.parametrize(("end", "turned"), [(pooled, True), (viewed, False)])
def test_images_alone_are_turned_around_where_the_model_takes_it(monkeypatch, end, turned):
    monkeypatch.setattr(convolve, "_KIND", "cpu")
    monkeypatch.setattr(convolve, "_by_tensor_cores", lambda *_: True)
    x, y = torch.randn(8, 3, 6, 6), torch.randint(0, 3, (8,))
    job = carpool.Job(
        partial(Images, end),
        (x, y),
        name="images",
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD,
        batch_size=4,
    )
    adapter = TorchAdapter(compile=True)
    adapter.device("cpu")
    adapter.describe(job)
    assert adapter.fuser is not None
    assert adapter.fuser.refusal([job]) is None
    traced = next(reversed(program._memory.values())).traced
    read = [n.args[0] for n in traced.graph.nodes if n.target is torch.ops.aten.convolution.default]
    assert [one.meta["val"].stride(1) == 1 for one in read] == [turned] * 2
    session = adapter.open(job, "cpu")
    session.close()
    assert isinstance(session, StackedSession)
    assert session._recipe.innermost is turned


def test_a_slice_that_is_narrow_enough_for_channels_innermost_minds_as_well(monkeypatch):
    """Asked about all six nobody turns anything around; of the stack of three that is opened somebody might."""
    monkeypatch.setattr(convolve, "_KIND", "cpu")
    monkeypatch.setattr(convolve, "_by_tensor_cores", lambda *_: True)
    monkeypatch.setattr(fuse, "is_apart", lambda rows, convolves, device: convolves and rows <= 4)
    x, y = torch.randn(8, 3, 6, 6), torch.randint(0, 3, (8,))
    several = [
        carpool.Job(
            partial(Images, viewed),
            (x, y),
            name=f"images {seed}",
            loss=F.cross_entropy,
            optimizer=torch.optim.SGD,
            batch_size=4,
            seed=seed,
        )
        for seed in range(6)
    ]
    adapter = TorchAdapter(compile=False)
    adapter.device("cpu")
    for job in several:
        adapter.describe(job)
    assert adapter.fuser is not None
    assert adapter.fuser.refusal(several) is None
    session = adapter.fuser.open(several[:3], 3, "cpu", lambda *_: None)
    assert isinstance(session, StackedSession)
    assert session._recipe.apart
    assert not session._recipe.innermost
    session.advance(Chunk((0, 1, 2), (Cursor(),) * 3, 4, 2))
    session.close()


def test_what_tracing_raises_is_remembered_for_jobs_alike(monkeypatch):
    traced = []
    real = fuse.trace_only
    monkeypatch.setattr(fuse, "trace_only", lambda *given: traced.append(given) or real(*given))
    adapter = TorchAdapter(compile=True)
    adapter.device("cpu")
    several = [
        replace(job, name=str(seed), model=partial(Model, Linear, plainly_drawn), seed=seed)
        for seed, job in enumerate(jobs("if")[:1] * 3)
    ]
    for job in several:
        adapter.describe(job)
    assert adapter.fuser is not None
    [reason] = {adapter.fuser.refusal([job]) for job in several}
    assert "draws random numbers that are not keyed" in str(reason)
    assert len(traced) == 1


@pytest.mark.parametrize("case", ["if", "mask", "drawn"])
def test_a_job_alone_with_a_budget_that_cannot_be_traced_trains(case):
    [result] = carpool.train(
        [replace(job, budget="64 MiB") for job in jobs(case)[:1]], device="cpu", reporters=[]
    )
    assert result.error is None


def test_what_minds_only_in_evaluation_is_evaluated(monkeypatch):
    monkeypatch.setattr(convolve, "_KIND", "cpu")
    monkeypatch.setattr(convolve, "_by_tensor_cores", lambda *_: True)
    x, y = torch.randn(8, 3, 6, 6), torch.randint(0, 3, (8,))

    class Careful(Images):
        def forward(self, x: Tensor) -> Tensor:
            made = self.second(self.norm(self.first(x)).relu())
            return self.last(made.flatten(1) if self.training else viewed(made))

    job = carpool.Job(
        partial(Careful, viewed),
        (x, y),
        validation_data=(x, y),
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD,
        batch_size=4,
    )
    [result] = carpool.train([job], device="cpu", reporters=[], compile=True)
    assert result.error is None
    assert "not compiled" not in result.reason


def test_a_fault_of_our_own_is_told_aloud_where_the_jobs_train_another_way(monkeypatch):
    monkeypatch.setattr(program, "_shapes", itemgetter("not there"))
    with pytest.warns(UserWarning, match=r"a fault of its own .* \(KeyError: 'not there', in program.py, "):
        made = carpool.plan(
            [
                carpool.Job(nn.Linear(4, 3), (X[:, 0], Y), loss=F.cross_entropy, optimizer=torch.optim.SGD)
                for _ in range(2)
            ],
            device="cpu",
        )
    assert {group.strategy for group in made.groups} == {"interleaved"}
