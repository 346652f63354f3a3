"""Launches of machine code: many steps of many members, one member after another, spread over the cores.

A launch has segments: some steps of one kind (training on batches of one size, or validation) for the rows that take part.
A member goes through all of them before its core takes the next member, so its weights stay in the core's cache.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor

from carpool import machine
from carpool.adapters.torch.resident import Code
from carpool.kernels.resident.builder import Refused

Tensors = Mapping[str, Tensor]

TENSOR = np.dtype([("base", "u8"), ("stride", "i8")])
SEGMENT = np.dtype(
    [(name, "i8") for name in ("member", "tensors", "active", "faults", "begin", "steps", "dry")]
)
_LAUNCH = np.dtype(
    [
        (name, "i8")
        for name in (
            "segments",
            "count",
            "rows",
            "num_rows",
            "halted",
            "memory",
            "memory_bytes",
            "threads",
            "next",
        )
    ]
)
_SHARED = ("order", "data:", "shared:", "held:")
_PAGE = 4096
_TIMED_STEPS = 16
_GUESS_S = 0.1
_PATIENCE_S, _PATIENCE = 5.0, 10.0  # a busy machine is several times as slow as a quiet one
_CHARACTER_S = 3e-6  # two layers of a small network: 80,000 characters in 0.3 s


class Memory:
    """What the threads of launches compute in, as large as the largest wanted it."""

    def __init__(self) -> None:
        self._held = np.zeros(0, np.uint8)

    def place(self, bytes_each: int, threads: int) -> tuple[int, int]:
        """Where it begins, and how much each thread has."""
        room = -(-bytes_each // _PAGE) * _PAGE
        if len(self._held) < room * threads + _PAGE:
            self._held = np.zeros(room * threads + _PAGE, np.uint8)
        start = self._held.ctypes.data
        return start + -start % _PAGE, room


def carry_out(
    library: ctypes.CDLL, segments: np.ndarray, rows: np.ndarray, halted: np.ndarray, memory: Memory,
    bytes_each: int, threads: int,
) -> None:  # fmt: skip
    """Launches these segments (`SEGMENT`s) for these rows, and waits. `halted` rows take no part, and no further part."""
    threads = max(1, min(threads, len(rows)))
    start, room = memory.place(bytes_each, threads)
    launch = np.array(
        [
            (
                segments.ctypes.data,
                len(segments),
                rows.ctypes.data,
                len(rows),
                halted.ctypes.data,
                start,
                room,
                threads,
                0,
            )
        ],
        _LAUNCH,
    )
    library.launch(ctypes.c_void_p(launch.ctypes.data))


def table_of(code: Code, tensors: Tensors) -> np.ndarray:
    """Where each tensor that the code wants lies, and how far it is from row to row; zeros for those that are not there."""
    made = np.zeros(len(code.tensors), TENSOR)
    for place, name in enumerate(code.tensors):
        tensor = code.held.get(name, tensors.get(name))
        if tensor is None:
            continue
        if not tensor[:1].is_contiguous() or (name.startswith(_SHARED) and not tensor.is_contiguous()):
            raise Refused(f"{name.partition(':')[0]} apart in memory")
        stride = 0 if name.startswith(_SHARED) else tensor.stride(0) * tensor.element_size()
        made[place] = tensor.data_ptr(), stride
    return made


def entry(library: ctypes.CDLL) -> int:
    """The address of a library's step of one member."""
    return ctypes.cast(library.member, ctypes.c_void_p).value or 0


class Bound:
    """A step's machine code over a panel's tensors, as the stack was told of its chunk."""

    def __init__(self, code: Code, library: ctypes.CDLL, tensors: Tensors) -> None:
        """Raises Refused where a tensor does not lie as the code wants it."""
        self.code, self.library, self.tensors = code, library, tensors
        self._memory, self._table = Memory(), table_of(code, tensors)

    def ahead(self, most: int) -> int:
        """How many steps the active rows' orders have room for, at least one."""
        longest = self.tensors["order"].shape[1]
        first = self.tensors["first"][self.tensors["active"]] % longest
        done = int(self.tensors["k"])
        left = (longest - int(first.max())) // self.code.size - done if len(first) else 1
        return max(1, min(most, left))

    def run(self, steps: int, threads: int, dry: bool = False) -> dict[int, int]:
        """Takes so many steps of the active rows; of those that went out of bounds, how many they took before."""
        active = self.tensors["active"].numpy().view(np.uint8)
        rows, faults = np.flatnonzero(active), np.full(len(active), -1, np.int64)
        begin = int(self.tensors["k"])
        segment = np.array(
            [
                (
                    entry(self.library),
                    self._table.ctypes.data,
                    active.ctypes.data,
                    faults.ctypes.data,
                    begin,
                    steps,
                    dry,
                )
            ],
            SEGMENT,
        )
        halted = np.zeros(len(active), np.uint8)
        carry_out(self.library, segment, rows, halted, self._memory, self.code.memory_bytes, threads)
        if not dry:
            self.tensors["k"].add_(steps)
        return {int(row): int(faults[row]) for row in np.flatnonzero(faults >= 0)}


def bound(code: Code, tensors: Tensors) -> Bound:
    """Makes the code, or takes it from where it was made before. Raises machine.NoMachineCode."""
    return Bound(code, machine.made(code.source).library, tensors)


def machine_guess_s(code: Code) -> float:
    """What making the machine code is expected to take."""
    return _GUESS_S + len(code.source) * _CHARACTER_S


def _made(code: Code) -> machine.Made:
    """The machine code, unless its compiler takes much longer than it should: nobody waits for one that hangs."""
    try:
        return machine.begin(code.source).result(_PATIENCE_S + _PATIENCE * machine_guess_s(code))
    except TimeoutError:
        raise machine.NoMachineCode("its compiler takes too long") from None


class OutOfBounds(IndexError):
    """Rows that looked something up where there is nothing; `steps` says how many each took before."""

    def __init__(self, steps: Mapping[int, int]) -> None:
        super().__init__("an index is out of bounds")
        self.steps = dict(steps)


class Resident:
    """A program's steps as machine code, panel by panel. `seconds` is what making it took."""

    def __init__(self, code: Code, panels: Sequence[Tensors], threads: Callable[[], int]) -> None:
        """Raises Refused and machine.NoMachineCode."""
        made = _made(code)
        self.code, self.library, self.seconds, self.threads = code, made.library, made.seconds, threads
        self._bounds = [Bound(code, made.library, tensors) for tensors in panels]
        self.step_s = 0.0
        """Seconds that a step of all rows took when it was timed last."""

    def run(self, panel: int, steps: int) -> None:
        faults = self._bounds[panel].run(steps, self.threads())
        if faults:
            raise OutOfBounds(faults)

    def launch_s(self) -> float:
        """Seconds that a step of all active rows takes, in a launch of a few: nothing changes."""
        self.step_s = sum(map(self._timed, self._bounds))
        return self.step_s

    def _timed(self, one: Bound) -> float:
        steps = one.ahead(_TIMED_STEPS)
        started = time.perf_counter()
        one.run(steps, self.threads(), dry=True)
        return (time.perf_counter() - started) / steps
