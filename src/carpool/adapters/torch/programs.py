"""The steps of a stack, each made ready when it is first needed: traced, and compiled in the background where that pays."""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from carpool.adapters.base import Prepared
from carpool.adapters.torch.launch import Resident, machine_guess_s, patience_s
from carpool.adapters.torch.pace import shortest
from carpool.adapters.torch.panels import Panels
from carpool.adapters.torch.program import Program
from carpool.adapters.torch.resident import Code, code_of
from carpool.adapters.torch.stacked import Recipe
from carpool.errors import FusionError, failure, sentence
from carpool.kernels.resident.builder import Refused
from carpool.machine import (
    Compiler,
    NoMachineCode,
    begin,
    compiler,
    is_made,
    unavailable,
    under_way,
)
from carpool.planning.widths import compiling_budget_s
from carpool.windows import measured

Tensors = dict[str, Tensor]

_LEAST_OPERATOR_S = 1e-6
"""No operator of torch begins in less."""
_MOST_FLOPS = 100e9
"""Floating-point operations that no core exceeds in a second in products as small as these."""
FEWEST_LAUNCHES = 32
"""For fewer it is not worth timing one to know whether compiling pays."""

_REMEMBERED = 256
_CLEARLY = 2.0  # times as fast: from here on a busy machine's windows need not agree by how much


class _Pace(NamedTuple):
    """What a step takes, as it was traced (None where nobody asked) and as machine code."""

    traced_s: float | None
    resident_s: float


_paces: OrderedDict[Hashable, _Pace] = OrderedDict()
"""What was measured in this process: timing a stack of hundreds of members takes as long as hundreds of its steps."""


class Programs:
    """One program for each kind of step and batch size, for one width in these panels. `key` is what all of them have baked in."""

    def __init__(
        self,
        key: Hashable,
        panels: Panels,
        device: str,
        compile: str | bool,
        prepared: Prepared,
        repeats: bool = True,
        threads: Callable[[], int] = torch.get_num_threads,
    ) -> None:
        """`threads` are those that a step as machine code may use."""
        self._key, self._panels, self._device = key, panels, device
        self._compile, self._prepared, self._repeats, self._threads = compile, prepared, repeats, threads
        self._ready: dict[tuple[str, int], Program] = {}
        self.remembered = ""
        """How a training step of such a stack ran when it was timed before, as far as that is known."""

    def get(
        self,
        kind: str,
        size: int,
        make: Callable[[], Any],
        tensors: Tensors,
        launches: Callable[[], int],
        recipe: Recipe | None = None,
    ) -> Program:
        """The program; made by `make` over these tensors the first time, for so many launches in all.

        `recipe` is what its machine code can be made of, where there may be any.
        """
        if (kind, size) not in self._ready:
            panels = self._panels.cut(tensors)
            is_worth = self._compile == "resident" or self._is_resident or launches() >= FEWEST_LAUNCHES
            code = self._code(kind, size, recipe, panels[0]) if self._compile and is_worth else None
            is_late = code is not None  # then most often it need not be traced
            program = Program(make(), panels, (kind, self._key, size), repeats=self._repeats, is_late=is_late)
            if self._compile is True:
                program.compile()
            elif not self._compile:
                program.stay_traced()
            else:
                self._choose(program, code, launches)
            self._ready[kind, size] = program
            self._prepared(size, self._panels.width, program.form, program.prepare_s)
        return self._ready[kind, size]

    def begin(self, kind: str, size: int, tensors: Tensors, recipe: Recipe) -> None:
        """Begins to make a step's machine code, if it may run so; nobody waits for it."""
        if self._compile in ("auto", "resident") and (kind, size) not in self._ready:
            code = self._code(kind, size, recipe, self._panels.cut(tensors)[0])
            if code is not None:
                begin(code.source)

    def under_way(self, kind: str, size: int, tensors: Tensors, recipe: Recipe) -> Callable[[], bool] | None:
        """Whether a compiler is through with a step's machine code, or was waited for long enough; None where none is at work on it."""
        if self._compile not in ("auto", "resident") or (kind, size) in self._ready:
            return None
        code = self._code(kind, size, recipe, self._panels.cut(tensors)[0])
        future = under_way(code.source) if code is not None else None
        if code is None or future is None:
            return None
        end_s = time.perf_counter() + patience_s(code)
        return lambda: future.done() or time.perf_counter() > end_s

    def _code(self, kind: str, size: int, recipe: Recipe | None, tensors: Tensors) -> Code | None:
        """The step's machine code, where it can be some."""
        if recipe is None or self._device != "cpu" or self._compile is True:
            return None
        if self._compile == "auto" and unavailable() is not None:  # which the plan says, where it matters
            return None
        try:
            return code_of(kind, self._key, recipe, size, tensors)
        except Refused as refused:
            if self._compile == "resident":
                raise _no_code(str(refused)) from refused
            return None

    def _choose(self, program: Program, code: Code | None, launches: Callable[[], int]) -> None:
        """Runs it as machine code where that is faster, or begins to compile it, where either pays."""
        if self._compile == "resident":
            self._force(program, code)
            return
        if code is not None and self._is_resident and self._follows(program, code):
            return
        if launches() < FEWEST_LAUNCHES:
            return
        if code is not None and self.remembered == "resident" and self._follows(program, code):
            return
        if code is not None and (
            self._was_faster(program, code) or self._is_far_faster(program, code, launches())
        ):
            return
        if program.compiled:
            return
        try:
            launch_s = shortest(program.launch_s)
        except BaseException as error:
            failure(error)  # a batch that raises here raises again when it counts, and is blamed on its row
            return
        remaining_s = launches() * launch_s
        if code is not None and machine_guess_s(code) < remaining_s and self._is_faster(program, code):
            return
        budget_s = compiling_budget_s(remaining_s)
        if program.compiling_guess_s() < budget_s:
            program.begin_compiling(budget_s)

    @property
    def _is_resident(self) -> bool:
        """Whether steps of training run as machine code already."""
        return any(kind == "train" and program.resident for (kind, _), program in self._ready.items())

    def _follows(self, program: Program, code: Code) -> bool:
        """A step beside others that are machine code is that too: so an epoch is one launch."""
        try:
            program.resident = self._made(program, code)
        except (Refused, NoMachineCode) as error:
            _tell(error)
            return False
        return True

    def _is_far_faster(self, program: Program, code: Code, launches: int) -> bool:
        """Makes the machine code, and keeps it if a step takes less than the step as traced must: then that need not be traced."""
        flops_s = code.flops * self._panels.width / (_MOST_FLOPS * max(1, self._threads()))
        least_s = code.operators * _LEAST_OPERATOR_S + flops_s
        if not is_made(code.source) and machine_guess_s(code) >= launches * least_s:
            return False
        try:
            resident = self._made(program, code)
        except (Refused, NoMachineCode) as error:
            _tell(error)
            return False
        taken_s = resident.step_s if resident.step_s < least_s else shortest(resident.launch_s)
        program.resident = resident if taken_s < least_s else None
        return program.resident is not None

    def _made(self, program: Program, code: Code) -> Resident:
        """The machine code, timed once in a process. Raises what making it raises."""
        key = self._pace_key(program)
        known = _paces.get(key)
        made = program.made_resident(code, self._threads, known.resident_s if known else 0.0)
        _remember(key, known or _Pace(None, made.step_s))
        return made

    def _pace_key(self, program: Program) -> Hashable:
        """What decides how fast a step runs, beside who else is on the machine."""
        return program.key, self._panels, self._threads()

    def _was_faster(self, program: Program, code: Code) -> bool:
        """Keeps the machine code without timing it, if this process has made it and seen it to be faster."""
        known = _paces.get(self._pace_key(program))
        if known is None or known.traced_s is None or known.traced_s <= known.resident_s:
            return False
        return self._follows(program, code)

    def _is_faster(self, program: Program, code: Code) -> bool:
        """Makes the machine code, and keeps it if it runs faster than the step as it was traced."""
        traced = program.launch_s
        try:
            resident = self._made(program, code)
        except (Refused, NoMachineCode) as error:
            _tell(error)
            return False
        found = measured([traced, resident.launch_s])
        if found.agrees or found.seconds[0] > _CLEARLY * found.seconds[1]:
            _remember(self._pace_key(program), _Pace(*found.seconds))
        program.resident = resident if found.seconds[1] < found.seconds[0] else None
        return program.resident is not None

    def _force(self, program: Program, code: Code | None) -> None:
        if code is None:
            raise _no_code(f"steps on {self._device}")
        try:
            program.resident = self._made(program, code)
        except (Refused, NoMachineCode) as error:
            raise _no_code(str(error)) from error

    def resident(self, kind: str, size: int) -> Resident | None:
        """A step as machine code, where it was made ready and runs so."""
        program = self._ready.get((kind, size))
        return program.resident if program is not None else None

    def is_compiling(self, kind: str, size: int) -> bool:
        """Whether the program may be a compiled one soon."""
        program = self._ready.get((kind, size))
        return program is not None and bool(self._compile) and program.is_compiling

    def take_compiled(self, kind: str, size: int, wait: bool = False) -> Program | None:
        """The program, if from now on it is a compiled one that was not when it was last asked for."""
        if not self.is_compiling(kind, size):
            return None
        program = self._ready[kind, size]
        before_s = program.prepare_s
        if not program.take_compiled(wait):
            return None
        self._prepared(size, self._panels.width, program.form, program.prepare_s - before_s)
        return program

    def prepare_s(self, kind: str) -> float:
        """Seconds that programs of a kind took to be made ready."""
        return sum(program.prepare_s for (made, _), program in self._ready.items() if made == kind)

    def anew(self, panels: Panels) -> Programs:
        """The same for a stack in other panels, with nothing made ready."""
        made = Programs(
            self._key, panels, self._device, self._compile, self._prepared, self._repeats, self._threads
        )
        made.remembered = self.remembered
        return made

    @property
    def note(self) -> str:
        """What there is to say of how the steps of training run."""
        made = [program.resident for (kind, _), program in self._ready.items() if kind == "train"]
        seconds = sum(resident.seconds for resident in made if resident is not None)
        if not any(made):
            return ""
        return f"resident: machine code, made in {seconds:.1f} s" if seconds else "resident: machine code"


def _remember(key: Hashable, pace: _Pace) -> None:
    _paces.pop(key, None)
    _paces[key] = pace
    while len(_paces) > _REMEMBERED:
        _paces.popitem(last=False)


_told: set[Compiler] = set()
"""Those of which a failure was told."""


def _tell(error: Exception) -> None:
    """Says once of a compiler that it fails; that there is none is in the plan."""
    by = compiler()
    if isinstance(error, NoMachineCode) and by is not None and by not in _told:
        _told.add(by)
        text = f"carpool: there is no machine code, so steps run as they were traced ({error})"
        warnings.warn(text, stacklevel=2)


def _no_code(why: str) -> FusionError:
    return FusionError(
        sentence('steps that can be machine code, for compile="resident"', why, 'pass compile="auto"')
    )
