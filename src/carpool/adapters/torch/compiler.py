"""Compiles a traced step with Inductor: here and now, or first in a process of its own, while the step runs uncompiled.

Inductor keeps what it compiled on disk. So the process compiles for that cache alone, and compiling here afterwards takes a moment. In a thread
the compiler, which is Python, would hold the lock that the training loop needs; and a process can be stopped when nobody needs it any more.
"""

from __future__ import annotations

import getpass
import hashlib
import math
import os
import pickle
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import IO

import torch
from torch import Tensor
from torch.fx import GraphModule

from carpool import cache
from carpool.adapters.torch import precision, products
from carpool.adapters.torch.numbers import inline_numbers
from carpool.environment import cores
from carpool.errors import described
from carpool.kernels.table import COMPILED
from carpool.private import fault, make_folder
from carpool.process.child import Child

_VERSION = (
    5  # of what is done to a trace before it is compiled: what was marked by another one is compiled anew
)


# Inputs have the shapes that the step was compiled for, and its first step is compared with members alone: looking at every tensor of every
# step again took 4 to 13 of the 115 us of eight small MLPs on a CPU.
_OPTIONS = {"size_asserts": False}


@dataclass(frozen=True)
class Shape:
    """What Inductor asks of an input."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class Request:
    """A step, its inputs, and the global settings that are baked into what is compiled."""

    traced: bytes
    shapes: tuple[Shape, ...]
    threads: int
    precision: tuple[str, ...]
    deterministic: bool
    default_dtype: torch.dtype


def request(traced: GraphModule, inputs: Sequence[Tensor]) -> Request:
    shapes = tuple(Shape(tuple(t.shape), t.stride(), t.dtype, str(t.device)) for t in inputs)
    return Request(
        pickle.dumps(traced),
        shapes,
        torch.get_num_threads(),
        precision.settings(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
    )


def compiled(asked: Request) -> Callable[..., None]:
    """The step, compiled; nothing is run. The trace stays as it is."""
    _check_folder()
    import torch._dynamo  # a trace is read with parts of it, which torch loads late
    from torch._inductor import compile as inductor
    from torch._inductor import config
    from torch._inductor.decomposition import decompositions, select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    own: GraphModule = pickle.loads(
        asked.traced
    )  # as the other process has it too, or the cache would not know it
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True):  # without a ShapeEnv nothing is cached
        inputs = [
            torch.empty_strided(one.size, one.stride, dtype=one.dtype, device=one.device)
            for one in asked.shapes
        ]
    inline_numbers(own, inputs)
    # The second is a copy of the first, as that was when somebody first asked for it.
    for table in (decompositions, select_decomp_table()):
        table.update(COMPILED)
    with torch.no_grad(), products.by_template(), config.patch(_OPTIONS):
        return inductor(own, inputs)  # type: ignore[return-value]


def is_begun() -> bool:
    """Whether something was compiled on this machine before: the first time takes longer."""
    return _inductor_folder().exists()


def is_cached(asked: Request) -> bool:
    """Whether it was compiled on this machine before, and Inductor's cache is still there."""
    return cache.read(_mark(asked)) is not None and _inductor_folder().exists()


def mark(asked: Request) -> None:
    """Notes that it was compiled."""
    cache.keep(_mark(asked), b"")


def _mark(asked: Request) -> str:
    versions = (torch.__version__, _VERSION, products.VERSION)
    parts = (*versions, str(_inductor_folder()), replace(asked, traced=b""))
    digest = hashlib.sha256(asked.traced + repr(parts).encode()).hexdigest()
    return f"compiled/{digest}"


def _inductor_folder() -> Path:
    if own := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(own)
    return Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"


def _user() -> str:
    """As torch calls the user in that folder's name."""
    try:
        return re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # a number without a name, as in many containers
        return f"uid_{os.getuid()}"


def _check_folder() -> None:
    """Inductor runs and unpickles what it finds in its cache: raises RuntimeError where that is another user's."""
    make_folder(_inductor_folder())
    if wrong := fault(_inductor_folder(), stat.S_IWOTH):
        raise RuntimeError(f"{_inductor_folder()} is not used: {wrong}; set TORCHINDUCTOR_CACHE_DIR")


class Cached:
    """A step that was compiled before: there is nothing to wait for."""

    is_over = False
    spent_s = 0.0

    def poll(self) -> int | None:
        return 0

    def wait(self) -> int | None:
        return 0

    def told(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing is held."""


_CORES_EACH = 4  # Inductor compiles a step's kernels side by side
_LOOK_EVERY_S = 0.5  # at what a process that is waited for has spent
_NICE = 10  # training comes first
_running: list[Background] = []


class Background:
    """A step being compiled in a process of its own, as soon as there are cores for it; stopped when it spends too much.

    `budget_s` are processor seconds. They are kept on a CPU alone: beside a GPU the host's cores have little else to do.
    """

    def __init__(self, asked: Request, budget_s: float = math.inf) -> None:
        self._child: Child | None = None
        self._fault: str | None = None
        self._budget_s = budget_s
        self.spent_s = 0.0
        """The processor time that it has taken, when somebody last looked."""
        self._files = ExitStack()
        try:  # without names: another user cannot write into them, and nothing stays where we are killed
            self._request = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            self._said = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            self._request.write(pickle.dumps(asked))
            self._request.seek(0)
        except OSError as error:
            self._fault = described(error)
        if _has_room():
            self._begin()

    @property
    def is_over(self) -> bool:
        """Whether it has spent more than it may."""
        return self.spent_s > self._budget_s

    def poll(self) -> int | None:
        """Its exit code, 0 for compiled; None while it goes on, or waits for others."""
        if self._child is None and _has_room():
            self._begin()
        if self._fault is not None:
            return 1
        if self._child is None:
            return None
        self.spent_s = max(self.spent_s, self._child.processor_s())
        return self._child.poll()

    def wait(self) -> int | None:
        """The exit code; None when it has spent too much."""
        self._begin()
        while (code := self.poll()) is None and not self.is_over:
            assert self._child is not None, "it has begun"
            self._child.wait(_LOOK_EVERY_S)
        return code

    def told(self) -> str:
        """The last line of what it said."""
        if self._fault is not None:
            return self._fault
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.poll()}"

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
        self._files.close()

    def _begin(self) -> None:
        """Starts the process, once; where that fails, it has ended."""
        if self._child is not None or self._fault is not None:
            return
        try:
            self._child = Child(
                [sys.executable, "-m", __name__],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=self._request,
                stdout=self._said,
                stderr=self._said,
            )
        except OSError as error:
            self._fault = described(error)
            return
        _running.append(self)


def _has_room() -> bool:
    """Whether one more may compile. Those that are through make room, whether or not anybody asked them."""
    _running[:] = [one for one in _running if one._child is not None and one._child.poll() is None]
    return len(_running) < max(1, cores() // _CORES_EACH)


def _work(file: IO[bytes]) -> None:
    os.nice(_NICE)
    asked: Request = pickle.load(file)
    torch.set_num_threads(asked.threads)
    torch.set_default_dtype(asked.default_dtype)
    torch.use_deterministic_algorithms(asked.deterministic)
    for place, word in zip(precision.PLACES, asked.precision, strict=True):
        attrgetter(place)(torch.backends).fp32_precision = word
    compiled(asked)


if __name__ == "__main__":
    import carpool.adapters.torch.train  # noqa: F401  # which registers our own operators

    _work(sys.stdin.buffer)
