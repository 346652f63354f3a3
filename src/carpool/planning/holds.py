"""A hold: how much of a job's step Python's interpreter lock is held, and what that says about the strategy, in words."""

from __future__ import annotations

from dataclasses import dataclass, field

from carpool.planning.trials import origin

HELD = 0.4  # the share of a step from which jobs side by side in one process only wait for each other
LEAST_S = 10.0  # work of a job that pays for a process: starting one and importing a framework takes seconds


@dataclass(frozen=True)
class Hold:
    """The share of a step's time, 0 to 1, and how long the step takes alone."""

    share: float
    step_s: float
    on: str = field(default="", compare=False)
    """The day on which it was measured, where that was in another run."""

    @property
    def origin(self) -> str:
        """Where the answer comes from, in words."""
        return origin(self.on)

    def isolates(self, steps: int) -> bool:
        """Whether so many steps gain from a process of their own.

        >>> Hold(share=0.9, step_s=0.01).isolates(2000), Hold(0.9, 0.01).isolates(500), Hold(0.1, 0.01).isolates(2000)
        (True, False, False)
        """
        return self.share >= HELD and steps * self.step_s > LEAST_S

    def __str__(self) -> str:
        return f"a step holds Python's interpreter lock for {100 * self.share:.0f} % of its {1e3 * self.step_s:.3g} ms"
