"""What a call of `step` or `evaluate` computes and on what: a loss or a step of the user's, and one batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from carpool.adapters.torch.build import Step
from carpool.adapters.torch.signature import callable_signature
from carpool.errors import DataError, LossError, sentence
from carpool.planning.spec import Signature


@dataclass(frozen=True)
class Objective:
    """A function of a model and a batch to {"loss": scalar}, what it does, and the batch's tensors."""

    function: Step
    signature: Signature
    leaves: tuple[Tensor, ...]
    nest: pytree.TreeSpec

    @property
    def shapes(self) -> Hashable:
        return str(self.nest), tuple((tuple(leaf.shape), leaf.dtype) for leaf in self.leaves)

    def batch(self, leaves: Sequence[Tensor]) -> Any:
        return pytree.tree_unflatten(list(leaves), self.nest)


def read_objective(arguments: Sequence[Any], step: Callable[..., Any] | None, device: str) -> Objective:
    """From `(loss, x, y)`, or from a batch and `step`, as the user gave them."""
    if step is not None:
        if not callable(step):
            raise LossError(
                sentence("step= to be a function of a model and a batch", repr(step), "pass a callable")
            )
        function, batch, signature = _whole(step), tuple(arguments), callable_signature("step=", step)
    else:
        if len(arguments) != 3 or not callable(arguments[0]):
            raise LossError(
                sentence(
                    "a loss, inputs and targets: (loss, x, y)",
                    ", ".join(type(argument).__name__ for argument in arguments) or "nothing",
                    "pass a loss first, or a batch and step=function(model, *batch)",
                )
            )
        loss, *rest = arguments
        function, batch, signature = _supervised(loss), tuple(rest), callable_signature("loss=", loss)
    leaves, nest = pytree.tree_flatten(batch)
    tensors = tuple(_tensor(leaf, device) for leaf in leaves)
    return Objective(function, signature, tensors, nest)


def called(model: Callable[..., Any], x: Any) -> Any:
    """A tuple or list is several arguments, a dict keywords, all else one argument."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple | list) else model(x)


def _supervised(loss: Callable[[Any, Any], Any]) -> Step:
    def run(model: nn.Module, batch: Any, place: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": _scalar(loss(called(model, x), y))}

    return run


def _whole(step: Callable[..., Any]) -> Step:
    def run(model: nn.Module, batch: Any, place: Any) -> dict[str, Tensor]:
        return {"loss": _scalar(step(model, *batch))}

    return run


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise LossError(sentence("a loss that is one number, as a tensor", shown, "reduce it, with .mean()"))
    return value.reshape(())


def _tensor(leaf: Any, device: str) -> Tensor:
    if isinstance(leaf, np.ndarray):
        leaf = torch.from_numpy(leaf)
    if not isinstance(leaf, Tensor):
        raise DataError(
            sentence(
                "tensors or NumPy arrays as a batch",
                type(leaf).__name__,
                "pass a number as a tensor: torch.tensor(0.5)",
            )
        )
    return leaf.detach().to(device)
