"""The optimizer of a population's members: an optax optimizer, or a function that makes a member's of its hyper-parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import optax

from carpool.adapters.jax.optimizer import is_optimizer
from carpool.errors import OptimizerError, described, sentence


class Rule:
    """How a member's parameters change. Its hyper-parameters are numbers of a trace: what it keeps cannot depend on their values."""

    def __init__(self, optimizer: Any, names: Iterable[str]) -> None:
        self.optimizer = optimizer
        if not is_optimizer(optimizer) and not callable(optimizer):
            expected = "an optax optimizer, or a function of hyper-parameters that makes one"
            remedy = "pass optimizer=lambda lr: optax.adam(lr)"
            raise OptimizerError(sentence(expected, type(optimizer).__name__, remedy))
        _check(_words(optimizer), list(names))

    def begun(self, hyper: Mapping[str, Any], trained: Any) -> Any:
        with _fixed():
            return self._made(hyper).init(trained)

    def updated(self, hyper: Mapping[str, Any], gradients: Any, state: Any, trained: Any) -> tuple[Any, Any]:
        """The parameters and the optimizer's state afterwards."""
        with _fixed():
            updates, state = self._made(hyper).update(gradients, state, trained)
            return optax.apply_updates(trained, updates), state

    def _made(self, hyper: Mapping[str, Any]) -> Any:
        if is_optimizer(self.optimizer):
            return self.optimizer
        made = self.optimizer(**hyper)
        if is_optimizer(made):
            return made
        expected = "the optimizer function to return an optax optimizer"
        raise OptimizerError(sentence(expected, type(made).__name__, "return optax.adam(lr), say"))


@contextmanager
def _fixed() -> Iterator[None]:
    try:
        yield
    except jax.errors.JAXTypeError as error:
        expected = "an optimizer whose structure does not depend on the values of hyper-parameters"
        received = described(error)[:200]
        remedy = "use jnp.where instead of if, or write that number into the optimizer function"
        raise OptimizerError(sentence(expected, received, remedy)) from error


def _words(optimizer: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The hyper-parameters that the optimizer function takes."""
    return {} if is_optimizer(optimizer) else inspect.signature(optimizer).parameters


def _check(words: Mapping[str, inspect.Parameter], names: list[str]) -> None:
    takes_any = any(word.kind is word.VAR_KEYWORD for word in words.values())
    for name in names:
        if name not in words and not takes_any:
            expected = f"hyper-parameters out of {', '.join(words)}" if words else "no hyper-parameters"
            remedy = "pass an optimizer function with that argument, as lambda lr: optax.adam(lr)"
            raise OptimizerError(sentence(expected, repr(name), remedy))
    for name, word in words.items():
        is_one = word.kind not in (word.VAR_KEYWORD, word.VAR_POSITIONAL)
        if is_one and word.default is word.empty and name not in names:
            remedy = "pass one number, or one for each member"
            raise OptimizerError(sentence(f"{name} in hyper=", ", ".join(names) or "none", remedy))
