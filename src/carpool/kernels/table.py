"""Which of torch's functions are replaced inside a step: the one table of model-batched operators.

`STACKED` holds while a member's step is traced in a stack, `ALONE` while a job runs alone. Alone, torch's own kernels run,
except where random numbers inside them have to be keyed. A function in the tables is replaced by the mode `Keyed`;
`_UNSEEN` are torch's inner names that no mode sees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import _VF
from torch._C import _functorch as functorch  # type: ignore[attr-defined]
from torch.nn.modules import transformer

from carpool.kernels import (
    attention,
    checkpoint,
    convolve,
    foreach,
    linear,
    normalise,
    pool,
    random,
    recurrent,
)
from carpool.kernels.open import opened
from carpool.kernels.patch import patched
from carpool.kernels.random import Keyed

Operators = Mapping[Any, Callable[..., Any]]

ALONE: Operators = {
    _VF._weight_norm: normalise.weight_norm,  # torch's own CUDA kernel is off by 1e-9 in float64
    F.scaled_dot_product_attention: attention.with_dropout,
    F.multi_head_attention_forward: opened(F.multi_head_attention_forward),
    torch.lstm: recurrent.with_dropout(torch.lstm),
    torch.gru: recurrent.with_dropout(torch.gru),
    torch.rnn_tanh: recurrent.with_dropout(torch.rnn_tanh),
    torch.rnn_relu: recurrent.with_dropout(torch.rnn_relu),
    **foreach.SCALED,
}

STACKED: Operators = {
    F.scaled_dot_product_attention: attention.attend,
    F.multi_head_attention_forward: opened(F.multi_head_attention_forward),
    torch.lstm: recurrent.lstm,
    torch.gru: recurrent.gru,
    torch.rnn_tanh: recurrent.rnn_tanh,
    torch.rnn_relu: recurrent.rnn_relu,
    _VF._pack_padded_sequence: recurrent.pack,
    F.normalize: normalise.normalize,
    _VF._weight_norm: normalise.weight_norm,
    torch.linalg.householder_product: normalise.householder_product,
    F.conv2d: convolve.laid_out(F.conv2d),
    F.conv_transpose2d: convolve.laid_out(F.conv_transpose2d),
    **pool.MAX_POOLS,
    F.bilinear: linear.bilinear,
    F.embedding_bag: linear.embedding_bag,
    **foreach.EACH,
}

SINGLE: Operators = {
    **{function: operator for function, operator in STACKED.items() if function not in pool.MAX_POOLS},
    F.scaled_dot_product_attention: attention.by_formula,
}
"""For one member's step by itself, of which loops are made: nothing that has to fold members."""

COMPILED: Operators = {**pool.compiled_forms(), **random.compiled_forms()}
"""What the compiler is given in place of our own operators."""

_UNSEEN = ((transformer, {"_detect_is_causal_mask": attention.stated_causal}),)


@contextmanager
def alone(seed: Any, step: Any, phase: int = 0) -> Iterator[Keyed]:
    """A job's own step, or a phase of it: ordinary torch, with its random numbers keyed."""
    with Keyed(seed, step, operators=ALONE, phase=phase) as key, checkpoint.rekeyed(key):
        yield key


@contextmanager
def lent(seed: Any, step: Any, phase: int = 0) -> Iterator[Keyed]:
    """A job's own step on leaves that are lent to its module: a block computed again later would not find them."""
    with Keyed(seed, step, operators=ALONE, phase=phase) as key, checkpoint.inlined():
        yield key


@contextmanager
def stacked(seed: Any, step: Any, phase: int = 0, innermost: bool = False) -> Iterator[Keyed]:
    """A member's step inside a stack, or a phase of it. `seed` and `step` are the member's own, batched by vmap."""
    with (
        Keyed(seed, step, operators=STACKED, phase=phase) as key,
        checkpoint.inlined(),
        convolve.innermost(innermost),
    ):
        for module, names in _UNSEEN:
            with patched(module, **names):
                yield key


@contextmanager
def single(seed: Any, step: Any) -> Iterator[Keyed]:
    """A member's step, traced by itself in the arithmetic that it has inside a stack."""
    with Keyed(seed, step, operators=SINGLE) as key, checkpoint.inlined():
        for module, names in _UNSEEN:
            with patched(module, **names):
                yield key


@contextmanager
def batched_or_refused() -> Iterator[None]:
    """Torch's fallback for an operator without a batching rule is off inside: it would run member by member.

    It is off for the whole process, until the last thread is through.
    """
    with _changing:
        _inside.append(_inside[0] if _inside else functorch._is_vmap_fallback_enabled())
        functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        with _changing:
            before = _inside.pop()
            if not _inside:
                functorch._set_vmap_fallback_enabled(before)


_changing = threading.Lock()
_inside: list[bool] = []
"""For each who is inside, whether the fallback was on before the first."""
