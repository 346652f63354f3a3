"""Compiles a traced step with Inductor: here and now, or first in a process of its own, while the step runs uncompiled.

Inductor keeps what it compiled on disk. So the process compiles for that cache alone, and compiling here afterwards takes a moment. In a thread
the compiler, which is Python, would hold the lock that the training loop needs; and a process can be stopped when nobody needs it any more.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule

from carpool import recall
from carpool.adapters.torch import precision, products
from carpool.adapters.torch.numbers import inline_numbers
from carpool.environment import cores
from carpool.kernels.table import COMPILED
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


def is_cached(asked: Request) -> bool:
    """Whether it was compiled on this machine before, and Inductor's cache is still there."""
    return _mark(asked).exists() and _inductor_folder().exists()


def mark(asked: Request) -> None:
    """Notes that it was compiled."""
    with suppress(OSError):
        _mark(asked).parent.mkdir(parents=True, exist_ok=True)
        _mark(asked).touch()


def _mark(asked: Request) -> Path:
    versions = (torch.__version__, _VERSION, products.VERSION)
    parts = (*versions, str(_inductor_folder()), replace(asked, traced=b""))
    digest = hashlib.sha256(asked.traced + repr(parts).encode()).hexdigest()
    return recall.folder() / "compiled" / digest


def _inductor_folder() -> Path:
    if own := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(own)
    return Path(tempfile.gettempdir()) / f"torchinductor_{re.sub(r'[^0-9A-Za-z_.-]', '_', getpass.getuser())}"


class Cached:
    """A step that was compiled before: there is nothing to wait for."""

    def poll(self) -> int | None:
        return 0

    def wait(self) -> int | None:
        return 0

    def told(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing is held."""


_CORES_EACH = 4  # Inductor compiles a step's kernels side by side
_running: list[Background] = []


class Background:
    """A step being compiled in a process of its own, as soon as there are cores for it."""

    def __init__(self, asked: Request) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="carpool-compile-")
        self._request = Path(self._folder.name) / "request"
        self._request.write_bytes(pickle.dumps(asked))
        self._said = (Path(self._folder.name) / "said").open("w+b")
        self._child: Child | None = None
        if _has_room():
            self._begin()

    def poll(self) -> int | None:
        """Its exit code, 0 for compiled; None while it goes on, or waits for others."""
        if self._child is None and _has_room():
            self._begin()
        return self._child.poll() if self._child is not None else None

    def wait(self) -> int | None:
        return self._begin().wait()

    def told(self) -> str:
        """The last line of what it said."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.poll()}"

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
        self._said.close()
        self._folder.cleanup()

    def _begin(self) -> Child:
        if self._child is None:
            self._child = Child(
                [sys.executable, "-m", __name__, str(self._request)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=self._said,
                stderr=self._said,
            )
            _running.append(self)
        return self._child


def _has_room() -> bool:
    """Whether one more may compile. Those that are through make room, whether or not anybody asked them."""
    _running[:] = [one for one in _running if one._child is not None and one._child.poll() is None]
    return len(_running) < max(1, cores() // _CORES_EACH)


def _work(path: str) -> None:
    asked: Request = pickle.loads(Path(path).read_bytes())
    torch.set_num_threads(asked.threads)
    torch.set_default_dtype(asked.default_dtype)
    torch.use_deterministic_algorithms(asked.deterministic)
    for place, word in zip(precision.PLACES, asked.precision, strict=True):
        attrgetter(place)(torch.backends).fp32_precision = word
    compiled(asked)


if __name__ == "__main__":
    import carpool.adapters.torch.train  # noqa: F401  # which registers our own operators

    _work(sys.argv[1])
