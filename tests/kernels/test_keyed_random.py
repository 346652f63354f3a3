"""Keyed random operators: equal alone, vmapped and compiled; the right distributions; nothing global."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from carpool.kernels.random import Keyed

SEEDS = torch.tensor([0, 1, -7, 2**62 + 3])
STEPS = torch.tensor([0, 5, 2, 9])

OPERATORS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "module": lambda x: torch.nn.Dropout(0.3)(x),
    "dropout1d": lambda x: F.dropout1d(x.flatten(2), 0.3).view_as(x),
    "dropout2d": lambda x: F.dropout2d(x, 0.3),
    "dropout3d": lambda x: F.dropout3d(x[:, :, None], 0.3)[:, :, 0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x),
    "rand": lambda x: x + torch.rand(5, dtype=x.dtype),
    "randn": lambda x: x + torch.randn((4, 5), dtype=x.dtype),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.4)),
    "uniform_": lambda x: torch.zeros_like(x).uniform_(-1, 2) + x,
    "normal_": lambda x: torch.zeros_like(x).normal_(1, 3) + x,
    "exponential_": lambda x: torch.zeros_like(x).exponential_(2.0) + x,
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_alone_equals_vmapped(name):
    operator = OPERATORS[name]
    x = torch.randn(4, 3, 2, 4, 5, dtype=torch.float64)

    def member(x, seed, step):
        with Keyed(seed, step):
            return operator(operator(x))

    together = vmap(member)(x, SEEDS, STEPS)
    for row in range(4):
        with Keyed(int(SEEDS[row]), int(STEPS[row])):
            alone = operator(operator(x[row]))
        torch.testing.assert_close(together[row], alone, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", OPERATORS)
def test_nothing_is_drawn_from_the_global_generator(name):
    before = torch.get_rng_state()
    with Keyed(3, 4):
        OPERATORS[name](torch.ones(3, 2, 4, 5))
    assert torch.equal(before, torch.get_rng_state())


def test_seed_step_and_call_each_change_the_numbers():
    def draw(seed, step, calls=1):
        with Keyed(seed, step):
            return [torch.rand(64) for _ in range(calls)][-1]

    base = draw(1, 1)
    assert torch.equal(base, draw(1, 1))
    for other in (draw(2, 1), draw(1, 2), draw(1, 1, calls=2)):
        assert not torch.equal(base, other)


def test_a_mask_does_not_depend_on_the_neighbours_shape():
    with Keyed(1, 1):
        small = torch.rand(3, 5)
    with Keyed(1, 1):
        large = torch.rand(6, 5)
    assert torch.equal(small, large[:3])


def test_uniform_numbers_are_uniform():
    with Keyed(11, 0):
        u = torch.rand(200_000, dtype=torch.float64)
    assert 0 <= u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1
    counts = torch.histc(u, 100, 0, 1)
    chi = ((counts - 2000) ** 2 / 2000).sum()
    assert 50 < chi < 160, "99 degrees of freedom"
    neighbours = torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]
    assert abs(neighbours) < 0.01


def test_normal_numbers_are_normal():
    with Keyed(5, 2):
        z = torch.randn(200_000, dtype=torch.float64)
    assert abs(z.mean()) < 0.01
    assert abs(z.std() - 1) < 0.01
    assert abs((z.abs() < 1).double().mean() - 0.6827) < 0.005
    assert 4 < z.abs().max() < 6.5


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_share_and_the_mean(p):
    x = torch.ones(100_000, dtype=torch.float64)
    with Keyed(3, 7):
        y = F.dropout(x, p)
    assert abs((y == 0).double().mean() - p) < 0.01
    assert abs(y.mean() - 1) < 0.05
    assert torch.all((y == 0) | torch.isclose(y, torch.tensor(1 / (1 - p), dtype=torch.float64)))


def test_channels_drop_whole():
    with Keyed(3, 7):
        y = F.dropout2d(torch.ones(50, 40, 3, 3), 0.3)
    per_channel = y.flatten(2)
    assert torch.all(per_channel == per_channel[..., :1])
    assert abs((per_channel[..., 0] == 0).float().mean() - 0.3) < 0.05


def test_alpha_dropout_keeps_mean_and_variance_of_normal_inputs():
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with Keyed(3, 7):
        y = F.alpha_dropout(x, 0.2, training=True)
    assert abs(y.mean()) < 0.02
    assert abs(y.std() - 1) < 0.02


def test_evaluation_and_generators_of_ones_own_are_left_alone():
    x = torch.ones(10)
    with Keyed(0, 0) as key:
        assert torch.equal(F.dropout(x, 0.5, training=False), x)
        own = torch.rand(4, generator=torch.Generator().manual_seed(5))
        assert key.call == 0
    assert torch.equal(own, torch.rand(4, generator=torch.Generator().manual_seed(5)))


@pytest.mark.slow
def test_compiled_masks_equal_eager_ones():
    from torch.fx.experimental.proxy_tensor import make_fx

    def mask(seeds, steps):
        def member(seed, step):
            with Keyed(seed, step):
                return F.dropout(torch.ones(7, 5), 0.4)

        return vmap(member)(seeds, steps)

    traced = make_fx(mask)(SEEDS, STEPS)
    assert torch.equal(torch.compile(traced)(SEEDS, STEPS) == 0, mask(SEEDS, STEPS) == 0)
