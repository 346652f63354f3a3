"""The check allows what the least precise type of a step makes of it, whatever type the weights have."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import TorchZoo

import carpool
from carpool.adapters.torch import program, verify
from carpool.errors import FusionError
from carpool.events import GroupFellBack
from carpool.testing import AdapterConformance, Variant

ZOO = type("Zoo", (TorchZoo, AdapterConformance), {})()


class Narrow(nn.Module):
    """A model in float64 that multiplies in another type inside, as language models compute rotary embeddings and softmax."""

    def __init__(self, inside: torch.dtype) -> None:
        super().__init__()
        self.first, self.last, self.inside = nn.Linear(48, 96), nn.Linear(96, 4), inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.linear(x.to(self.inside), self.first.weight.to(self.inside)).to(x.dtype)
        return self.last(torch.tanh(low + self.first.bias))


def jobs(inside: torch.dtype, count: int = 3) -> list[carpool.Job]:
    torch.manual_seed(1)
    x, y = torch.randn(64, 48, dtype=torch.float64), torch.randint(0, 4, (64,))
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return [
        carpool.Job(
            lambda: Narrow(inside).double(),
            (x, y),
            loss=F.cross_entropy,
            optimizer=sgd,
            batch_size=32,
            seed=i,
        )
        for i in range(count)
    ]


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of the fused step are off by what single precision rounds off: which sums do that is the machine's business."""
    real = verify.Verifier._together

    def off(self: verify.Verifier, size: int, rows: list[int]) -> dict[str, torch.Tensor]:
        found = real(self, size, rows)
        return found | {"weights": found["weights"] * (1 + 1e-7)}

    monkeypatch.setattr(verify.Verifier, "_together", off)


@pytest.mark.usefixtures("rounded")
@pytest.mark.parametrize("inside", [torch.float32, torch.bfloat16])
def test_a_job_in_float64_that_computes_in_less_inside_is_checked_as_that(inside: torch.dtype):
    """The tolerance follows the lowest precision that the trace contains."""
    events: list = []
    results = carpool.train(jobs(inside), device="cpu", compile=False, reporters=[events.append])
    assert not [event for event in events if isinstance(event, GroupFellBack)]
    assert {result.strategy for result in results} == {"fused"}


@pytest.mark.usefixtures("rounded")
def test_a_job_that_computes_in_float64_throughout_is_allowed_no_more_than_that():
    with pytest.raises(FusionError, match=r"allowed: 1e-09"):
        carpool.train(jobs(torch.float64), device="cpu", compile=False, strategy="fused", reporters=[])


def lowest(found: list[carpool.Job]) -> torch.dtype:
    program._memory.clear()
    carpool.train(found, device="cpu", compile=False, strategy="fused", reporters=[])
    return next(reversed(program._memory.values())).lowest


@pytest.mark.parametrize("inside", [torch.float64, torch.float32, torch.bfloat16])
def test_the_lowest_type_is_read_off_the_trace(inside: torch.dtype):
    assert lowest(jobs(inside, 2)) == inside


@pytest.mark.parametrize("optimizer", ["adamw", "nadam"])
@pytest.mark.parametrize("model", ["dropout", "batch_norm"])
def test_masks_and_counts_in_single_precision_loosen_nothing(model: str, optimizer: str):
    given = [
        ZOO.job(model, optimizer, "constant", Variant(seed, epochs=1, options={"validation_data": None}))
        for seed in range(2)
    ]
    assert lowest(given) == torch.float64
