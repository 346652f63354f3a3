"""A step of a stack beside the same step of its members alone; afterwards the stack is as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from torch import Tensor

from carpool.adapters.base import Check
from carpool.adapters.torch import stack
from carpool.adapters.torch.build import Built
from carpool.adapters.torch.check import Strict, solo_step, strict_step
from carpool.adapters.torch.compare import compare
from carpool.adapters.torch.feed import Feed
from carpool.adapters.torch.full import is_full
from carpool.adapters.torch.program import Program
from carpool.adapters.torch.stacked import Recipe
from carpool.adapters.torch.transfer import sent
from carpool.errors import failure
from carpool.memory.estimate import CHECKED_BYTES
from carpool.planning.cursor import Chunk
from carpool.planning.widths import spread

_LAUNCHES = 4


class RowsRaised(Exception):
    """The steps of some rows alone raised."""

    def __init__(self, errors: Mapping[int, BaseException]) -> None:
        super().__init__(f"rows {sorted(errors)} raised")
        self.errors = dict(errors)


class Verifier:
    """Checks rows of one stack. `program` gives the step of a size; members' steps alone are taken inside `alone`."""

    def __init__(
        self,
        recipe: Recipe,
        tensors: dict[str, Tensor],
        feed: Feed,
        program: Callable[[int], Program],
        alone: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._recipe, self._tensors, self._feed, self._program = recipe, tensors, feed, program
        self._alone = alone

    def check(self, chunk: Chunk, members: Mapping[int, Built]) -> Check:
        """A few members at a time, so that what is copied for it stays small; the others sit out meanwhile.

        Of large members not all: each part is a launch as wide as the stack.
        """
        most = max(1, CHECKED_BYTES // max(1, stack.checked_bytes(self._tensors)))
        rows = spread(list(members), most * _LAUNCHES)
        parts = [rows[at : at + most] for at in range(0, len(rows), most)]
        return Check.of([self._check(chunk, {row: members[row] for row in part}) for part in parts])

    def _check(self, chunk: Chunk, members: Mapping[int, Built]) -> Check:
        cursors = dict(zip(chunk.rows, chunk.cursors, strict=True))
        rows = list(members)
        self._feed.tell(replace(chunk, rows=tuple(rows), cursors=tuple(cursors[row] for row in rows)), 1)
        self._feed.lay(self._feed.now())
        cases = {row: self._feed.case(row, cursors[row], 0, chunk.size) for row in rows}
        errors: dict[int, BaseException] = {}
        alone = {}
        with self._alone():
            for place, (row, case) in enumerate(cases.items()):
                try:
                    alone[place] = solo_step(self._recipe, case)
                except BaseException as error:
                    failure(error)
                    if is_full(error):
                        raise  # that is nobody's own failure
                    errors[row] = error
        if errors:
            raise RowsRaised(errors)
        together = self._together(chunk.size, rows)

        def strict(place: int) -> Strict:
            case = self._feed.case(rows[place], cursors[rows[place]], 0, chunk.size)
            return strict_step(self._recipe, case)

        built, lowest = dict(enumerate(members.values())), self._program(chunk.size).lowest
        return compare(self._recipe, chunk.size, alone, together, built, strict, lowest)

    def _together(self, size: int, rows: Sequence[int]) -> dict[str, Tensor]:
        """What the stack's step gives these rows, which have their tensors back afterwards."""
        index = sent(list(rows), self._tensors["weights"].device)
        names = [name for name in self._tensors if stack.is_state(name) or name == "alive"]
        before = {name: self._tensors[name][index] for name in names}
        try:
            self._program(size).run(1)
            found = {name: self._tensors[name][index] for name in (*names, "sums")}
        finally:  # of several panels one may have taken its step when another raises
            for name, tensor in before.items():
                self._tensors[name][index] = tensor
        for name in self._recipe.shared:  # a step alone that changed one of these would differ here
            once = self._tensors[f"shared:{name}"]
            found[f"buffer:{name}"] = once.expand(len(rows), *once.shape)
        return found
