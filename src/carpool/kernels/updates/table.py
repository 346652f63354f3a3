"""Which optimizers update a stack, and how another one joins them."""

from __future__ import annotations

from typing import Any

import torch

from carpool.errors import OptionError, sentence, shown
from carpool.kernels.updates.adadelta import Adadelta
from carpool.kernels.updates.adagrad import Adagrad
from carpool.kernels.updates.adam import Adam
from carpool.kernels.updates.adamax import Adamax
from carpool.kernels.updates.nadam import NAdam
from carpool.kernels.updates.radam import RAdam
from carpool.kernels.updates.rmsprop import RmsProp
from carpool.kernels.updates.sgd import Sgd
from carpool.kernels.updates.update import Update

UPDATES: dict[type[torch.optim.Optimizer], Update] = {
    torch.optim.SGD: Sgd(),
    torch.optim.Adam: Adam(decoupled=False),
    torch.optim.AdamW: Adam(decoupled=True),
    torch.optim.NAdam: NAdam(),
    torch.optim.RAdam: RAdam(),
    torch.optim.Adamax: Adamax(),
    torch.optim.RMSprop: RmsProp(),
    torch.optim.Adagrad: Adagrad(),
    torch.optim.Adadelta: Adadelta(),
}

_WHOLE_MATRICES = "a step depends on a weight matrix as a whole, and a stack is updated element by element"
UNFUSED: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "a step evaluates the loss as often as it needs to, each member differently",
    torch.optim.SparseAdam: "it is for sparse gradients, and a stack's gradients are dense",
    torch.optim.Muon: _WHOLE_MATRICES,
    torch.optim.Adafactor: _WHOLE_MATRICES,
    torch.optim.ASGD: "none is written yet",
    torch.optim.Rprop: "none is written yet",
}
"""Torch's own optimizers without a stacked update, and why."""


def register(optimizer: type[torch.optim.Optimizer], update: Update) -> None:
    """Says how an optimizer of your own or of a library updates a stack, so that jobs which use it are fused.

    It holds for this class and not for classes derived from it, until the process ends. Before a fused run counts,
    its first step is compared with the real optimizer's: weights, slots and the names of the slots.

    >>> class Plain(torch.optim.Optimizer):
    ...     def __init__(self, params, lr=0.1):
    ...         super().__init__(params, {"lr": lr})
    ...     @torch.no_grad()
    ...     def step(self, closure=None):
    ...         for group in self.param_groups:
    ...             for parameter in group["params"]:
    ...                 parameter.sub_(group["lr"] * parameter.grad)
    >>> class PlainUpdate(Update):
    ...     hypers = ("lr",)
    ...     def apply(self, weight, grad, slots, columns, options):
    ...         return [weight - columns[0] * grad]
    >>> register(Plain, PlainUpdate())
    """
    known: Any = optimizer  # a caller without a type checker may pass anything
    if not isinstance(known, type) or not issubclass(known, torch.optim.Optimizer):
        received = known.__name__ if isinstance(known, type) else f"{type(known).__name__} object"
        raise OptionError(
            sentence(
                "a class derived from torch.optim.Optimizer", received, "pass the optimizer's class itself"
            )
        )
    if not isinstance(update, Update):
        raise OptionError(
            sentence("an instance of carpool.kernels.updates.Update", shown(update), "derive one and make it")
        )
    hypers = getattr(update, "hypers", ())
    if (
        not isinstance(hypers, tuple | list)
        or not hypers
        or not all(isinstance(name, str) for name in hypers)
    ):
        received = f"hypers = {shown(hypers)}" if hypers else "no hypers"
        raise OptionError(
            sentence(
                "an update that names its hyper-parameters",
                f"{type(update).__name__} with {received}",
                'set them, for example hypers = ("lr",)',
            )
        )
    if optimizer in UPDATES:
        raise OptionError(
            sentence(
                "an optimizer that has no update yet",
                f"{optimizer.__name__}, which {type(UPDATES[optimizer]).__name__} updates",
                "derive a class from the optimizer and register that",
            )
        )
    UPDATES[optimizer] = update
