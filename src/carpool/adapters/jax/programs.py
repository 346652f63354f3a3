"""Compiled programs: made in threads, kept for the process, and on disk for the next one."""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from carpool import recall
from carpool.adapters import xla
from carpool.environment import cores
from carpool.memory.maps import thin

_KEPT = 256
_MOST_BYTES = 512 << 20  # of programs on disk, the last used
_programs: OrderedDict[Hashable, Future[Any]] = OrderedDict()
_turns = threading.BoundedSemaphore(max(1, cores()))


def program(
    key: Hashable, make: Callable[[], Callable[..., Any]], inputs: tuple[Any, ...], donated: bool
) -> Future[Any]:
    """The compiled program under this key, for inputs of these shapes: kept, read from disk, or made in a thread from now on."""
    whole = (key, donated, _shapes(inputs))
    if whole not in _programs:
        _programs[whole] = _begun(make(), inputs, donated)
        thin(_programs, _KEPT)
    _programs.move_to_end(whole)
    return _programs[whole]


def _begun(function: Callable[..., Any], inputs: tuple[Any, ...], donated: bool) -> Future[Any]:
    """A program of lists of arrays: what is on disk then fits any nests that hold such arrays, and pickles no nest of the user's."""
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
    """As in a new process: what is on disk stays."""
    _programs.clear()


def _shapes(inputs: Any) -> Hashable:
    leaves, tree = jax.tree.flatten(inputs)
    return tree, tuple((leaf.shape, str(leaf.dtype), _place(leaf)) for leaf in leaves)


def _place(leaf: Any) -> Hashable:
    return leaf.sharding if isinstance(leaf, jax.Array) else None


compiled: list[str] = []
"""What was really compiled in this process, by the digest of its text: what is read from disk is not here."""


def _device(inputs: Any) -> Any:
    """Where a program of these inputs runs."""
    placed = (leaf for leaf in jax.tree.leaves(inputs) if isinstance(leaf, jax.Array))
    return next((next(iter(leaf.devices())) for leaf in placed), jax.devices()[0])


def _compiled(lowered: Any, device: Any) -> Any:
    name = _digest(lowered, device)
    try:
        return _read(name)
    except Exception:  # not there, or of another version: nothing depends on it but time
        pass
    made = xla.compiled(lowered, device.platform)
    compiled.append(name)
    _write(name, made)
    return made


def _digest(lowered: Any, device: Any) -> str:
    """What names a program on disk: all that it does, and all that compiles it."""
    place = (
        device.platform,
        device.id,
        device.device_kind,
        _instructions() if device.platform == "cpu" else "",
    )
    versions = (jax.__version__, device.client.platform_version, place)
    flags = (os.environ.get("XLA_FLAGS", ""), tuple(xla.options(device.platform).items()))
    text = lowered.as_text()
    described = repr((versions, flags, str(lowered.in_tree), text))
    return hashlib.blake2b(described.encode(), digest_size=20).hexdigest()


@cache
def _instructions() -> str:
    """What this processor can do: a folder may be shared by machines, and a program made for one may stop another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _folder() -> Any:
    return recall.folder() / "programs"


def _read(name: str) -> Any:
    path = _folder() / name
    made = serialize_executable.deserialize_and_load(*pickle.loads(path.read_bytes()))
    os.utime(path)
    return made


def _write(name: str, made: Any) -> None:
    try:
        data = pickle.dumps(serialize_executable.serialize(made))
        _folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=_folder(), delete=False) as file:
            file.write(data)
        os.replace(file.name, _folder() / name)
        _trim()
    except Exception:  # a program that cannot be written is compiled again
        return


def _trim() -> None:
    """The programs used longest ago go, where all of them take too much."""
    held = sorted(_folder().iterdir(), key=lambda path: -path.stat().st_mtime)
    total = 0
    for path in held:
        total += path.stat().st_size
        if total > _MOST_BYTES:
            path.unlink(missing_ok=True)
