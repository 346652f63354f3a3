"""What Keras does on the host inside a step, done on the device: random numbers, and branches that hang on a tensor.

Keras seeds a torch generator from a number that it reads back from the device. Inside a step its random operations draw nothing of
their own: the mode of `carpool.kernels.random` sees them, and keys them by job, step and call. A SeedGenerator's state is stepped
once for each draw, so that one with a seed stands where Keras would have left it; what it holds decides nothing.

A branch on a tensor runs both ways, each on copies of the variables, and the tensor chooses between the two.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from keras.src import tree
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.torch import core as keras_core
from keras.src.backend.torch import nn as keras_nn
from keras.src.backend.torch import random as keras_random
from keras.src.random.seed_generator import SeedGenerator
from torch._C import _functorch as functorch  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from carpool.kernels.patch import patched

keras_rnn = importlib.import_module("keras.src.backend.torch.rnn")  # the package has a function of this name
_keras_dropout = keras_random.dropout
_convert_to_numpy = keras_core.convert_to_numpy


@contextmanager
def on_the_device() -> Iterator[None]:
    """Inside, a step of Keras needs no value on the host."""
    with (
        patched(keras_random, torch_seed_generator=_no_generator, dropout=_dropout),
        patched(keras_core, cond=_either, convert_to_numpy=_as_it_is),
        patched(
            keras_rnn, cudnn_ok=lambda *_, **__: False
        ),  # cuDNN's recurrences are neither traced nor batched
    ):
        yield


@contextmanager
def batchable() -> Iterator[None]:
    """Inside, Keras does nothing that vmap has no form for, where there is another way."""
    with patched(keras_nn, _get_channels_last_memory_format=lambda ndim: None), _Rebound():
        yield


class _Rebound(TorchFunctionMode):
    """`a += b` with one number `a` for all members and a `b` of each, as schedules have it, is a new `a`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OUT_OF_PLACE and _is_one_for_all(*args[:2]):
            return _OUT_OF_PLACE[func](*args)
        return func(*args, **(kwargs or {}))


_OUT_OF_PLACE = {
    torch.Tensor.add_: torch.add,
    torch.Tensor.sub_: torch.sub,
    torch.Tensor.mul_: torch.mul,
}


def _is_one_for_all(first: torch.Tensor, second: Any) -> bool:
    if not isinstance(second, torch.Tensor) or not functorch.is_batchedtensor(second):
        return False
    return first.dim() == 0 and not functorch.is_batchedtensor(first)


def _as_it_is(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) else _convert_to_numpy(value)


def _dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
    """Keras takes another way where a layer was given no seed: here all take one, so that what a seed is changes nothing else."""
    return _keras_dropout(inputs, rate, tuple(inputs.shape) if noise_shape is None else noise_shape, seed)


def _no_generator(seed: Any) -> None:
    if isinstance(seed, SeedGenerator):
        seed.next()


def _either(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
    scope = get_stateless_scope()
    known = pred.constant if isinstance(pred, FakeTensor) else pred
    if scope is None or (known is not None and not _is_traced(known)):
        return true_fn() if known else false_fn()
    pred = pred.bool()
    before = dict(scope.state_mapping)
    ends = []
    for branch in (true_fn, false_fn):
        scope.state_mapping = {key: value.clone() for key, value in before.items()}
        ends.append((branch(), scope.state_mapping))
    (made, then), (other, otherwise) = ends
    scope.state_mapping = {
        key: _written(value, _chosen(pred, then.get(key, value), otherwise.get(key, value)))
        for key, value in before.items()
    }
    return _chosen(pred, made, other)


def _written(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The same tensor with another value, where it can hold that of each member: who has it in hand, as a weight decay has while it asks
    for its rate, goes on to write into it.
    """
    if functorch.is_batchedtensor(value) and not functorch.is_batchedtensor(tensor):
        return value
    return tensor.copy_(value)


def _is_traced(value: Any) -> bool:
    """Whether its number is not there to be looked at."""
    return isinstance(value, FakeTensor) or (
        isinstance(value, torch.Tensor) and functorch.is_functorch_wrapped_tensor(value)
    )


def _chosen(pred: torch.Tensor, made: Any, other: Any) -> Any:
    if made is None or other is None:
        return None

    def choose(one: Any, two: Any) -> torch.Tensor:
        one, two = keras_core.convert_to_tensor(one), keras_core.convert_to_tensor(two)
        return torch.where(pred, one, two)

    return tree.map_structure(choose, made, other)
