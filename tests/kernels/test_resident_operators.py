"""Operators in steps as machine code, each beside torch's own: training and evaluating."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from resident_beside import Beside, faults_of
from resident_operators import FEATURES, MODELS, OUTPUTS
from torch import nn

from carpool import machine
from carpool.adapters.torch import launch, resident
from carpool.adapters.torch.stacked import evaluate_step
from carpool.job import Job
from carpool.kernels.resident.builder import Refused
from carpool.testing import Variant

pytestmark = pytest.mark.skipif(machine.unavailable() is not None, reason="no compiler of C")

FAST = (
    "conv_2d_groups",
    "transposed_2d",
    "max_pool_2d",
    "avg_pool_ceil",
    "encoder",
    "put",
    "shapes",
    "conditional",
)
REFUSED = {
    "adaptive_max_1d": "windows that are not alike",
    "distances": "aten._cdist_forward.default has no loops",
    "upsample_bilinear": "aten.upsample_bilinear2d.default has no loops",
}


@pytest.mark.parametrize("name", FAST)
def test_an_operator_computes_what_torch_computes(name: str):
    check(jobs(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in (*FAST, *REFUSED)])
def test_all_operators_compute_what_torch_computes(name: str):
    check(jobs(name))


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_loops_is_refused_by_name(name: str):
    beside = Beside(jobs(name))
    chunk = next(beside.chunks())
    with pytest.raises(Refused, match=REFUSED[name]):
        beside.code(chunk.size)


def jobs(name: str) -> list[Job]:
    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, FEATURES, generator=made), torch.randint(0, OUTPUTS, (40,), generator=made)
    return [
        Job(
            MODELS[name],
            (x, y),
            loss=F.cross_entropy,
            optimizer=partial(torch.optim.SGD, lr=0.05 * (member + 1), momentum=0.9),
            batch_size=16,
            seed=member,
            name=str(member),
        )
        for member in range(2)
    ]


def check(given: Sequence[Job]) -> None:
    beside, size = Beside(given), 0
    for chunk in beside.chunks():
        size = chunk.size
        beside.take_traced(chunk)
        assert beside.bound(chunk.size).run(chunk.steps, threads=1) == {}
        assert faults_of(beside, double=False) == []
    evaluate(beside, size)
    assert faults_of(beside, double=False) == []
    beside.close()


def evaluate(beside: Beside, size: int) -> None:
    """A batch as validation would run it, with each one's own weights."""
    code = resident.evaluating_code(beside.recipe, size, beside.made, beside.vector_bytes)
    for tensors in (beside.traced, beside.exact, beside.nudged, beside.made):
        for name in ("k", "taken"):
            tensors[name].zero_()
        tensors["sums"] = torch.zeros(len(tensors["sums"]), len(beside.recipe.evaluated), dtype=torch.float64)
    for tensors in (beside.traced, beside.exact, beside.nudged):
        evaluate_step(beside.recipe, size, shared=False)(tensors)
    assert launch.bound(code, beside.made).run(1, threads=1) == {}


def weight_alone(model: nn.Linear, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With a gradient whose every element reads a row of the matrix that it changes."""
    seen = model.weight @ model.weight.detach().T @ batch[0].T
    return {"loss": seen.square().mean()}


def test_a_matrix_is_read_whole_before_it_is_changed():
    model = partial(nn.Linear, FEATURES, FEATURES, bias=False)
    check([replace(job, model=model, loss=None, step=weight_alone) for job in jobs("glu")])


def test_what_a_mean_is_of_is_divided_by_their_number():
    """A product with the inverse would make 0.99999994 of 41 forty-firsts."""
    x, y = torch.zeros(82, FEATURES), torch.zeros(82, dtype=torch.int64)
    metrics = {"hits": lambda prediction, target: (prediction[:, 0] == prediction[:, 0]).float().mean()}
    beside = Beside([replace(jobs("glu")[0], data=(x, y), batch_size=41, metrics=metrics)])
    chunk = next(beside.chunks())
    assert beside.bound(chunk.size).run(chunk.steps, threads=1) == {}
    assert beside.made["sums"][0, 1].item() == 82


def test_long_sums_are_as_near_as_torchs():
    """A filter's gradient is a sum over all places of all images: here of 43,264 products."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, OUTPUTS))

    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 1, 28, 28, generator=made) + 0.5, torch.randint(0, OUTPUTS, (64,), generator=made)
    check([replace(job, model=net, data=(x, y), batch_size=64) for job in jobs("glu")])


# The zoo of the conformance suite

sys.path.append(str(Path(__file__).parents[1] / "adapters" / "torch"))
ZOO = importlib.import_module("zoo"), importlib.import_module("zoo_operators")
ZOO_REFUSED = {"orthogonal": "aten.arange.default: numbers of type torch.uint8"}


def zoo_jobs(model: str, optimizer: str) -> list[Job]:
    zoo, zoo_operators = ZOO
    made: list[Job] = []
    for member in range(2):
        variant = Variant(seed=member, epochs=1, scale=1 + member / 2)
        if model in zoo.MODELS:
            job = zoo.make_job(model, optimizer, "constant", variant, double=False)
        else:
            job = zoo_operators.OperatorZoo().job(model, optimizer, "constant", variant, double=False)
        made.append(replace(job, name=str(member)))
    return made


def zoo_names() -> list[str]:
    zoo, zoo_operators = ZOO
    return [*zoo.FUSES, *zoo_operators.MODELS]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adam"])
@pytest.mark.parametrize("model", zoo_names())
def test_the_zoo_trains_as_machine_code(model: str, optimizer: str):
    if model in ZOO_REFUSED:
        with pytest.raises(Refused, match=ZOO_REFUSED[model]):
            check(zoo_jobs(model, optimizer))
        return
    check(zoo_jobs(model, optimizer))
