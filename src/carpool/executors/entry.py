"""What waits to be opened, and what becomes of it when the device has no room for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from carpool.adapters.base import JobState
from carpool.executors.member import Member
from carpool.planning.plan import Group

Saved = Mapping[str, tuple[Member, JobState]]


@dataclass(frozen=True)
class Entry:
    """What waits to be opened: a group, or one job of it. `plain` after a stack of it did not hold, or was slower."""

    number: int
    group: Group
    names: tuple[str, ...]
    strategy: str
    reason: str
    plain: bool = False
    alone: bool = False
    """Whether it waits until nothing else is open: it did not fit beside others."""
    saved: Saved = field(default_factory=dict)
    """Who goes on from where it stood in another session."""

    @property
    def holder(self) -> str:
        return f"group {self.number}: {self.names[0]}{' alone' if self.plain else ''}"

    @property
    def bytes(self) -> int:
        memory = self.group.memory
        return memory.fixed_bytes + memory.member_bytes * len(self.names) + memory.check_bytes

    def parts(self, names: tuple[str, ...], saved: Saved, error: str) -> list[Entry]:
        """These of its members again, each part alone with the device: a group in halves, a job as it is."""
        half = -(-len(names) // 2)
        found = [part for part in (names[:half], names[half:]) if part]
        how = f"{len(found)} groups of about {half}" if len(found) > 1 else "alone with the device"
        kept = f"{len(saved)} of {len(names)} from where they stood"
        reason = f"out of memory ({error}): on as {how}, {kept}"
        return [
            replace(
                self,
                names=part,
                saved={name: saved[name] for name in part if name in saved},
                alone=True,
                strategy="interleaved" if len(part) == 1 and self.strategy == "fused" else self.strategy,
                reason=reason,
            )
            for part in found
        ]
