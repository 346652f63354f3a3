"""Launches of machine code: many steps of many members, one member after another, spread over the cores.

A launch has segments: some steps of one kind (training on batches of one size, or validation) for the rows that take part.
A member goes through all of them before its core takes the next member, so its weights stay in the core's cache.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from carpool import machine
from carpool.adapters.torch.orders import Places
from carpool.adapters.torch.resident import Code
from carpool.kernels.resident.builder import Refused
from carpool.kernels.resident.launching import LAUNCHER

Tensors = Mapping[str, Tensor]


def _record(*names: str) -> np.dtype:
    """A struct of C of 64-bit numbers and addresses."""
    return np.dtype([(name, "i8") for name in names])


TENSOR = _record("base", "stride", "epoch")
SEGMENT = _record(
    "member", "tensors", "active", "faults", "begin", "from", "steps", "dry", "epoch", "width", "lays"
)
BLOCK = _record("segments", "count", "epochs", "steps")
ORDERS = _record("order", "places", "seeds", "lengths", "bits", "shuffles", "longest")
_LAUNCH = _record(
    "blocks", "count", "orders", "rows", "num_rows", "halted", "memory", "memory_bytes", "threads", "next"
)
_SHARED = ("order", "data:", "shared:", "held:")
_PAGE = 4096
_TIMED_STEPS = 16
_ANY = 1e-3
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
    blocks: np.ndarray, orders: np.ndarray | None, rows: np.ndarray, halted: np.ndarray, memory: Memory,
    bytes_each: int, threads: int,
) -> None:  # fmt: skip
    """Launches these `BLOCK`s for these rows, and waits. `halted` rows take no part, and no further part.

    Raises machine.NoMachineCode.
    """
    threads = max(1, min(threads, len(rows)))
    start, room = memory.place(bytes_each, threads)
    launch = _one(
        _LAUNCH,
        blocks=blocks.ctypes.data,
        count=len(blocks),
        orders=0 if orders is None else orders.ctypes.data,
        rows=rows.ctypes.data,
        num_rows=len(rows),
        halted=halted.ctypes.data,
        memory=start,
        memory_bytes=room,
        threads=threads,
        next=0,
    )
    launcher().launch(ctypes.c_void_p(launch.ctypes.data))


def _one(record: np.dtype, **fields: int) -> np.ndarray:
    """A single struct of C."""
    return np.array([tuple(fields[name] for name in record.names or ())], record)


def launcher() -> ctypes.CDLL:
    """What takes members through launches. Raises machine.NoMachineCode."""
    return machine.made(LAUNCHER).library


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
        made[place] = tensor.data_ptr(), stride, 0
    return made


def _entry(library: ctypes.CDLL) -> int:
    """The address of a library's step of one member."""
    return ctypes.cast(library.member, ctypes.c_void_p).value or 0


def segment_of(
    library: ctypes.CDLL, table: np.ndarray, active: np.ndarray, faults: np.ndarray, steps: int, begin: int = 0,
    start: int = 0, dry: bool = False, lays: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """So many steps of a library's: from `begin` on of the tables of numbers, and from `start` on of the order."""
    fields = {
        "member": _entry(library),
        "tensors": table.ctypes.data,
        "active": active.ctypes.data,
        "faults": faults.ctypes.data,
        "begin": begin,
        "from": start,
        "steps": steps,
        "dry": int(dry),
        "epoch": 0,
        "width": len(active),
        "lays": 0 if lays is None else lays.ctypes.data,
    }
    return _one(SEGMENT, **fields)


def block_of(segments: np.ndarray, epochs: int = 1, steps: int = 0) -> np.ndarray:
    """Segments that are taken so many times, with so many steps of training each time."""
    return _one(BLOCK, segments=segments.ctypes.data, count=len(segments), epochs=epochs, steps=steps)


def orders_of(order: np.ndarray, read: Places) -> np.ndarray:
    """What rows lay their epochs out from, in the form that launches take: [rows, longest] positions to be written.

    Both must stay where they are while launches run.
    """
    return _one(
        ORDERS,
        order=order.ctypes.data,
        places=read.places.ctypes.data,
        seeds=read.seeds.ctypes.data,
        lengths=read.lengths.ctypes.data,
        bits=read.bits.ctypes.data,
        shuffles=read.shuffles.ctypes.data,
        longest=order.shape[1],
    )


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

    @property
    def active_rows(self) -> int:
        return int(self.tensors["active"].sum())

    def run(self, steps: int, threads: int) -> dict[int, int]:
        """Takes so many steps of the active rows; of those that went out of bounds, how many they took before."""
        begin = int(self.tensors["k"])
        faults = self._carried_out(self._table, steps, threads, begin, begin)
        self.tensors["k"].add_(steps)
        return {int(row): int(faults[row]) for row in np.flatnonzero(faults >= 0)}

    def rehearsed_s(self, steps: int, threads: int) -> float:
        """Seconds that so many steps take. They are computed and not kept.

        Of what a chunk tells, only the rows and where they begin need be there: the numbers of updates are any that keep
        weights finite, as a member that diverges stops, and takes no time.
        """
        width, table = len(self.tensors["active"]), self._table.copy()
        given = {
            "table": torch.full_like(self.tensors["table"][:, :steps], _ANY).contiguous(),
            "due": torch.ones((width, steps, self.tensors["due"].shape[-1]), dtype=torch.bool),
        } if "table" in self.tensors else {}  # fmt: skip
        for place, name in enumerate(self.code.tensors):
            if name in given:
                table[place] = given[name].data_ptr(), given[name][:1].nbytes, 0
        started = time.perf_counter()
        self._carried_out(table, steps, threads, 0, int(self.tensors["k"]), dry=True)
        return time.perf_counter() - started

    def _carried_out(
        self, table: np.ndarray, steps: int, threads: int, begin: int, start: int, dry: bool = False
    ) -> np.ndarray:
        active = self.tensors["active"].numpy().view(np.uint8)
        faults, halted = np.full(len(active), -1, np.int64), np.zeros(len(active), np.uint8)
        block = block_of(segment_of(self.library, table, active, faults, steps, begin, start, dry))
        rows, bytes_each = np.flatnonzero(active), self.code.memory_bytes
        carry_out(block, None, rows, halted, self._memory, bytes_each, threads)
        return faults


def bound(code: Code, tensors: Tensors) -> Bound:
    """Makes the code, or takes it from where it was made before. Raises machine.NoMachineCode."""
    launcher()
    return Bound(code, machine.made(code.source).library, tensors)


def machine_guess_s(code: Code) -> float:
    """What making the machine code is expected to take."""
    return _GUESS_S + len(code.source) * _CHARACTER_S


def patience_s(code: Code) -> float:
    """How long a compiler is waited for: much longer than it should take."""
    return _PATIENCE_S + _PATIENCE * machine_guess_s(code)


def prepared(code: Code) -> machine.Made:
    """The machine code and a launcher's, unless its compiler takes much longer than it should: nobody waits for one that hangs."""
    most_s = patience_s(code)
    launching, made = machine.begin(LAUNCHER), machine.begin(code.source)
    try:
        launching.result(most_s)
        return made.result(most_s)
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
        made = prepared(code)
        self.code, self.library, self.seconds, self.threads = code, made.library, made.seconds, threads
        self._bounds = [Bound(code, made.library, tensors) for tensors in panels]
        self.step_s, self.timed_rows = 0.0, sum(len(tensors["active"]) for tensors in panels)
        """Seconds that a step of the active rows took when it was timed last, and how many these were."""

    def run(self, panel: int, steps: int) -> None:
        faults = self._bounds[panel].run(steps, self.threads())
        if faults:
            raise OutOfBounds(faults)

    def launch_s(self) -> float:
        """Seconds that a step of all active rows takes, in a launch of a few: nothing changes."""
        self.step_s = sum(map(self._timed, self._bounds))
        self.timed_rows = max(1, sum(one.active_rows for one in self._bounds))
        return self.step_s

    def _timed(self, one: Bound) -> float:
        steps = one.ahead(_TIMED_STEPS)
        return one.rehearsed_s(steps, self.threads()) / steps
