"""A few traces tell the others: exactly, or not at all."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from carpool.adapters.jax.families import Families, Rule, apart
from carpool.adapters.jax.lift import Traced, traced
from carpool.fingerprint import fingerprint

P = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}


class Counted:
    """Families that count what is really traced."""

    def __init__(self) -> None:
        self.families, self.made = Families(), 0

    def rule(self, optimizer: Any) -> Rule:
        def make() -> Traced:
            self.made += 1
            return traced(optimizer.update, P, optimizer.init(P), P)

        return Rule("key", apart(fingerprint((optimizer.init, optimizer.update))), make)

    def of(self, optimizer: Any) -> Traced:
        return self.families.traced(self.rule(optimizer))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        optax.adam,
        optax.sgd,
        lambda rate: optax.adamw(1e-3, weight_decay=rate),
        lambda rate: optax.adam(1e-3, b1=rate),
        lambda rate: optax.adam(optax.cosine_decay_schedule(rate, 50)),
        lambda rate: optax.chain(optax.clip_by_global_norm(rate), optax.lion(rate)),
        lambda rate: optax.MultiSteps(optax.adam(rate), 2),
    ],
)
def test_three_traces_tell_the_others_exactly(make):
    counted = Counted()
    rates = np.linspace(0.01, 0.9, 6).tolist()
    for rate in rates:
        optimizer = make(rate)
        told = counted.of(optimizer)
        really = traced(optimizer.update, P, optimizer.init(P), P)
        assert (told.text, told.numbers) == (really.text, really.numbers)
        moves, _ = told.run((P, optimizer.init(P), P), {})
        expected, _ = optimizer.update(P, optimizer.init(P), P)
        for name in P:
            np.testing.assert_allclose(moves[name], expected[name], rtol=1e-5)
    assert counted.made <= 4
    assert counted.families.confirm([counted.rule(make(rate)) for rate in rates])


def test_two_numbers_are_told_when_both_have_been_seen_to_differ():
    counted = Counted()
    pairs = [(1e-3 * (i + 1), 0.1 / (i + 1)) for i in range(12)]
    for rate, decay in pairs:
        told = counted.of(optax.adamw(rate, weight_decay=decay))
        assert {np.float32(-rate), np.float32(decay)} <= set(map(np.float32, told.numbers))
    assert counted.made == 3
    assert counted.of(optax.adamw(1e-3, b1=0.5, weight_decay=0.1)).numbers.count(0.5) > 0
    assert counted.made == 4


def test_zero_is_another_make():
    marks = [fingerprint(optax.adamw(1e-3, weight_decay=decay).update) for decay in (0.1, 0.2, 0.0)]
    makes = [apart(mark)[0] for mark in marks]
    assert makes[0] == makes[1] != makes[2]


def test_a_rule_with_a_bend_is_found_at_the_ends():
    counted = Counted()

    def cut(rate: float) -> optax.GradientTransformation:
        plain = optax.sgd(1.0)
        return optax.GradientTransformation(
            plain.init,
            lambda g, s, p=None: optax.sgd(min(rate, 0.5)).update(g, s, p),  # type: ignore[arg-type]
        )

    rates = [0.1, 0.2, 0.3, 0.4, 0.9]
    told = [counted.of(cut(rate)) for rate in rates]
    assert np.float32(-0.9) in told[-1].numbers  # told wrongly so far
    assert not counted.families.confirm([counted.rule(cut(rate)) for rate in rates])
    assert -0.5 in counted.of(cut(0.9)).numbers
