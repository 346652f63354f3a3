"""A trial: a step together beside a step alone, in seconds. What it says about the strategy, in words."""

from __future__ import annotations

from dataclasses import dataclass

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
        kind = ("compiled" if self.compiled else "uncompiled") + (f", {self.form}" if self.form else "")
        if self.members == 1:
            return f"a step as a stack of one takes {duration(self.together_s)} ({kind}), an ordinary one {duration(self.alone_s)}"
        return (
            f"a step of {self.members} together takes {duration(self.together_s)} ({kind}), "
            f"one after another {duration(self.members * self.alone_s)}"
        )


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(0.0123), duration(12.3)
    ('12.3 ms', '12.3 s')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
