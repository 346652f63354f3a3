"""Activation checkpointing inside a keyed step.

In a stack a checkpointed block runs as an ordinary one: computing it twice changes no number. Alone it is computed twice,
as the user asked, the second time with the random numbers of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint

from carpool.kernels.patch import patched
from carpool.kernels.random import Keyed
from carpool.kernels.refusal import Unstackable

# Bound before anything is patched, so that an inner block does not wrap an outer one's wrapper.
_twice = checkpoint._checkpoint_without_reentrant_generator
_Reentrant = checkpoint.CheckpointFunction


@contextmanager
def inlined() -> Iterator[None]:
    """Checkpointed blocks run as ordinary ones inside; the reentrant kind is refused."""
    with patched(
        checkpoint, _checkpoint_without_reentrant_generator=_once, CheckpointFunction=_ReentrantRefused
    ):
        yield


@contextmanager
def rekeyed(key: Keyed) -> Iterator[None]:
    """A block that is checkpointed inside draws, when it is computed again, what it drew before."""

    def generator(function: Callable[..., Any], *rest: Any, **options: Any) -> Any:
        return _twice(_again(key, function), *rest, **options)

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], *rest: Any) -> Any:
            return _Reentrant.apply(_first_then_again(key, function), *rest)

    with patched(checkpoint, _checkpoint_without_reentrant_generator=generator, CheckpointFunction=Reentrant):
        yield


def _once(function: Any, preserve: Any, context_fn: Any, *_: Any, **__: Any) -> Iterator[None]:
    if context_fn is not checkpoint.noop_context_fn:
        raise Unstackable("torch.utils.checkpoint with a context_fn has no form in a stack")
    yield


class _ReentrantRefused:
    @staticmethod
    def apply(*_: Any) -> Any:
        raise Unstackable(
            "torch.utils.checkpoint with use_reentrant=True has no form in a stack; use_reentrant=False has"
        )


def _again(key: Keyed, function: Callable[..., Any]) -> Callable[..., Any]:
    """The block, drawing from the call at which it stands now."""
    call = key.call

    def run(*args: Any, **kwargs: Any) -> Any:
        with key.rewound(call), rekeyed(key):
            return function(*args, **kwargs)

    return run


def _first_then_again(key: Keyed, function: Callable[..., Any]) -> Callable[..., Any]:
    again, ran = _again(key, function), False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal ran
        first, ran = not ran, True
        return function(*args, **kwargs) if first else again(*args, **kwargs)

    return run
