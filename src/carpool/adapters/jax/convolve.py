"""Convolution as one matrix product: stacked over members it is a batched product, where XLA would make a grouped convolution.

Either the kernel's positions are few (a forward pass, the gradient of the input) or the output's are (the gradient of the kernel): shifted
views of the padded input are laid side by side for the fewer, and contracted with the kernel. Where neither are few it stays a convolution.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

_MOST_VIEWS = 64  # views laid side by side: more of them would take more memory than they save time


def as_product(lhs: Any, rhs: Any, **params: Any) -> Any:
    """`lax.conv_general_dilated` of these inputs, with the same parameters."""
    if not is_product(lhs.shape, rhs.shape, params):
        return jax.lax.conv_general_dilated_p.bind(lhs, rhs, **params)
    numbers = params["dimension_numbers"]
    x, kernel = jnp.transpose(lhs, numbers.lhs_spec), jnp.transpose(rhs, numbers.rhs_spec)  # NC..., OI...
    x = _padded(x, params["padding"], params["lhs_dilation"])
    out = _extents(x.shape[2:], kernel.shape[2:], params["window_strides"], params["rhs_dilation"])
    if prod(kernel.shape[2:]) <= prod(out):
        made = _by_kernel(x, kernel, out, params)
    else:
        made = _by_output(x, kernel, out, params)
    made = made.astype(params.get("preferred_element_type") or lhs.dtype)
    back = [numbers.out_spec.index(axis) for axis in range(made.ndim)]
    return jnp.transpose(made, back)


def as_product_apart(lhs: Any, rhs: Any, **params: Any) -> Any:
    """The same on a CPU, where what is no product keeps the members of a stack apart."""
    return (as_product if is_product(lhs.shape, rhs.shape, params) else apart)(lhs, rhs, **params)


def apart(lhs: Any, rhs: Any, **params: Any) -> Any:
    """`lax.conv_general_dilated`, of which a stack keeps its members apart.

    XLA on a CPU computes some grouped convolutions as dense ones with zeros, where a member's NaN reaches the others: those with groups of
    samples, as the gradient of a grouped kernel has them, which are groups of features here (and several times as fast); and those in
    float64, which are taken member by member.
    """
    if params["batch_group_count"] > 1:
        lhs, params = _by_features(lhs, params)
    convolved = partial(jax.lax.conv_general_dilated_p.bind, **params)
    if lhs.dtype == jnp.float64:
        convolved = sequential_vmap(convolved)
    return convolved(lhs, rhs)


def _by_features(lhs: Any, params: Any) -> tuple[Any, dict[str, Any]]:
    groups = params["batch_group_count"]
    batch, features = params["dimension_numbers"].lhs_spec[:2]
    shape = list(lhs.shape)
    shape[batch] //= groups
    split = lhs.reshape(*shape[:batch], groups, *shape[batch:])
    shape[features] *= groups
    moved = jnp.moveaxis(split, batch, features)  # the groups, just before the features
    return moved.reshape(shape), {**params, "batch_group_count": 1, "feature_group_count": groups}


def is_product(lhs: tuple[int, ...], rhs: tuple[int, ...], params: Any) -> bool:
    """Whether such a convolution is worth it and can be had: not one in groups, nor one with many positions on both sides."""
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return False
    numbers = params["dimension_numbers"]
    shape = [lhs[axis] for axis in numbers.lhs_spec[2:]]
    kernel = [rhs[axis] for axis in numbers.rhs_spec[2:]]
    sides = zip(shape, params["padding"], params["lhs_dilation"], strict=True)
    whole = [(n - 1) * dilation + 1 + low + high for n, (low, high), dilation in sides]
    out = _extents(whole, kernel, params["window_strides"], params["rhs_dilation"])
    return min(prod(kernel), prod(out)) <= _MOST_VIEWS


def _extents(shape: Any, kernel: Any, strides: Any, dilations: Any) -> tuple[int, ...]:
    """The output's, of an input that is padded already."""
    sides = zip(shape, kernel, strides, dilations, strict=True)
    return tuple((n - ((k - 1) * dilation + 1)) // stride + 1 for n, k, stride, dilation in sides)


def _padded(x: Any, padding: Any, dilation: Any) -> Any:
    spatial = [(low, high, gap - 1) for (low, high), gap in zip(padding, dilation, strict=True)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *spatial])


def _by_kernel(x: Any, kernel: Any, out: tuple[int, ...], params: Any) -> Any:
    """A view for each position of the kernel, as large as the output."""
    views = [
        _view(x, at, params["rhs_dilation"], out, params["window_strides"])
        for at in _positions(kernel.shape[2:])
    ]
    laid = jnp.stack(views, 2)  # N, C, K, out...
    flat = laid.reshape(laid.shape[0], -1, prod(out))
    weights = kernel.reshape(kernel.shape[0], -1)
    made = jnp.einsum("ok,nkp->nop", weights, flat, precision=params["precision"])
    return made.reshape(x.shape[0], kernel.shape[0], *out)


def _by_output(x: Any, kernel: Any, out: tuple[int, ...], params: Any) -> Any:
    """A view for each position of the output, as large as the kernel."""
    views = [
        _view(x, at, params["window_strides"], kernel.shape[2:], params["rhs_dilation"])
        for at in _positions(out)
    ]
    laid = jnp.stack(views, 1)  # N, P, C, kernel...
    flat = laid.reshape(*laid.shape[:2], -1)
    weights = kernel.reshape(kernel.shape[0], -1)
    made = jnp.einsum("ok,npk->nop", weights, flat, precision=params["precision"])
    return made.reshape(x.shape[0], kernel.shape[0], *out)


def _positions(extents: Any) -> list[tuple[int, ...]]:
    return list(product(*map(range, extents)))


def _view(x: Any, at: Any, spacing: Any, extents: Any, strides: Any) -> Any:
    """`extents` samples of every spatial axis, `strides` apart, from the position `at`, counted in `spacing`."""
    begins = [place * gap for place, gap in zip(at, spacing, strict=True)]
    sides = zip(begins, extents, strides, strict=True)
    ends = [begin + (n - 1) * stride + 1 for begin, n, stride in sides]
    return jax.lax.slice(x, (0, 0, *begins), (*x.shape[:2], *ends), (1, 1, *strides))
