"""Compiled programs: made in threads and kept for the process. What JAX keeps on disk for the next one is its user's to say."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

import jax

from carpool.adapters import xla
from carpool.environment import cores
from carpool.memory.maps import thin

_KEPT = 64  # a structure's take some 12 MB: 60 structures took 600 MB on a CPU
_programs: OrderedDict[Hashable, Future[Any]] = OrderedDict()
_turns = threading.BoundedSemaphore(max(1, cores()))


def program(
    key: Hashable, make: Callable[[], Callable[..., Any]], inputs: tuple[Any, ...], donated: bool
) -> Future[Any]:
    """The compiled program under this key, for inputs of these shapes: kept, or made in a thread from now on."""
    whole = (key, donated, _shapes(inputs))
    if whole not in _programs:
        _programs[whole] = _begun(make(), inputs, donated)
        thin(_programs, _KEPT)
    _programs.move_to_end(whole)
    return _programs[whole]


def _begun(function: Callable[..., Any], inputs: tuple[Any, ...], donated: bool) -> Future[Any]:
    """A program of lists of arrays: it compares nothing else that the user's nests hold."""
    tree = jax.tree.structure(inputs)
    made: list[Any] = []

    def flat(*lists: list[Any]) -> list[Any]:
        given = jax.tree.unflatten(tree, [leaf for leaves in lists for leaf in leaves])
        leaves, out_tree = jax.tree.flatten(function(*given))
        made.append(out_tree)
        return leaves

    lowered = jax.jit(flat, donate_argnums=(0,) if donated else ()).lower(*map(jax.tree.leaves, inputs))
    device = _device(inputs)
    return _soon(lambda: _nested(_compiled(lowered, device), made[-1]))


def _soon(work: Callable[[], Any]) -> Future[Any]:
    """The work done in a thread that ends with it: a pool's threads would outlive every run."""
    future: Future[Any] = Future()

    def run() -> None:
        with _turns:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=run, name="carpool-compile").start()
    return future


def _nested(compiled: Any, out_tree: Any) -> Callable[..., Any]:
    return lambda *inputs: jax.tree.unflatten(out_tree, compiled(*map(jax.tree.leaves, inputs)))


def forget() -> None:
    """As in a new process."""
    _programs.clear()


def _shapes(inputs: Any) -> Hashable:
    leaves, tree = jax.tree.flatten(inputs)
    return tree, tuple((leaf.shape, str(leaf.dtype), _place(leaf)) for leaf in leaves)


def _place(leaf: Any) -> Hashable:
    return leaf.sharding if isinstance(leaf, jax.Array) else None


compiled: list[str] = []
"""For what platforms programs were asked of JAX in this process, in turn."""


def _device(inputs: Any) -> Any:
    """Where a program of these inputs runs."""
    placed = (leaf for leaf in jax.tree.leaves(inputs) if isinstance(leaf, jax.Array))
    return next((next(iter(leaf.devices())) for leaf in placed), jax.devices()[0])


def _compiled(lowered: Any, device: Any) -> Any:
    made = xla.compiled(lowered, device.platform)
    compiled.append(device.platform)
    return made
