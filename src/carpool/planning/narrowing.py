"""A narrowing: a launch of all members beside one of a narrower stack, in seconds. When cutting a group pays, in words.

A wide stack can be slower for each member than a narrow one: on a CPU its weights fall out of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from carpool.planning.cursor import MAX_CHUNK_STEPS, SLICE_S, Course, launches
from carpool.planning.trials import duration

WINS = 1.15  # how many times faster narrower stacks must be: single launches waver by some percent
FEWEST_LAUNCHES = 100  # for fewer it is not worth timing one
TRACE_S = 0.3  # tracing a small network's step at one more width, on one core
CHUNK_S = 0.002  # what a chunk costs the host on a CPU, with an epoch's end
_COMPILED = 0.25  # of an uncompiled launch's time: about what a compiled one takes (docs/performance.md)
_TIMED = 6  # launches that timing one width takes at most
_MOST_PARTS = 64  # as many groups as are open at once


def narrower(members: int) -> tuple[int, ...]:
    """The widths to try: near powers of four, at most half as wide, that cut the members into at most 64 even stacks.

    >>> narrower(256), narrower(20), narrower(22), narrower(6)
    ((64, 16, 4), (4,), (4,), ())
    """
    powers = [4**exponent for exponent in range(members.bit_length() // 2, 0, -1)]
    fitting = [width for width in powers if 2 * width <= members <= _MOST_PARTS * width]
    return tuple(-(-members // -(-members // width)) for width in fitting)


def confirming(members: int, width: int) -> tuple[int, ...]:
    """The widths to try compiled where this one was the fastest uncompiled: a compiled launch costs the host less, so maybe the next.

    >>> confirming(256, 64), confirming(256, 4)
    ((64, 16), (4,))
    """
    return tuple(narrow for narrow in narrower(members) if narrow <= width)[:2]


def worth_trying(members: int, num_launches: int, together_s: float) -> bool:
    """Whether the least gain that would count exceeds what it takes to look for it.

    >>> worth_trying(members=64, num_launches=1000, together_s=0.05), worth_trying(64, 1000, 0.001)
    (True, False)
    """
    gain_s = (1 - 1 / WINS) * num_launches * together_s
    return gain_s > sum(TRACE_S + _TIMED * together_s * width / members for width in narrower(members))


def worth_confirming(num_widths: int, num_launches: int, together_s: float, compile_s: float) -> bool:
    """The same where every width has to be compiled; `together_s` is a launch of all members uncompiled.

    >>> worth_confirming(1, num_launches=4000, together_s=0.05, compile_s=6.0), worth_confirming(1, 400, 0.05, 6.0)
    (True, False)
    """
    return (1 - 1 / WINS) * num_launches * together_s * _COMPILED > num_widths * compile_s


@dataclass(frozen=True)
class Narrowing:
    """Seconds that one launch of all members takes, and one of the fastest narrower stack that was tried."""

    members: int
    together_s: float
    width: int
    narrow_s: float
    compiled: bool = False

    @property
    def parts(self) -> int:
        return -(-self.members // self.width)

    def best(self, courses: Sequence[Course]) -> int:
        """The width at which members with these courses are through first; the narrower one only where it is clearly sooner.

        >>> narrowing = Narrowing(members=64, together_s=0.5, width=16, narrow_s=0.05)
        >>> narrowing.best([Course(2048, 64, 10)]), narrowing.best([Course(64, 64, 1)])
        (16, 64)
        """
        steps = num_launches(courses)
        epochs = max(course.epochs * -(-course.batches // MAX_CHUNK_STEPS) for course in courses)
        turns = steps * self.narrow_s / SLICE_S
        together_s = steps * self.together_s + epochs * CHUNK_S
        apart_s = TRACE_S + self.parts * (steps * self.narrow_s + max(epochs, turns) * CHUNK_S)
        return self.width if together_s >= WINS * apart_s else self.members

    def told(self, best: int) -> str:
        """What was measured, for stacks of this width.

        >>> Narrowing(members=64, together_s=0.0217, width=16, narrow_s=0.0034).told(16)
        "stacks of 16: a member's step takes 0.212 ms there, 0.339 ms in one of 64 (uncompiled)"
        """
        kind = "compiled" if self.compiled else "uncompiled"
        wide, narrow = duration(self.together_s / self.members), duration(self.narrow_s / self.width)
        if best == self.width:
            return f"stacks of {self.width}: a member's step takes {narrow} there, {wide} in one of {self.members} ({kind})"
        return f"one stack: a member's step takes {wide} there, {narrow} in stacks of {self.width} ({kind})"


def num_launches(courses: Sequence[Course]) -> int:
    """How many launches a stack of members with these courses has.

    >>> num_launches([Course(10, 4, 2), Course(8, 4, 2)])
    6
    """
    return sum(launches(courses).by_size.values())
