"""Each member of a population ends where a loop of its own would have ended, whatever is done to the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import carpool
from carpool.adapters.jax import programs
from carpool.adapters.jax.keys import init_key
from carpool.errors import DataError, LossError, ModelError, OptimizerError, OptionError
from carpool.jax import Model, Population, population, step_key

RATES = [0.3, 0.01, 0.1]
SEEDS = [7, 0, 123456789012]
DRAWN = np.random.default_rng(0)
BATCHES = [
    (DRAWN.normal(size=(16, 6)).astype("float32"), DRAWN.integers(0, 3, 16).astype("int32")) for _ in range(5)
]
BATCH = BATCHES[0]
STACKED = tuple(np.stack(arrays) for arrays in zip(*BATCHES, strict=True))


def init(key: Any) -> dict[str, Any]:
    drawn = jax.random.uniform(key, (9, 8), minval=-0.5)
    return {"w": drawn[:6], "b": jnp.zeros(8), "v": drawn[6:].T}


def applied(model: Any, x: Any) -> Any:
    return jax.nn.relu(x @ model["w"] + model["b"]) @ model["v"]


def cross_entropy(prediction: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(prediction, y).mean()


def step(model: Any, batch: Any) -> Any:
    x, y = batch
    return cross_entropy(applied(model, x), y)


def noisy(model: Any, batch: Any, key: Any) -> dict[str, Any]:
    x, y = batch
    kept = jax.random.bernoulli(key, 0.7, x.shape)
    prediction = applied(model, jnp.where(kept, x, 0))
    return {"loss": cross_entropy(prediction, y), "right": (prediction.argmax(-1) == y).sum()}


def by_hand(
    seed: int, optimizer: Any, batches: Sequence[Any] = BATCHES, step: Callable[..., Any] = step
) -> tuple[Any, Any, list[float]]:
    """A member's parameters, optimizer state and losses after a loop as anyone would write it."""

    model = init(init_key(seed))
    state, losses = optimizer.init(model), []
    for number, batch in enumerate(batches):
        given = (step_key(seed, number),) if step is noisy else ()
        value, gradients = SLOPES[step](model, batch, *given)
        updates, state = optimizer.update(gradients, state, model)
        model = optax.apply_updates(model, updates)
        losses.append(float(value))
    return model, state, losses


SLOPES = {
    step: jax.jit(jax.value_and_grad(step)),
    noisy: jax.jit(jax.value_and_grad(lambda *inputs: noisy(*inputs)["loss"])),
}


def close(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, tolerance, tolerance), one, other)


def bits(nest: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(nest)]


def adam(lr: Any) -> Any:
    return optax.adam(lr)


def halving(lr: Any, length: Any) -> Any:
    """A schedule with numbers of the member's own."""
    return optax.sgd(lambda count: lr * 0.5 ** (count // length))


def of_rates(**options: Any) -> Population:
    return population(init, step, adam, **{"keys": SEEDS, "hyper": {"lr": RATES}, **options})


# A member is a loop of its own


@pytest.mark.parametrize(
    ("optimizer", "hyper"),
    [
        (adam, {"lr": RATES}),
        (lambda lr, momentum: optax.sgd(lr, momentum), {"lr": RATES, "momentum": [0.9, 0.5, 0.0]}),
        (lambda lr, wd: optax.adamw(lr, weight_decay=wd), {"lr": 0.01, "wd": [0.0, 0.1, 1.0]}),
        (halving, {"lr": RATES, "length": [1, 2, 4]}),
        (optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05)), {}),
        (lambda lr: optax.contrib.schedule_free_sgd(lr), {"lr": RATES}),
    ],
    ids=["adam", "momentum", "adamw", "schedule", "one for all", "copies of weights"],
)
def test_members_equal_loops_written_by_hand(optimizer: Any, hyper: dict[str, Any]):
    pop = population(init, step, optimizer, keys=SEEDS, hyper=hyper)
    losses = np.stack([pop.step(batch)["loss"] for batch in BATCHES])
    for place, seed in enumerate(SEEDS):
        own = {name: np.broadcast_to(value, 3)[place].item() for name, value in hyper.items()}
        alone = optimizer(**own) if own else optimizer
        model, state, shown = by_hand(seed, alone)
        close(pop[place], model)
        close(pop.optimizer(place), state)
        close(losses[:, place], shown)


def test_in_float64_they_are_equal_to_eight_digits():
    with jax.enable_x64(True):
        batches = [(x.astype("float64"), y) for x, y in BATCHES]
        pop = of_rates()
        for batch in batches:
            pop.step(batch)
        for place, (seed, rate) in enumerate(zip(SEEDS, RATES, strict=True)):
            assert pop[place]["w"].dtype == np.float64
            close(pop[place], by_hand(seed, optax.adam(rate), batches)[0], 1e-8)


def test_a_rate_does_not_widen_half_precision():
    def half(key: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), init(key))

    pop = population(half, step, lambda lr: optax.sgd(lr, 0.9), keys=2, hyper={"lr": 0.1})
    pop.step(BATCH)
    assert {leaf.dtype for leaf in jax.tree.leaves((pop[0], pop.optimizer(0)))} == {jnp.bfloat16.dtype}


def test_every_member_has_the_keys_of_its_seed():
    pop = population(init, noisy, adam, keys=SEEDS, hyper={"lr": RATES})
    shown = [pop.step(batch) for batch in BATCHES]
    assert shown[0]["right"].shape == (3,)
    for place, (seed, rate) in enumerate(zip(SEEDS, RATES, strict=True)):
        model, _, losses = by_hand(seed, optax.adam(rate), step=noisy)
        close(pop[place], model)
        close([values["loss"][place] for values in shown], losses)


def test_a_member_equals_a_job():
    def job(seed: int, lr: float) -> carpool.Job:
        return carpool.Job(
            init, (x, y), step=noisy, optimizer=optax.adam(lr), batch_size=16, seed=seed, shuffle=False
        )

    x, y = (array.reshape(-1, *array.shape[2:]) for array in STACKED)
    jobs = [job(seed, rate) for seed, rate in zip(SEEDS, RATES, strict=True)]
    results = carpool.train(jobs, device="cpu", reporters=[])
    pop = population(init, noisy, adam, keys=SEEDS, hyper={"lr": RATES})
    pop.steps(STACKED)
    for place, result in enumerate(results):
        close(pop[place], result.model, 1e-6)
        close(pop.optimizer(place), result.optimizer, 1e-6)


@pytest.mark.parametrize(
    ("keys", "same"),
    [
        (3, [0, 1, 2]),
        (np.asarray([5, 1]), [5, 1]),
        (range(4, 6), [4, 5]),
        (jax.random.split(jax.random.key(1), 2), None),
        (jax.random.split(jax.random.PRNGKey(1), 2), None),
    ],
    ids=["count", "seeds", "range", "keys", "raw keys"],
)
def test_keys_are_a_count_or_seeds_or_keys(keys: Any, same: list[int] | None):
    made = (
        [init(init_key(s)) for s in same] if same else list(map(init, jax.random.split(jax.random.key(1), 2)))
    )
    pop = population(init, step, optax.sgd(0.1), keys=keys)
    assert len(pop) == len(made)
    for member, model in zip(pop, made, strict=True):
        close(member, model, 1e-6)


def test_one_member_is_a_population_too():
    pop = population(init, noisy, adam, keys=[7], hyper={"lr": 0.1})
    losses = [pop.step(batch)["loss"] for batch in BATCHES]
    model, _, shown = by_hand(7, optax.adam(0.1), step=noisy)
    close(pop[0], model)
    close(np.concatenate(losses), shown)


# Batches


def test_many_steps_in_one_launch_are_the_same_steps():
    pop, other = (population(init, noisy, adam, keys=SEEDS, hyper={"lr": RATES}) for _ in range(2))
    shown = other.steps(tuple(array[:3] for array in STACKED))
    more = other.steps(tuple(array[3:] for array in STACKED))
    losses = np.stack([pop.step(batch)["loss"] for batch in BATCHES])
    assert shown["loss"].shape == (3, 3)
    assert more["right"].shape == (2, 3)
    close(np.concatenate([shown["loss"], more["loss"]]), losses)
    close(other[2], pop[2])


def test_each_member_may_have_its_own_batch():
    pop, other = of_rates(), of_rates()
    order = [[0, 1, 2], [3, 4, 0], [1, 1, 3]]
    own = [tuple(array[places] for array in STACKED) for places in order]
    for batch in own:
        pop.step(batch, each=True)
    shown = other.steps(tuple(array[np.asarray(order)] for array in STACKED), each=True)
    assert shown["loss"].shape == (3, 3)
    for place, (seed, rate) in enumerate(zip(SEEDS, RATES, strict=True)):
        model, _, _ = by_hand(seed, optax.adam(rate), [BATCHES[places[place]] for places in order])
        close(pop[place], model)
        close(other[place], model)


# Between steps


def test_hyper_parameters_change_without_a_compile():
    pop = of_rates()
    pop.step(BATCH)
    before, made = bits(pop[1]), len(programs.compiled)
    pop.hyper["lr"] = pop.hyper["lr"].at[1].set(0.2)
    pop.step(BATCHES[1])
    pop.hyper["lr"] = 0.0
    before = bits(pop[1])
    pop.step(BATCHES[2])
    assert bits(pop[1]) == before
    assert len(programs.compiled) == made
    first, state, _ = by_hand(0, optax.adam(0.01), BATCHES[:1])
    gradients = jax.grad(step)(first, BATCHES[1])
    updates, _ = optax.adam(0.2).update(gradients, state, first)
    pop = of_rates()
    pop.step(BATCH)
    pop.hyper["lr"] = [0.3, 0.2, 0.1]
    pop.step(BATCHES[1])
    close(pop[1], optax.apply_updates(first, updates))


def test_who_is_dropped_leaves_the_others_as_they_were():
    pop, other = of_rates(), of_rates()
    for population_ in (pop, other):
        population_.step(BATCH)
    pop.drop([False, True, False])
    other.drop(jnp.asarray([1]), keep_width=True)
    assert (len(pop), len(other)) == (2, 3)
    np.testing.assert_array_equal(pop.hyper["lr"], np.asarray([0.3, 0.1], "float32"))
    stopped = bits((other[1], other.optimizer(1)))
    for batch in BATCHES[1:]:
        pop.step(batch)
        shown = other.step(batch)["loss"]
        assert np.isnan(shown).tolist() == [False, True, False]
    assert bits((other[1], other.optimizer(1))) == stopped
    assert other.sound.all()
    for place, own in ((0, 0), (2, 1)):
        model, state, _ = by_hand(SEEDS[place], optax.adam(RATES[place]))
        close(pop[own], model)
        close(other[place], model)
        close(pop.optimizer(own), state)


def test_narrow_populations_keep_their_keys():
    pop = population(init, noisy, adam, keys=SEEDS, hyper={"lr": RATES})
    pop.step(BATCH)
    pop.drop(0)
    pop.step(BATCHES[1])
    pop.drop(0)
    for batch in BATCHES[2:]:
        pop.step(batch)
    assert len(pop) == 1
    close(pop[0], by_hand(SEEDS[2], optax.adam(RATES[2]), step=noisy)[0])


def test_a_copy_goes_on_from_its_source():
    pop = of_rates()
    pop.step(BATCH)
    source = bits((pop[2], pop.optimizer(2)))
    pop.copy(2, 0)
    assert bits((pop[0], pop.optimizer(0))) == source == bits((pop[2], pop.optimizer(2)))
    for batch in BATCHES[1:]:
        pop.step(batch)
    raised = optax.adam(lambda count: jnp.where(jnp.less(count, 1), 0.1, 0.3))
    close(pop[0], by_hand(SEEDS[2], raised)[0])


def test_copies_are_read_before_any_is_written():
    pop = population(init, step, adam, keys=4, hyper={"lr": 0.1})
    before = [bits(model) for model in pop]
    pop.copy(np.asarray([0, 1, 2]), [1, 2, -1])
    assert [bits(model) for model in pop] == [before[0], before[0], before[1], before[2]]
    pop.copy(3, [0, 1])
    assert [bits(model) for model in pop] == [before[2], before[2], before[1], before[2]]


def test_a_round_of_exploit_and_explore_compiles_once():
    pop = population(init, step, adam, keys=6, hyper={"lr": np.logspace(-4, 0, 6)})
    made = 0
    for number in range(3):
        losses = np.asarray(pop.steps(STACKED)["loss"][-1])
        order = losses.argsort()
        pop.copy(order[:2], order[-2:])
        rates = np.asarray(pop.hyper["lr"]).copy()
        rates[order[-2:]] = rates[order[:2]] * 1.2
        pop.hyper["lr"] = rates
        made = made if number else len(programs.compiled)
    assert len(programs.compiled) == made


def test_a_member_that_is_not_finite_keeps_its_last_sound_state_and_the_others_theirs():
    def failing(model: Any, batch: Any) -> Any:
        x, y, factor = batch
        return cross_entropy(applied(model, x), y) * factor

    ones = np.ones(3, "float32")
    pop, other = (population(init, failing, adam, keys=SEEDS, hyper={"lr": RATES}) for _ in range(2))
    axes = [np.stack([array] * 3) for array in BATCH]
    for number in range(4):
        factor = ones.copy()
        if number == 2:
            factor[1] = np.nan
        shown = pop.step((*axes, factor), each=True)["loss"]
        other.step((*axes, ones), each=True)
        if number == 1:
            sound = bits((pop[1], pop.optimizer(1)))
        assert np.isfinite(shown).tolist() == [True, number < 2, True]
    assert pop.sound.tolist() == [True, False, True]
    assert bits((pop[1], pop.optimizer(1))) == sound  # pyright: ignore[reportPossiblyUnboundVariable]
    assert bits((other[1], other.optimizer(1))) != sound  # pyright: ignore[reportPossiblyUnboundVariable]
    for place in (0, 2):
        assert bits((pop[place], pop.optimizer(place))) == bits((other[place], other.optimizer(place)))
    pop.copy(2, 1)
    assert pop.sound.all()
    pop.step((*axes, ones), each=True)
    assert bits(pop[1]) != bits(other[2])


def test_a_step_waits_for_nothing():
    """What a step returns are arrays of JAX, and the numbers of the one before are still there after the next."""
    pop = of_rates()
    shown = [pop.step(batch) for batch in BATCHES[:2]]
    sound, rates = pop.sound, pop.hyper["lr"]
    pop.step(BATCHES[2])
    assert all(isinstance(values["loss"], jax.Array) for values in shown)
    assert sound.all()
    assert rates.shape == shown[0]["loss"].shape == (3,)


def test_buffers_are_given_on():
    pop = of_rates()
    before = jax.tree.leaves(pop._state)
    pop.step(BATCH)
    assert all(leaf.is_deleted() for leaf in before)


# Programs


def test_programs_are_made_once_for_a_width():
    def made(population_: Population) -> int:
        before = len(programs.compiled)
        population_.step(BATCH)
        return len(programs.compiled) - before

    programs.forget()
    pop = of_rates()
    assert made(pop) == 1
    assert made(pop) == 0
    pop.drop(0)
    assert made(pop) == 1
    assert made(of_rates(keys=2, hyper={"lr": 0.5})) == 0  # that width is there
    pop.drop(0, keep_width=True)
    assert made(pop) == 0


def test_another_behaviour_is_another_program():
    scaled = [
        population(init, lambda m, b, by=by: step(m, b) * by, optax.sgd(0.1), keys=2) for by in (1.0, 2.0)
    ]
    losses = [np.asarray(pop.step(BATCH)["loss"]) for pop in scaled]
    close(losses[0] * 2, losses[1])


def test_each_operation_is_one_program():
    programs.forget()
    before = len(programs.compiled)
    for _ in range(2):
        pop = of_rates(keys=3)
        pop.step(BATCH)
        pop.copy(0, 1)
        pop.drop(2)
        pop[1]
        assert len(programs.compiled) == before + 5  # begin, step, copy, drop, take one out


# Kinds of models


def test_nnx_modules_with_states_of_their_own():
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(6, 8, rngs=rngs, kernel_init=nnx.initializers.normal(0.3))
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.3, rngs=rngs)
            self.last = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))

    def called(model: Any, batch: Any) -> Any:
        x, y = batch
        return cross_entropy(model(x), y)

    pop = population(
        lambda key: Net(nnx.Rngs(key)), called, optax.sgd, keys=SEEDS, hyper={"learning_rate": RATES}
    )
    for batch in BATCHES:
        pop.step(batch)
    predicted, slope = pop.predict(BATCH[0]), nnx.jit(nnx.grad(called))
    for place, (seed, rate) in enumerate(zip(SEEDS, RATES, strict=True)):
        model = Net(nnx.Rngs(init_key(seed)))
        optimizer = nnx.Optimizer(model, optax.sgd(rate), wrt=nnx.Param)
        for batch in BATCHES:
            optimizer.update(model, slope(model, batch))
        own = pop[place]
        assert isinstance(own, Net)
        close(nnx.state(own, nnx.Param, nnx.BatchStat), nnx.state(model, nnx.Param, nnx.BatchStat), 1e-4)
        model.eval()
        close(predicted[place], model(BATCH[0]), 1e-4)


def test_equinox_modules():
    def made(key: Any) -> Any:
        return eqx.nn.MLP(6, 3, 8, 1, activation=lambda x: jnp.tanh(x), key=key)

    def called(model: Any, batch: Any) -> Any:
        x, y = batch
        return cross_entropy(jax.vmap(model)(x), y)

    pop = population(made, called, adam, keys=SEEDS, hyper={"lr": RATES})
    for batch in BATCHES:
        pop.step(batch)
    slope = eqx.filter_jit(eqx.filter_grad(called))
    for place, (seed, rate) in enumerate(zip(SEEDS, RATES, strict=True)):
        model, optimizer = made(init_key(seed)), optax.adam(rate)
        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        for batch in BATCHES:
            gradients = slope(model, batch)
            updates, state = optimizer.update(gradients, state)
            model = eqx.apply_updates(model, updates)
        assert isinstance(pop[place], eqx.nn.MLP)
        close(jax.vmap(pop[place])(BATCH[0]), jax.vmap(model)(BATCH[0]))
        close(pop.predict(BATCH[0])[place], jax.vmap(model)(BATCH[0]))


def test_linen_modules_and_models():
    module = linen.Dense(3)

    def bound(key: Any) -> Any:
        return module.bind(module.init(key, BATCH[0]))

    def paired(key: Any) -> Any:
        return Model(module.init(key, BATCH[0]), module.apply)

    def called(model: Any, batch: Any) -> Any:
        x, y = batch
        return cross_entropy(model(x), y)

    pops = [population(made, called, optax.sgd(0.1), keys=3) for made in (bound, paired)]
    for pop in pops:
        pop.step(BATCH)
    assert isinstance(pops[0][1], linen.Dense)
    assert isinstance(pops[1][1], Model)
    close(pops[0].predict(BATCH[0]), pops[1].predict(BATCH[0]))
    close(pops[0][2](BATCH[0]), pops[1].predict(BATCH[0])[2])


def test_an_init_that_reads_its_key_is_called_for_each_member():
    def read(key: Any) -> Any:
        drawn = np.random.default_rng(int(jax.random.bits(key)))
        return {name: jnp.asarray(drawn.normal(size=leaf.shape)) / 3 for name, leaf in init(key).items()}

    pop = population(read, step, adam, keys=SEEDS, hyper={"lr": RATES})
    for place, seed in enumerate(SEEDS):
        close(pop[place], read(init_key(seed)))
    before = np.asarray(pop.step(BATCH)["loss"])
    close(before, [float(step(read(init_key(seed)), BATCH)) for seed in SEEDS])


def test_convolutions():
    def drawn(key: Any) -> Any:
        return Model({"k": jax.random.uniform(key, (3, 1, 3), minval=-1.0)}, convolved)

    def convolved(parameters: Any, x: Any) -> Any:
        made = jax.lax.conv_general_dilated(
            x[..., None], parameters["k"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jnp.tanh(made).mean(1)

    def called(model: Any, batch: Any) -> Any:
        x, y = batch
        return cross_entropy(model(x), y)

    pop = population(drawn, called, optax.sgd(0.5), keys=3)
    pop.steps(STACKED)
    slope = jax.jit(jax.grad(lambda parameters, batch: called(Model(parameters, convolved), batch)))
    for place in range(3):
        parameters = drawn(init_key(place)).parameters
        for batch in BATCHES:
            parameters = jax.tree.map(lambda p, g: p - 0.5 * g, parameters, slope(parameters, batch))
        close(pop[place].parameters, parameters)
        close(pop.predict(BATCH[0])[place], convolved(parameters, BATCH[0]))


# Misuse


def odd(key: Any) -> Any:
    """A structure that depends on the key's numbers."""
    wide = 8 + int(jax.random.key_data(key)[-1]) % 2
    return {"w": jnp.ones((6, wide)), "b": jnp.zeros(wide), "v": jnp.ones((wide, 3))}


def moody(key: Any) -> Any:
    activation = jnp.tanh if int(jax.random.key_data(key)[-1]) % 2 else jax.nn.relu
    return eqx.nn.MLP(6, 3, 8, 1, activation=activation, key=key)


def without_loss(model: Any, batch: Any) -> Any:
    return {"error": step(model, batch)}


def by_sample(model: Any, batch: Any) -> Any:
    return applied(model, batch[0]).sum(-1)


def choosing(lr: Any, momentum: Any) -> Any:
    return optax.sgd(lr, momentum if momentum > 0 else None)


@pytest.mark.parametrize(
    ("error", "says", "make"),
    [
        (OptionError, "one number or 3", lambda: of_rates(hyper={"lr": [0.1, 0.2]})),
        (OptionError, "numbers as hyper-parameter lr", lambda: of_rates(hyper={"lr": "fast"})),
        (OptimizerError, "out of lr. Received: 'rate'", lambda: of_rates(hyper={"lr": 0.1, "rate": 0.1})),
        (OptimizerError, "lr in hyper=", lambda: of_rates(hyper={})),
        (
            OptimizerError,
            "no hyper-parameters",
            lambda: population(init, step, optax.sgd(1), keys=2, hyper={"lr": 1}),
        ),
        (OptimizerError, "Received: float", lambda: population(init, step, 0.1, keys=2)),
        (OptimizerError, "to return an optax", lambda: population(init, step, lambda: 0.1, keys=2)),
        (
            OptimizerError,
            "structure does not depend",
            lambda: population(init, step, choosing, keys=2, hyper={"lr": 0.1, "momentum": [0.0, 0.9]}),
        ),
        (ModelError, "members of one structure", lambda: population(odd, step, optax.sgd(0.1), keys=4)),
        (ModelError, "Received: str", lambda: population(lambda key: "net", step, optax.sgd(0.1), keys=4)),
        (ModelError, "unbound", lambda: population(lambda key: linen.Dense(3), step, optax.sgd(0.1), keys=4)),
        (
            ModelError,
            "with parameters",
            lambda: population(lambda key: {"n": jnp.arange(3)}, step, optax.sgd(0.1), keys=4),
        ),
        (OptionError, "as keys=. Received: 0", lambda: of_rates(keys=0)),
        (OptionError, "as keys=", lambda: of_rates(keys=[0.5, 1.5])),
        (OptionError, "as keys=", lambda: of_rates(keys=jax.random.key(0))),
    ],
)
def test_misuse_when_it_is_made(error: type[Exception], says: str, make: Callable[[], Any]):
    with pytest.raises(error, match=says) as raised:
        make()
    assert "Remedy" in str(raised.value)


@pytest.mark.parametrize(
    ("error", "says", "do"),
    [
        (IndexError, "below 3", lambda pop: pop[3]),
        (IndexError, "below 3", lambda pop: pop.optimizer(-4)),
        (IndexError, "below 3", lambda pop: pop.copy(0, 5)),
        (IndexError, "mask", lambda pop: pop.drop([True, False])),
        (TypeError, "a position, a whole number", lambda pop: pop[0.5]),
        (OptionError, "one source for each target", lambda pop: pop.copy([0, 1], [2])),
        (OptionError, "one source for each target", lambda pop: pop.copy([0, 1], [2, 2])),
        (OptionError, "a member to stay", lambda pop: pop.drop([True] * 3)),
        (OptionError, "Expected lr. Received: 'wd'", lambda pop: pop.hyper.__setitem__("wd", 0.1)),
        (OptionError, "one number or 3", lambda pop: pop.hyper.__setitem__("lr", [0.1, 0.2])),
        (
            DataError,
            "axis 0 of every array of the batch to be the members, 3",
            lambda pop: pop.step(BATCH, each=True),
        ),
        (DataError, "to be the steps", lambda pop: pop.steps((BATCH[0], BATCH[1][:3]))),
        (DataError, "no array", lambda pop: pop.steps(())),
        (ModelError, "can be called", lambda pop: pop.predict(BATCH[0])),
    ],
)
def test_misuse_between_steps_leaves_it_as_it_was(
    error: type[Exception], says: str, do: Callable[[Any], Any]
):
    pop = of_rates()
    before = [bits((pop[place], pop.optimizer(place))) for place in range(3)]
    with pytest.raises(error, match=says) as raised:
        do(pop)
    assert "Remedy" in str(raised.value)
    assert [bits((pop[place], pop.optimizer(place))) for place in range(3)] == before


@pytest.mark.parametrize(
    ("error", "says", "pop"),
    [
        (
            LossError,
            'a dict with "loss"',
            lambda: population(init, without_loss, adam, keys=2, hyper={"lr": 1.0}),
        ),
        (
            LossError,
            "loss to be a scalar",
            lambda: population(init, by_sample, adam, keys=2, hyper={"lr": 1.0}),
        ),
        (
            ModelError,
            "compute differently",
            lambda: population(moody, lambda m, b: jax.vmap(m)(b[0]).mean(), optax.sgd(1), keys=4),
        ),
        (OptimizerError, "as it is built", lambda: population(init, step, growing(), keys=2)),
    ],
)
def test_misuse_at_the_first_step(error: type[Exception], says: str, pop: Callable[[], Population]):
    with pytest.raises(error, match=says) as raised:
        pop().step(BATCH)
    assert "Remedy" in str(raised.value)


def growing() -> Any:
    """Its state becomes another after a step."""

    def begin(params: Any) -> Any:
        return jnp.zeros(())

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return updates, (state, state)

    return optax.GradientTransformation(begin, update)


def test_whole_numbers_stay_whole():
    pop = population(init, step, halving, keys=2, hyper={"lr": 0.1, "length": [4, 8]})
    with pytest.raises(OptionError, match="int32 as length"):
        pop.hyper["length"] = 0.5
    pop.hyper["length"] = 16
    assert pop.hyper["length"].tolist() == [16, 16]
