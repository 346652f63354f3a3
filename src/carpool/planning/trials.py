"""A trial: a step together beside a step alone, in seconds. What it says about the strategy, in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Form = Literal["traced", "compiled", "resident"]
"""How a step runs: operator by operator, as the framework's compiler makes it, or as machine code of carpool's own."""

SLOWER = 0.95  # together must be at least this fast, as a share of one after another, or it is not done


@dataclass(frozen=True)
class Trial:
    """Seconds that one launch of all members takes, and one step of a member alone. `compiled` and `form` say how they ran together."""

    members: int
    together_s: float
    alone_s: float
    compiled: bool = False
    form: str = ""
    """Where there is more than one."""
    on: str = field(default="", compare=False)
    """The day on which it was measured, where that was in another run."""

    @property
    def origin(self) -> str:
        """Where the answer comes from, in words."""
        return origin(self.on)

    @property
    def gain(self) -> float:
        """How many times faster together is than one after another.

        >>> Trial(members=8, together_s=0.002, alone_s=0.001).gain
        4.0
        """
        return self.members * self.alone_s / self.together_s

    @property
    def pays(self) -> bool:
        return self.gain >= SLOWER

    def __str__(self) -> str:
        kind = "compiled" if self.compiled else "uncompiled"
        if self.form:
            kind = self.form if self.form == "resident" else f"{kind}, {self.form}"
        if self.members == 1:
            return f"a step as a stack of one takes {duration(self.together_s)} ({kind}), an ordinary one {duration(self.alone_s)}"
        return (
            f"a step of {self.members} together takes {duration(self.together_s)} ({kind}), "
            f"one after another {duration(self.members * self.alone_s)}"
        )


def origin(on: str) -> str:
    """What introduces a measurement.

    >>> origin(""), origin("2026-01-31")
    ('measured on this device', 'measured on this device on 2026-01-31')
    """
    return f"measured on this device{f' on {on}' if on else ''}"


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(0.0123), duration(12.3)
    ('12.3 ms', '12.3 s')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
