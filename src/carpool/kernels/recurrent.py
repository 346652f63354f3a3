"""Recurrent nets in a stack: all time steps' inputs projected in one product, then the recurrence unrolled.

`lstm`, `gru`, `rnn_tanh` and `rnn_relu` take what torch's functions of these names take. Weights come layer by layer,
direction by direction, as in `nn.RNNBase._flat_weights`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch as functorch  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor

from carpool.kernels.refusal import Unstackable

State = tuple[Tensor, ...]


class Weights(NamedTuple):
    """One layer in one direction."""

    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None
    hidden_bias: Tensor | None
    projection: Tensor | None


class Cell(NamedTuple):
    """A kind of recurrent net: one step from a projected input and a state to the next state.

    `separate` says that the hidden bias belongs to the step, not to the projected input.
    """

    step: Callable[[Tensor, State, Weights], State]
    separate: bool = False


def _lstm_step(x: Tensor, state: State, weights: Weights) -> State:
    hidden, cell = state
    into, forget, new, out = (x + hidden @ weights.hidden.t()).chunk(4, -1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(into) * torch.tanh(new)
    hidden = torch.sigmoid(out) * torch.tanh(cell)
    return (hidden if weights.projection is None else hidden @ weights.projection.t()), cell


def _gru_step(x: Tensor, state: State, weights: Weights) -> State:
    (hidden,) = state
    x_reset, x_update, x_new = x.chunk(3, -1)
    reset, update, new = F.linear(hidden, weights.hidden, weights.hidden_bias).chunk(3, -1)
    new = torch.tanh(x_new + torch.sigmoid(x_reset + reset) * new)
    return ((hidden - new) * torch.sigmoid(x_update + update) + new,)


def _plain_step(activation: Callable[[Tensor], Tensor], x: Tensor, state: State, weights: Weights) -> State:
    return (activation(x + state[0] @ weights.hidden.t()),)


_LSTM = Cell(_lstm_step)
_GRU = Cell(_gru_step, separate=True)
_TANH = Cell(partial(_plain_step, torch.tanh))
_RELU = Cell(partial(_plain_step, torch.relu))


def lstm(input: Tensor, hx: Any, *rest: Any) -> tuple[Tensor, ...]:
    _refuse_packed(input, rest)
    return _layers(_LSTM, input, tuple(hx), *rest)


def gru(input: Tensor, hx: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _refuse_packed(input, rest)
    return _layers(_GRU, input, (hx,), *rest)


def rnn_tanh(input: Tensor, hx: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _refuse_packed(input, rest)
    return _layers(_TANH, input, (hx,), *rest)


def rnn_relu(input: Tensor, hx: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _refuse_packed(input, rest)
    return _layers(_RELU, input, (hx,), *rest)


def with_dropout(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Alone: torch's own kernel layer by layer, with keyed dropout between, where torch would draw numbers inside it."""

    def decide(input: Tensor, hx: Any, *rest: Any) -> Any:
        if not isinstance(rest[1], bool):
            return NotImplemented  # packed: it is never stacked, so it need not be keyed
        weights, has_biases, num_layers, dropout, train, bidirectional, batch_first = rest
        if dropout == 0 or not train or num_layers == 1:
            return NotImplemented
        ways, size = 2 if bidirectional else 1, len(weights) // num_layers
        x = input.transpose(0, 1) if batch_first else input
        ends = []
        for layer in range(num_layers):
            part = slice(layer * ways, (layer + 1) * ways)
            start = hx[part] if isinstance(hx, Tensor) else [h[part] for h in hx]
            own = weights[layer * size : (layer + 1) * size]
            with warnings.catch_warnings():  # cuDNN would rather have all layers in one piece of memory
                warnings.filterwarnings("ignore", "RNN module weights")
                x, *end = kernel(x, start, own, has_biases, 1, 0.0, train, bidirectional, False)
            ends.append(end)
            x = F.dropout(x, dropout, True) if layer < num_layers - 1 else x
        last = (torch.cat(parts) for parts in zip(*ends, strict=True))
        return (x.transpose(0, 1) if batch_first else x, *last)

    return decide


def pack(*_: Any, **__: Any) -> Any:
    raise Unstackable("packed sequences (pack_padded_sequence) have no form in a stack; pad and mask instead")


def _refuse_packed(input: Tensor, rest: Sequence[Any]) -> None:
    if not isinstance(rest[1], bool):  # torch's packed form has the batch sizes in second place
        pack()


def _layers(
    cell: Cell,
    input: Tensor,
    starts: State,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    ways = 2 if bidirectional else 1
    own = _by_layer(weights, has_biases, num_layers * ways)
    x = input.transpose(0, 1) if batch_first else input
    ends: list[State] = []
    for layer in range(num_layers):
        made = []
        for way in range(ways):
            place = layer * ways + way
            outputs, end = _run(cell, x, tuple(s[place] for s in starts), own[place], backwards=way == 1)
            made.append(outputs)
            ends.append(end)
        x = torch.cat(made, -1) if bidirectional else made[0]
        if dropout > 0 and train and layer < num_layers - 1:
            x = F.dropout(x, dropout, True)
    last = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
    return (x.transpose(0, 1) if batch_first else x, *last)


def _run(cell: Cell, x: Tensor, state: State, weights: Weights, backwards: bool) -> tuple[Tensor, State]:
    """One layer in one direction: the outputs in the order of the inputs, and the last state."""
    bias = weights.input_bias
    if bias is not None and weights.hidden_bias is not None and not cell.separate:
        bias = bias + weights.hidden_bias
    inputs = F.linear(x, weights.input, bias).unbind(0)
    outputs: list[Tensor] = []
    for step in reversed(inputs) if backwards else inputs:
        state = cell.step(step, state, weights)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _by_layer(weights: Sequence[Tensor], has_biases: bool, count: int) -> list[Weights]:
    size = len(weights) // count
    parts = [list(weights[start : start + size]) for start in range(0, len(weights), size)]
    made = []
    for part in parts:
        projection = part.pop() if size == (5 if has_biases else 3) else None
        input_bias, hidden_bias = part[2:] or (None, None)
        made.append(Weights(part[0], part[1], input_bias, hidden_bias, projection))
    return made


@contextmanager
def lent(model: nn.Module) -> Iterator[None]:
    """Lets recurrent modules run on other tensors than their own, and puts back what they remember of their own.

    A recurrent module keeps a list of its weights and lays them out for cuDNN whenever they are other tensors; a tensor
    of a trace has no memory to lay out.
    """
    modules = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    before = [(module, module._flat_weights, module._flat_weight_refs) for module in modules]
    for module in modules:
        module.__dict__["flatten_parameters"] = partial(_flatten_real, module)
    try:
        yield
    finally:
        for module, weights, references in before:
            del module.__dict__["flatten_parameters"]
            module._flat_weights, module._flat_weight_refs = weights, references


def _flatten_real(module: nn.RNNBase) -> None:
    if not any(isinstance(w, Tensor) and _is_traced(w) for w in module._flat_weights):
        type(module).flatten_parameters(module)


def _is_traced(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or functorch.is_functorch_wrapped_tensor(tensor)
