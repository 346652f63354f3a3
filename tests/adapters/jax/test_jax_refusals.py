"""What cannot be right is refused before anything runs, saying what was expected, what came and what to do."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import jax_loops as loops
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import carpool
from begun import assert_nothing_ran
from carpool.errors import DataError, JobError, LossError, ModelError, OptimizerError
from carpool.jax import Model


def linear(key: Any) -> Model:
    return Model({"w": jax.random.normal(key, (6, 3))}, lambda own, x: x @ own["w"])


def module() -> nnx.Linear:
    return nnx.Linear(6, 3, rngs=nnx.Rngs(0))


def refused(*jobs: carpool.Job, error: type[Exception], match: str) -> None:
    """The whole run is refused, and no job of it has begun."""
    seen: list[Any] = []
    with pytest.raises(error, match=match) as raised:
        carpool.train([loops.job(linear, name="good"), *jobs], reporters=[seen.append], device="cpu")
    assert "Expected" in str(raised.value)
    assert "Remedy" in str(raised.value)
    assert_nothing_ran(seen)


class Empty(eqx.Module):
    width: int = 3

    def __call__(self, x: Any) -> Any:
        return x[: self.width]


@pytest.mark.parametrize(
    "model",
    [Empty(), lambda key: {"count": jnp.arange(3)}, nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nn.Dropout(0.5)],
)
def test_no_parameters(model: Any):
    step = (
        None
        if not callable(model) or isinstance(model, eqx.Module | nnx.Module | nn.Module)
        else lambda m, b: 0.0
    )
    job = loops.job(model, **({} if step is None else {"step": step}))
    refused(job, error=ModelError, match="a model with parameters")


@pytest.mark.parametrize(
    ("optimizer", "received"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "lambda"),
        (torch.optim.SGD, "SGD, a type"),
        (None, "None"),
        (optax.adam, "adam, a function"),
        ((0.1, 0.2), "tuple"),
    ],
)
def test_optimizers_that_are_none(optimizer: Any, received: str):
    for model in (module(), linear(jax.random.key(0))):
        refused(loops.job(model, optimizer=optimizer), error=OptimizerError, match=f"Received: .*{received}")


def test_a_factory_of_a_key_without_an_optimizer():
    refused(loops.job(linear, optimizer=None), error=OptimizerError, match="an optax optimizer")


def test_states_of_other_optimizers_and_models():
    tx, own = optax.adam(1e-3), linear(jax.random.key(0))
    other = {"w": jnp.ones((6, 4))}
    states = [
        optax.sgd(0.1, momentum=0.9).init(own.parameters),
        tx.init(other),
        tx.init({"v": own.parameters["w"]}),
        (),
    ]
    for state in states:
        refused(
            loops.job(own, optimizer=(tx, state)), error=OptimizerError, match="a state of this optimizer"
        )


def test_an_nnx_optimizer_belongs_to_an_nnx_module():
    given, other = module(), nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(other, optax.adam(1e-3), wrt=nnx.Param)
    refused(
        loops.job(given, optimizer=optimizer), error=OptimizerError, match="an nnx.Optimizer of this model"
    )
    refused(
        loops.job(linear(jax.random.key(0)), optimizer=optimizer),
        error=OptimizerError,
        match="beside an NNX module",
    )


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ((loops.X, loops.Y[:-1]), "arrays of one length"),
        ((loops.X[:0], loops.Y[:0]), "at least one sample"),
        (loops.X, r"data=\(x, y\) beside loss="),
        ((loops.X, loops.X, loops.Y), r"data=\(x, y\) beside loss="),
        ((loops.X, 3), "NumPy or JAX arrays"),
    ],
)
def test_data_that_does_not_match(data: Any, match: str):
    refused(loops.job(linear, data=data), error=DataError, match=match)
    if isinstance(data, tuple):
        refused(loops.job(linear, validation_data=data), error=DataError, match=match)


class Silent(eqx.Module):
    w: Any


class SilentNnx(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(3))


@pytest.mark.parametrize("model", [{"w": jnp.ones((6, 3))}, Silent(jnp.ones(3)), SilentNnx()])
def test_a_loss_of_what_cannot_be_called(model: Any):
    refused(loops.job(model), error=LossError, match="a model that can be called, beside loss=")


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda model, batch: model(batch[0])[:, 0], "loss to be a scalar"),
        (lambda model, batch: {"accuracy": jnp.mean(model(batch[0]))}, 'a dict with "loss"'),
        (lambda model, batch: {"loss": 0.0, "each": model(batch[0])}, "each to be a scalar"),
        (lambda model, batch: None, "a number"),
        (lambda model, batch: {"loss": "low"}, "a number"),
    ],
)
def test_steps_that_return_no_loss(made: Any, match: str):
    refused(loops.job(linear, step=made), error=LossError, match=match)


def test_a_loss_that_is_a_vector():
    def each(prediction: Any, target: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(prediction, target)

    refused(loops.job(linear, loss=each), error=LossError, match="loss to be a scalar")


def test_the_step_of_a_model_with_a_state_returns_it():
    model = Model(
        {"w": jnp.ones((6, 3))}, lambda own, state, x: (x @ own["w"], state), state={"n": jnp.zeros(())}
    )
    job = loops.job(model, step=lambda model, batch: model(batch[0])[0].mean())
    refused(job, error=LossError, match=r"to return \(loss, state\)")


def test_a_linen_module_whose_init_fails():
    class Narrow(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(3)(x.reshape(-1, 5))

    refused(loops.job(Narrow()), error=ModelError, match=r"Narrow.init\(key, x\[:1\]\).*module.bind")


def test_one_nnx_module_in_two_jobs():
    shared = module()
    jobs = [loops.job(shared, name="a"), loops.job(shared, name="b")]
    refused(*jobs, error=ModelError, match="this Linear in job 'a' too.*nnx.clone")

    class Around(nnx.Module):
        def __init__(self) -> None:
            self.inner = shared

        def __call__(self, x: Any) -> Any:
            return self.inner(x)

    refused(jobs[0], loops.job(Around()), error=ModelError, match="some of its variables in job 'a' too")
    copies = [loops.job(nnx.clone(shared)), loops.job(nnx.clone(shared))]
    assert [result.outcome.word for result in loops.trained(*copies)] == ["completed"] * 2


def test_one_nnx_optimizer_in_two_jobs():
    given = module()
    optimizer = nnx.Optimizer(given, optax.adam(1e-3), wrt=nnx.Param)
    jobs = [loops.job(given, optimizer=optimizer, name="a"), loops.job(nnx.clone(given), optimizer=optimizer)]
    refused(*jobs, error=OptimizerError, match="this Optimizer in job 'a' too")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scheduler": optax.cosine_decay_schedule(0.1, 10)}, "scheduler=.*optax.cosine_decay_schedule"),
        ({"accumulate": 2}, "accumulate=.*optax.MultiSteps"),
        ({"precision": "bf16"}, "precision="),
        ({"fit": {}, "optimizer": optax.sgd(0.1)}, "fit="),
    ],
)
def test_words_of_other_frameworks(options: dict[str, Any], match: str):
    refused(loops.job(module(), **options), error=JobError, match=match)


def test_phases():
    phases = [carpool.Phase(lambda model, batch: 0.0, optax.sgd(0.1))]
    job = carpool.Job(module(), (loops.X, loops.Y), phases=phases)
    refused(job, error=JobError, match="phases=.*optax.multi_transform")


def test_what_the_users_own_code_raises_is_that_jobs_failure():
    def factory(key: Any) -> Any:
        raise ZeroDivisionError("mine")

    def wrong(own: Any, x: Any) -> Any:
        raise KeyError("mine")

    jobs = {
        ZeroDivisionError: loops.job(factory),
        KeyError: loops.job(lambda key: Model({"w": jnp.ones((6, 3))}, wrong)),
        DataError: loops.job(linear, data=(loops.X[:, :5], loops.Y)),
    }
    before = np.array(loops.X)
    *bad, good = loops.trained(*jobs.values(), loops.job(linear))
    for result, kind in zip(bad, jobs, strict=True):
        assert result.outcome is carpool.Outcome.FAILED
        assert type(result.error) is kind
    assert good.outcome is carpool.Outcome.COMPLETED
    np.testing.assert_array_equal(loops.X, before)
    with pytest.raises(ZeroDivisionError, match="mine"):
        loops.trained(loops.job(factory))
