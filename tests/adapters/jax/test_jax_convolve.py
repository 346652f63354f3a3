"""A convolution as a matrix product, or with its groups elsewhere, equals JAX' own, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.adapters.jax.convolve import apart, as_product
from carpool.adapters.jax.lift import traced
from carpool.adapters.jax.replay import replayed
from carpool.adapters.jax.telling import names_of


@pytest.mark.slow
@given(
    rank=st.integers(1, 2),
    size=st.integers(5, 8),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.sampled_from(["SAME", "VALID", 2]),
    dilation=st.integers(1, 2),
    widened=st.integers(1, 2),
)
@settings(max_examples=6)
def test_the_product_equals_the_convolution_and_its_gradients(
    rank, size, kernel, stride, padding, dilation, widened
):
    letters = "HW"[:rank]
    spec = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    pads = padding if isinstance(padding, str) else [(padding, padding - 1)] * rank
    if isinstance(pads, str) and widened > 1:
        pads = [(1, 0)] * rank
    random = np.random.default_rng(0)
    x = random.normal(size=(2, *[size] * rank, 3)).astype("float32")
    w = random.normal(size=(*[kernel] * rank, 3, 4)).astype("float32")

    def convolved(x, w):
        return jax.lax.conv_general_dilated(
            x, w, [stride] * rank, pads, [widened] * rank, [dilation] * rank, dimension_numbers=spec
        )

    def function(x, w):
        out = convolved(x, w)
        return out, jax.grad(lambda x, w: (jnp.sin(convolved(x, w)) ** 2).sum(), (0, 1))(x, w)

    trace = traced(function, x, w)
    assert "conv_general_dilated" in names_of(trace.closed)
    ours = replayed(trace.closed, [x, w], {}, {"conv_general_dilated": as_product})
    for one, other in zip(ours, jax.tree.leaves(function(x, w)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_groups_stay_convolutions():
    x, w = jnp.ones((1, 6, 4)), jnp.ones((3, 2, 4))

    def grouped(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=2
        )

    trace = traced(grouped, x, w)
    (ours,) = replayed(trace.closed, [x, w], {}, {"conv_general_dilated": as_product})
    np.testing.assert_allclose(ours, grouped(x, w), rtol=1e-6)


@pytest.mark.parametrize("precision", [None, "highest"])
def test_stacked_it_has_no_convolution(precision):
    x, w = jnp.ones((4, 2, 6, 3)), jnp.ones((4, 3, 3, 5))

    def convolved(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), precision=precision
        )

    trace = traced(convolved, x[0], w[0])
    stacked = jax.vmap(
        lambda x, w: replayed(trace.closed, [x, w], {}, {"conv_general_dilated": as_product})[0]
    )
    assert "conv_general_dilated" not in names_of(traced(stacked, x, w).closed)
    np.testing.assert_allclose(stacked(x, w), jax.vmap(convolved)(x, w), rtol=1e-5)


LAST, FIRST, ODD = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("CHWN", "IHWO", "CHWN")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "spec", "channels", "groups", "each"),
    [
        ("float32", LAST, 2, 2, 1),
        ("float32", LAST, 3, 3, 2),
        ("float32", FIRST, 4, 2, 3),
        ("float32", ODD, 4, 2, 3),
        ("float64", LAST, 2, 2, 1),
        ("float64", LAST, 1, 1, 1),
        ("float64", LAST, 4, 1, 2),
        ("float64", ODD, 3, 3, 2),
    ],
)
def test_members_of_a_stacked_convolution_stay_apart(kind, spec, channels, groups, each):
    random = np.random.default_rng(0)
    sizes = {"N": 4, "C": channels, "I": channels // groups, "O": groups * each}
    x = random.normal(size=(3, *(sizes.get(letter, 5) for letter in spec[0]))).astype(kind)
    w = random.normal(size=(3, *(sizes.get(letter, 3) for letter in spec[1]))).astype(kind)

    def convolved(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=spec, feature_group_count=groups
        )

    def function(x, w):
        return convolved(x, w), jax.grad(lambda x, w: (convolved(x, w) ** 2).sum(), (0, 1))(x, w)

    with jax.enable_x64(kind == "float64"):
        trace = traced(function, x[0], w[0])
        ours = jax.jit(jax.vmap(lambda *own: trace.run(own, {}, {"conv_general_dilated": apart})))
        made = jax.tree.leaves(ours(x, w))
        alone = [jax.tree.leaves(function(*own)) for own in zip(x, w, strict=True)]
        for ours_of, theirs in zip(made, zip(*alone, strict=True), strict=True):
            np.testing.assert_allclose(ours_of, np.stack(theirs), rtol=1e-4, atol=1e-4)
        w[1] = np.nan
        for before, beside in zip(made, jax.tree.leaves(ours(x, w)), strict=True):
            assert np.isnan(beside[1]).all()
            assert (beside[::2] == before[::2]).all()
