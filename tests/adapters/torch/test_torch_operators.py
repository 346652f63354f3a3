"""Models that need the table of operators, beyond the suite: compiled, in eval mode, and told apart when they differ."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from zoo_operators import MODELS, OperatorZoo, series

import carpool
from carpool.adapters.torch import program
from carpool.adapters.torch.signature import model_signature
from carpool.testing import AdapterConformance, Variant
from carpool.testing.conformance import assert_close

ZOO = type("Zoo", (OperatorZoo, AdapterConformance), {})()


def jobs(model: str, **options: Any) -> list[carpool.Job]:
    return [
        ZOO.job(model, "adamw", "constant", Variant(seed, 1 + seed, epochs=3, options=options))
        for seed in range(2)
    ]


def assert_alike(model: str, **options: Any) -> None:
    together = ZOO.run(jobs(model), strategy="fused", **options)
    alone = ZOO.run(jobs(model), strategy="in_turn")
    for one, other in zip(together, alone, strict=True):
        assert_close(ZOO.left(one), ZOO.left(other), double=True)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_compiled_group_equals_the_jobs_alone(model):
    assert_alike(model, compile=True)


@pytest.mark.parametrize("model", ["encoder_dropout", "spectral_norm", "lstm_dropout"])
def test_validation_equals_torch_in_eval_mode(model):
    """Torch has a path of its own for transformers in eval mode; the numbers are the same."""
    x, y = series(True)
    for result in ZOO.run(jobs(model, validation_data=(x[:16], y[:16])), strategy="fused"):
        net = result.model.eval()
        with torch.no_grad():
            expected = F.cross_entropy(net(x[:16]), y[:16]).item()
        assert result.history["val_loss"][-1] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("strategy", ["fused", "in_turn"])
def test_a_recurrent_module_is_left_with_its_own_weights(strategy):
    for result in ZOO.run(jobs("lstm"), strategy=strategy):
        net = result.model.net
        assert "flatten_parameters" not in vars(net)
        assert all(a is b for a, b in zip(net._flat_weights, net.parameters(), strict=True))


def signature(module: nn.Module) -> Any:
    return model_signature(module)


class Half(nn.Module):
    def forward(self, weight):
        return weight * 0.5


DIFFERING = [
    (partial(parametrizations.weight_norm, dim=0), partial(parametrizations.weight_norm, dim=1)),
    (partial(parametrizations.spectral_norm, eps=1e-12), partial(parametrizations.spectral_norm, eps=1e-6)),
    (parametrizations.spectral_norm, partial(parametrizations.spectral_norm, n_power_iterations=3)),
    (
        partial(parametrizations.orthogonal, orthogonal_map="cayley"),
        partial(parametrizations.orthogonal, orthogonal_map="matrix_exp"),
    ),
    (parametrizations.weight_norm, parametrizations.spectral_norm),
    (
        parametrizations.weight_norm,
        lambda layer: parametrize.register_parametrization(
            parametrizations.weight_norm(layer), "bias", Half()
        ),
    ),
]


@pytest.mark.parametrize(("one", "other"), DIFFERING)
def test_parametrizations_are_equal_by_what_they_do(one, other):
    assert signature(one(nn.Linear(4, 4))) == signature(one(nn.Linear(4, 4)))
    assert signature(one(nn.Linear(4, 4))) != signature(other(nn.Linear(4, 4)))


def test_compiling_is_expected_to_take_longer_for_larger_steps():
    assert program.compile_guess_s("cpu", 10) == program.compile_guess_s("cpu", 100)
    assert program.compile_guess_s("cpu", 20_000) > 5 * program.compile_guess_s("cpu", 2_000)
