"""Predictions of many models as machine code, on a CPU: when they run so, and how.

It has to pay: the work that is left, by a piece of it that is timed as it runs without, must be more than making the
code takes, unless the code is there. Then both ways are timed on that piece. What cannot run so, for whatever reason,
runs as it always does, and nothing is said of it.

A program takes batches of one size, a few dozen samples, so that what a member computes stays in a core's cache. That
is sound where each row of the outputs is made of one sample alone. Two things have to say so: the loops themselves,
which show of every element which samples go into it (`is_apart`), and a model that computes all samples by itself, as
often as there are other numbers of samples: so what reads how long a batch is, or where in it a sample lies, is found
out. Where they do not say so, the program's batch is the user's own.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode

from carpool import machine
from carpool.adapters.torch import launch
from carpool.adapters.torch.forward import DATA, OWN, SHARED, Forward, forward_of
from carpool.adapters.torch.inputs import Inputs, joined
from carpool.adapters.torch.precision import settings
from carpool.adapters.torch.signature import model_signature
from carpool.adapters.torch.template import leaves_of, shared_names
from carpool.kernels.resident.builder import Refused
from carpool.windows import measured

Ways = Callable[[Sequence[nn.Module], Sequence[Inputs]], list[list[Any]]]
"""Models' outputs, batch by batch, as they are computed without machine code."""

_FORCED = False  # tests: always, whether it pays or not
_REMEMBERED = 64  # structures
_FEWEST = 4_000  # samples, those of all models: fewer are over before one is timed
_MEMBERS = 8  # of the piece that is timed, on as many samples as may be: a cache holds few of them
_SHARE = 32  # the piece is at most that part of the whole
_TRACING_S, _OPERATOR_S = 0.1, 0.005  # of a forward pass, and for each of its operators
_GAIN = 2  # so many times what making the code takes must be left
_SURE = 1.5  # ratios of both ways that need no second look
_CACHE_BYTES = 64 << 10  # of a batch's largest tensor: two of them, and weights, fit a core's cache
_SIZES = (8, 128)  # of batches of our own
_LARGEST_BYTES = 8 << 20  # of a thread's memory for a batch of the user's own
_FIRST, _WIDEST = 4, 256  # members of the first launch for each thread, and of any
_LAUNCH_S = 0.1  # Ctrl-C waits so long for a launch
_NEAR = {torch.float64: 1e-9}
_FLOAT_NEAR = 1e-4  # of the largest number
_ODD = 1e-3  # the share of whole numbers that may differ: classes that are nearly as likely


@dataclass(frozen=True)
class _Pace:
    """What it takes without machine code: to begin a batch, and for a sample of a model."""

    begin_s: float
    each_s: float

    def seconds(self, task: Task) -> float:
        return self.begin_s * len(task.batches) + self.each_s * len(task.models) * task.samples

    def corrected(self, task: Task, seconds: float) -> _Pace:
        """The same, once all of a task took so long: what does not fit a cache may take longer than a piece of it."""
        rest_s = max(0.0, seconds - self.begin_s * len(task.batches))
        return replace(self, each_s=rest_s / (len(task.models) * task.samples))


@dataclass
class _Known:
    """What is known of the forward pass of a structure on batches of a size."""

    forward: Forward | None = None
    checked: set[int] = field(default_factory=set)
    """Numbers of samples for which a model alone said the same."""
    is_faster: bool | None = None


class _Structure:
    """What is known of a structure, as it was first met."""

    def __init__(self, task: Task) -> None:
        seen = task.look()
        self.operators = seen.operators
        self.size, most = _SIZES
        while self.size < most and 2 * self.size * seen.nbytes // task.own_size <= _CACHE_BYTES:
            self.size *= 2
        self.pace: _Pace | None = None
        self._known: dict[int, _Known] = {}

    def known(self, size: int) -> _Known:
        return self._known.setdefault(size, _Known())


_structures: OrderedDict[Hashable, _Structure] = OrderedDict()


class Seen(Protocol):
    """What a forward pass showed on tensors without contents."""

    nbytes: int
    """Of the largest tensor that an operator makes."""
    operators: int


@dataclass(frozen=True)
class Task:
    """Models of one structure, what they are given, and how their outputs are computed without machine code."""

    models: Sequence[nn.Module]
    inputs: Inputs
    batches: Sequence[Inputs]
    look: Callable[[], Seen]
    """Looks at a forward pass on the first batch."""
    together: Ways
    alone: Ways
    plainly: Callable[[], list[list[Any]]]
    """All of it without machine code."""

    @property
    def samples(self) -> int:
        return self.inputs.length

    @property
    def own_size(self) -> int:
        """Of the user's batches."""
        return self.batches[0].length


@dataclass(frozen=True)
class Predicted:
    """Each model's outputs in parts, and how many samples each part is of."""

    parts: list[list[Any]]
    sizes: list[int]
    is_own: bool = True
    """Whether no two models' outputs lie in one memory."""


def predicted(task: Task) -> Predicted:
    """What the models say: as machine code, or as ever."""
    structure: _Structure | None = None
    if _may(task):
        one = _Predicting(task)
        try:
            if (made := one.outputs()) is not None:
                return made
            structure = one.structure
        except (Refused, machine.NoMachineCode, launch.OutOfBounds):
            pass
    started = time.perf_counter()
    parts = task.plainly()
    if structure is not None and structure.pace is not None:
        structure.pace = structure.pace.corrected(task, time.perf_counter() - started)
    return Predicted(parts, [batch.length for batch in task.batches], is_own=False)


def _may(task: Task) -> bool:
    enough = _FORCED or len(task.models) * task.samples >= _FEWEST
    if len(task.models) < 2 or not enough or torch.is_autocast_enabled("cpu"):
        return False
    if _get_current_dispatch_mode() is not None or torch._C._len_torch_function_stack():
        return False  # someone looks at operators
    leaves = [*task.inputs.tensors, *leaves_of(task.models[0]).values()]
    return all(_is_plain(leaf) for leaf in leaves) and machine.unavailable() is None


def _is_plain(leaf: Tensor) -> bool:
    kind = type(leaf) in (Tensor, nn.Parameter)
    return kind and leaf.layout is torch.strided and leaf.device.type == "cpu" and not leaf.is_neg()


class _Predicting:
    """One task on its way."""

    def __init__(self, task: Task, shared: frozenset[str] | None = None) -> None:
        """`shared` are the leaves that are one object for all, in a part of a task those of the whole."""
        self._task = task
        self._shared = shared_names(task.models) if shared is None else shared
        self._names = {
            f"{SHARED if name in self._shared else OWN}{number}": name
            for number, name in enumerate(leaves_of(task.models[0]))
        }
        self._data = {f"{DATA}{n}": leaf for n, leaf in enumerate(task.inputs.tensors) if self._is_cut(leaf)}
        self._once = {
            f"{SHARED}{DATA}{n}": leaf for n, leaf in enumerate(task.inputs.tensors) if not self._is_cut(leaf)
        }

    def _is_cut(self, leaf: Tensor) -> bool:
        return leaf.dim() > 0 and len(leaf) == self._task.samples

    def outputs(self) -> Predicted | None:
        self.structure = _remembered(self._key(), self._task)
        chosen = self._chosen(self.structure)
        return None if chosen is None else self._computed(*chosen)

    # Which program, and whether

    def _chosen(self, structure: _Structure) -> tuple[Forward, Any, _Known] | None:
        """The program that is to run, if any is."""
        own = min(structure.size, self._task.samples)
        for size in dict.fromkeys([own, self._task.own_size]):  # the user's, if not of our own choice
            known = structure.known(size)
            is_sure = _FORCED or known.is_faster is True
            if known.is_faster is False and not _FORCED:
                continue
            if not is_sure and not self._is_worth_tracing(structure, known):
                return None
            forward = self._forward(known, size)
            if forward is None:
                continue
            if not is_sure and not self._is_worth_making(structure, forward):
                return None
            try:
                library = launch.prepared(forward.code).library
            except machine.NoMachineCode:
                known.is_faster = False
                raise
            if known.is_faster is None and not _FORCED:
                known.is_faster = self._is_faster(forward, library)
            if _FORCED or known.is_faster:
                return forward, library, known
        return None

    def _is_worth_tracing(self, structure: _Structure, known: _Known) -> bool:
        if structure.pace is None:
            structure.pace = self._pace()
        tracing_s = _TRACING_S + _OPERATOR_S * structure.operators
        return known.forward is not None or structure.pace.seconds(self._task) > tracing_s

    def _is_worth_making(self, structure: _Structure, forward: Forward) -> bool:
        assert structure.pace is not None
        left_s = structure.pace.seconds(self._task)
        return left_s > _GAIN * launch.machine_guess_s(forward.code) or machine.is_kept(forward.code.source)

    def _forward(self, known: _Known, size: int) -> Forward | None:
        """The code for batches of this size, if such a program may be used."""
        if known.forward is None:
            try:
                known.forward = forward_of(
                    self._task.models[0], self._names, self._examples(size), self._task.inputs, size
                )
            except Refused:
                known.is_faster = False
                raise
        forward, is_own = known.forward, size == self._task.own_size
        if forward.is_common and not _FORCED:
            return None
        if not forward.is_apart and (not is_own or forward.code.memory_bytes > _LARGEST_BYTES):
            return None
        return forward

    # Timing

    def _pace(self) -> _Pace:
        """How long it takes without machine code, by a piece of it and by next to nothing."""
        least, piece = self._cut(2, min(8, self._task.samples)), self._piece()
        begin_s = min(_plain_s(least) for _ in range(3))
        piece_s, batches = _plain_s(piece), len(piece.batches)
        begin_s = min(begin_s, piece_s / batches)  # threads that wait for each other now and then
        each_s = piece_s - begin_s * batches
        return _Pace(begin_s, each_s / (len(piece.models) * piece.samples))

    def _is_faster(self, forward: Forward, library: Any) -> bool:
        """Both ways on a piece; a model alone, which checks the code, counts too."""
        piece, size = self._piece(), forward.code.size
        members = 2 if piece.samples < size else len(piece.models)
        piece = self._cut(members, max(size, piece.samples - piece.samples % size))
        if 2 * members * piece.samples > len(self._task.models) * self._task.samples:
            return False  # there is nothing left of it once it is timed
        part = _Predicting(piece, self._shared)
        own = 1.0 + 1.0 / len(self._task.models)

        def made_s() -> float:
            started = time.perf_counter()
            part.run(piece.models, forward, library)
            return own * (time.perf_counter() - started)

        made_s()
        made, plain = min(made_s(), made_s()), _plain_s(piece)
        if made * _SURE < plain or plain * _SURE < made:
            return made < plain
        plain, made = measured([lambda: _plain_s(piece), made_s]).seconds
        return made < plain

    def _piece(self) -> Task:
        """A few models and a few samples."""
        count = len(self._task.models)
        members, samples = min(_MEMBERS, count), self._task.samples
        while members * samples * _SHARE > count * self._task.samples and samples > 1:
            samples = -(-samples // 2)
        return self._cut(members, samples)

    def _cut(self, members: int, samples: int) -> Task:
        """The first models on the first samples."""
        task = self._task
        cut = [leaf[:samples] if self._is_cut(leaf) else leaf for leaf in task.inputs.tensors]
        inputs = task.inputs.holding(cut)
        batches = list(inputs.batches(task.own_size))
        return replace(task, models=task.models[:members], inputs=inputs, batches=batches)

    def _key(self) -> Hashable:
        """All that a program has baked in."""
        plain = [leaf for leaf in self._task.inputs.leaves if not isinstance(leaf, Tensor)]
        shapes = [(name, tuple(leaf.shape[1:]), leaf.dtype) for name, leaf in self._data.items()]
        once = [(name, tuple(leaf.shape), leaf.dtype) for name, leaf in self._once.items()]
        signature = model_signature(self._task.models[0])
        types = torch.get_default_dtype(), settings(), type(self._task.models[0])
        about = self._task.inputs.nest, repr([(type(leaf), leaf) for leaf in plain])
        return signature, self._shared, *about, tuple(shapes), tuple(once), types

    # Tensors

    def _examples(self, size: int) -> dict[str, Tensor]:
        leaves = leaves_of(self._task.models[0])
        own = {place: leaves[name] for place, name in self._names.items()}
        made = {place: torch.empty(leaf.shape, dtype=leaf.dtype) for place, leaf in own.items()}
        for number, leaf in enumerate(self._task.inputs.tensors):
            cut = self._is_cut(leaf)
            name = f"{DATA}{number}" if cut else f"{SHARED}{DATA}{number}"
            made[name] = torch.empty((size, *leaf.shape[1:]) if cut else leaf.shape, dtype=leaf.dtype)
        return made

    # Running

    def _computed(self, forward: Forward, library: Any, known: _Known) -> Predicted:
        """All outputs, after those of the first model were compared with its own."""
        task, size = self._task, forward.code.size
        whole = task.samples if forward.is_apart else task.samples - task.samples % size
        self._check(forward, library, known)
        made = self.run(task.models, forward, library)
        if whole == task.samples:
            return Predicted([[one] for one in made], [whole])
        late = task.batches[whole // size :]
        rest = task.together(task.models, late)
        sizes = [whole, *(batch.length for batch in late)]
        return Predicted([[one, *more] for one, more in zip(made, rest, strict=True)], sizes)

    def _check(self, forward: Forward, library: Any, known: _Known) -> None:
        """Compares the first model with itself alone: all samples where there never were as many, else the first few.

        Raises Refused.
        """
        is_new = self._task.samples not in known.checked
        count = self._task.samples if is_new and forward.is_apart else forward.code.size
        only = self._cut(1, min(count, self._task.samples))
        part = _Predicting(only, self._shared)
        own = joined(only.alone(only.models, only.batches)[0], [batch.length for batch in only.batches])
        if not _agree(part.run(only.models, forward, library)[0], own):
            known.is_faster, known.forward = False, None
            raise Refused("another result than the model's own")
        known.checked.add(self._task.samples)

    def run(self, models: Sequence[nn.Module], forward: Forward, library: Any) -> list[Any]:
        """Each model's outputs for as many samples as the program can take. Raises launch.OutOfBounds."""
        calls = _Calls(self._task.samples, forward, library, self._given(models[0]))
        made: list[Any] = []
        width = _FIRST * torch.get_num_threads()
        while len(made) < len(models):
            started = time.perf_counter()
            part = models[len(made) : len(made) + width]
            made += calls.launched([self._own(model) for model in part])
            if time.perf_counter() - started < _LAUNCH_S:
                width = min(2 * width, _WIDEST)
        return made

    def _given(self, model: nn.Module) -> dict[str, Tensor]:
        """What all models read."""
        leaves = leaves_of(model)
        shared = {place: leaves[name] for place, name in self._names.items() if name in self._shared}
        given = {**self._data, **self._once, **shared}
        return {place: leaf.detach().contiguous() for place, leaf in given.items()}

    def _own(self, model: nn.Module) -> dict[str, Tensor]:
        """What only this one reads."""
        leaves = leaves_of(model)
        names = [(place, name) for place, name in self._names.items() if name not in self._shared]
        return {place: leaves[name].detach().contiguous() for place, name in names}


class _Calls:
    """Calls of a program: each member reads its leaves where they are, and writes into outputs of its own."""

    def __init__(self, samples: int, forward: Forward, library: Any, given: Mapping[str, Tensor]) -> None:
        self._forward, self._library = forward, library
        size = forward.code.size
        if samples < size:
            raise Refused("fewer samples than a batch")
        self._steps, rest = divmod(samples, size)
        self._late = samples - size if rest and forward.is_apart else 0
        """Where a last batch begins that goes back to samples of the one before it; 0 where there is none."""
        self._rows = samples if forward.is_apart else self._steps * size
        if self._steps > 1 and any(told.shape[:1] != (size,) for told in forward.outputs):
            raise Refused("outputs without a row for each sample")
        counts = {
            "first": torch.zeros(1, dtype=torch.int64),
            "order": torch.arange(samples, dtype=torch.int32),
        }
        self._given = {**given, **counts}
        self._memory = launch.Memory()
        self._place = {name: place for place, name in enumerate(forward.code.tensors)}
        self._common = self._filled(
            np.zeros(len(self._place), launch.TENSOR), {**self._given, **forward.code.held}
        )

    def launched(self, members: Sequence[Mapping[str, Tensor]]) -> list[Any]:
        """The outputs of these members. Raises launch.OutOfBounds."""
        count, code = len(members), self._forward.code
        active, faults = np.eye(count, dtype=np.uint8), np.full(count, -1, np.int64)
        taken = torch.zeros(count, dtype=torch.int64)
        outputs = [self._empty() for _ in members]
        tables: list[np.ndarray] = []
        segments: list[np.ndarray] = []
        for row, (own, made) in enumerate(zip(members, outputs, strict=True)):
            for steps, late in ((self._steps, 0), (1, self._late))[: 1 + bool(self._late)]:
                tables.append(self._table({**own, "taken": taken[row:]}, made, late))
                segments.append(launch.segment_of(self._library, tables[-1], active[row], faults, steps))
        segment = np.concatenate(segments)
        block = launch.block_of(segment)
        rows, halted = np.arange(count), np.zeros(count, np.uint8)
        threads = torch.get_num_threads()
        launch.carry_out(block, None, rows, halted, self._memory, code.memory_bytes, threads)
        if (faults >= 0).any():
            raise launch.OutOfBounds({int(row): int(faults[row]) for row in np.flatnonzero(faults >= 0)})
        return [pytree.tree_unflatten(made, self._forward.nest) for made in outputs]

    def _empty(self) -> list[Tensor]:
        size = self._forward.code.size
        return [
            torch.empty(
                (self._rows, *told.shape[1:]) if told.shape[:1] == (size,) else told.shape, dtype=told.dtype
            )
            for told in self._forward.outputs
        ]

    def _table(self, own: Mapping[str, Tensor], made: Sequence[Tensor], late: int) -> np.ndarray:
        """Where a member's tensors lie, and those of all; the order and the outputs from a late sample on."""
        outputs = {told.name: leaf for told, leaf in zip(self._forward.outputs, made, strict=True)}
        table = self._filled(self._common.copy(), {**own, **outputs})
        if late:
            for name, tensor in (("order", self._given["order"]), *outputs.items()):
                table["base"][self._place[name]] += late * tensor[:1].nbytes
        return table

    def _filled(self, table: np.ndarray, tensors: Mapping[str, Tensor]) -> np.ndarray:
        """Each member has a table of its own, so nothing lies further from row to row."""
        base = table["base"]
        for name, tensor in tensors.items():
            if name in self._place:  # a leaf that the pass does not read is not there
                base[self._place[name]] = tensor.data_ptr()
        return table


def _plain_s(piece: Task) -> float:
    """Seconds that a piece takes without machine code."""
    started = time.perf_counter()
    try:
        piece.together(piece.models, piece.batches)
    except Exception:  # what a stack cannot do, the models alone can
        started = time.perf_counter()
        piece.alone(piece.models, piece.batches)
    return time.perf_counter() - started


def _remembered(key: Hashable, task: Task) -> _Structure:
    if key not in _structures:
        _structures[key] = _Structure(task)
    _structures.move_to_end(key)
    while len(_structures) > _REMEMBERED:
        _structures.popitem(last=False)
    return _structures[key]


def _agree(made: Any, own: Any) -> bool:
    """Whether outputs are the same but for rounding."""
    first, second = pytree.tree_flatten(made), pytree.tree_flatten(own)
    return first[1] == second[1] and all(map(_alike, first[0], second[0]))


def _alike(made: Any, own: Any) -> bool:
    if not isinstance(own, Tensor) or made.shape != own.shape or made.dtype != own.dtype:
        return False
    if not own.is_floating_point():
        return int((made != own).sum()) <= _ODD * own.numel()
    finite = own.isfinite()
    largest = own[finite].abs().max().item() if finite.any() else 0.0
    near = _NEAR.get(own.dtype, _FLOAT_NEAR) * max(largest, torch.finfo(own.dtype).tiny)
    return torch.allclose(made, own, rtol=0.0, atol=near, equal_nan=True)
