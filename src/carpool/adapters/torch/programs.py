"""The steps of a stack, each made ready when it is first needed: traced, and compiled in the background where that pays."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from carpool.adapters.base import Prepared
from carpool.adapters.torch.pace import shortest
from carpool.adapters.torch.panels import Panels
from carpool.adapters.torch.program import Program
from carpool.errors import failure
from carpool.planning.widths import compiling_budget_s

Tensors = dict[str, Tensor]

_FEWEST = 32  # launches: for fewer it is not worth timing one to know whether compiling pays


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
    ) -> None:
        self._key, self._panels, self._device = key, panels, device
        self._compile, self._prepared, self._repeats = compile, prepared, repeats
        self._ready: dict[tuple[str, int], Program] = {}

    def get(
        self, kind: str, size: int, make: Callable[[], Any], tensors: Tensors, launches: Callable[[], int]
    ) -> Program:
        """The program; made by `make` over these tensors the first time, for so many launches in all."""
        if (kind, size) not in self._ready:
            program = Program(
                make(), self._panels.cut(tensors), (kind, self._key, size), repeats=self._repeats
            )
            if self._compile is True:
                program.compile()
            elif not self._compile:
                program.stay_traced()
            elif (budget_s := self._budget_s(program, launches)) is not None:
                program.begin_compiling(budget_s)
            self._ready[kind, size] = program
            self._prepared(size, self._panels.width, program.compiled, program.prepare_s)
        return self._ready[kind, size]

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
        self._prepared(size, self._panels.width, program.compiled, program.prepare_s - before_s)
        return program

    def prepare_s(self, kind: str) -> float:
        """Seconds that programs of a kind took to be made ready."""
        return sum(program.prepare_s for (made, _), program in self._ready.items() if made == kind)

    def anew(self, panels: Panels) -> Programs:
        """The same for a stack in other panels, with nothing made ready."""
        return Programs(self._key, panels, self._device, self._compile, self._prepared, self._repeats)

    def _budget_s(self, program: Program, launches: Callable[[], int]) -> float | None:
        """The processor seconds that compiling may take, where a run is so long that it pays."""
        if program.compiled or launches() < _FEWEST:
            return None
        try:
            remaining_s = launches() * shortest(program.launch_s)
        except BaseException as error:
            failure(error)  # a batch that raises here raises again when it counts, and is blamed on its row
            return None
        budget_s = compiling_budget_s(remaining_s)
        return budget_s if program.compiling_guess_s() < budget_s else None
