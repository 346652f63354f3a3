"""How fast narrower stacks of the same jobs step, measured on idle rows of stacks that are thrown away.

Uncompiled first, which takes little. Where that finds a faster width and the step would be compiled, compiled too: compiling brings
widths nearer to one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from carpool import recall
from carpool.adapters.loop.ambient import Ambient
from carpool.adapters.torch.fused import StackedSession
from carpool.adapters.torch.pace import pace_key
from carpool.planning.cursor import Cursor, cut
from carpool.planning.narrowing import (
    FEWEST_LAUNCHES,
    Narrowing,
    confirming,
    narrower,
    num_launches,
    worth_confirming,
    worth_trying,
)
from carpool.planning.widths import worth_compiling

if TYPE_CHECKING:
    from carpool.adapters.torch.fuse import Known


@dataclass(frozen=True)
class Narrower:
    """Looks for a faster width for these members. `open(width, compile)` makes a stack of the first so many of them."""

    known: Sequence[Known]
    device: str
    compile: str | bool
    compile_s: Callable[[], float]
    """What compiling their step is expected to take."""
    open: Callable[[int, bool], StackedSession]

    def found(self, measure: bool) -> Narrowing | None:
        """What is remembered; else, where `measure` and the run is long enough, what it shows now."""
        found = self._recalled("uncompiled", measure, self._uncompiled)
        if found is None or not self.narrows(found) or not self._compiles(found):
            return found
        return self._recalled("compiled", measure, lambda: self._compiled(found))

    def narrows(self, found: Narrowing) -> bool:
        """Whether the members are cut by it."""
        return found.best([member.course for member in self.known]) < len(self.known)

    @property
    def _launches(self) -> int:
        return num_launches([member.course for member in self.known])

    def _recalled(
        self, kind: str, measure: bool, attempt: Callable[[], Narrowing | None]
    ) -> Narrowing | None:
        first = self.known[0]
        key = f"narrowing, {kind}: {pace_key(first, len(self.known), self.device)}"
        found = recall.remembered(key, Narrowing)
        if found is not None or not measure:
            return found
        try:
            with Ambient(first.built.job.seed).inside():
                found = attempt()
        except Exception:  # what raises here raises again in training, and is told there
            return None
        if found is not None:
            recall.remember(key, found)
        return found

    def _uncompiled(self) -> Narrowing | None:
        widths = narrower(len(self.known))
        if self._launches < FEWEST_LAUNCHES or not widths:
            return None
        members = len(self.known)
        key = f"narrowing, all: {pace_key(self.known[0], members, self.device)}"
        before = recall.remembered(key, Narrowing)
        if before is not None and not worth_trying(members, self._launches, before.together_s):
            return None
        # Whenever it was timed before: the others are timed now.
        together_s, _ = self._launch(members, compile=False)
        recall.remember(key, Narrowing(members, together_s, members, together_s))
        if not worth_trying(members, self._launches, together_s):
            return None
        return self._fastest(together_s, widths, compile=False)

    def _compiles(self, found: Narrowing) -> bool:
        """Whether the step of the whole stack would be compiled."""
        if self.compile != "auto":
            return bool(self.compile)
        return worth_compiling(self._launches, found.together_s, self.compile_s())

    def _compiled(self, found: Narrowing) -> Narrowing | None:
        widths = confirming(len(self.known), found.width)
        if not worth_confirming(len(widths), self._launches, found.together_s, self.compile_s()):
            return None
        together_s, compiled = self._launch(len(self.known), compile=True)
        return self._fastest(together_s, widths, compile=True) if compiled else None

    def _fastest(self, together_s: float, widths: Sequence[int], compile: bool) -> Narrowing | None:
        """Of these widths, if they ran as they were meant to: compiling may fail, or was done earlier."""
        tried: list[Narrowing] = []
        for width in widths:
            narrow_s, compiled = self._launch(width, compile)
            if compiled is not compile:
                return None
            tried.append(Narrowing(len(self.known), together_s, width, narrow_s, compiled))
        return min(tried, key=lambda one: one.narrow_s / one.width)

    def _launch(self, width: int, compile: bool) -> tuple[float, bool]:
        """Seconds of one launch of the first so many members, and whether it was compiled."""
        supplies = {row: member.course.supply(0) for row, member in enumerate(self.known[:width])}
        chunk = cut(supplies, dict.fromkeys(supplies, Cursor()), max_steps=1)
        assert chunk is not None, "members without batches have no launches"
        session = self.open(width, compile)
        try:
            with session.turn():
                return session.launch(chunk)
        finally:
            session.close()
