"""How wide a stack is: how many groups a structure is cut into, the panels that a stack runs in, and when repacking to a narrower stack pays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from carpool.memory.estimate import Estimate

T = TypeVar("T")

_HEADROOM = (
    0.8  # of the free memory, where the estimate is arithmetic: fragmentation and workspaces are not in it
)
_CACHE_SHARE = 0.5  # of the processor's cache: temporaries and others need it too
_COMPILING_SHARE = 0.5  # of what running uncompiled would take
_MOST_COMPILING_S = 300.0
_MEASURED_HEADROOM = 0.9  # where it is measured: all but the allocator's own waste is in it


def width_limit(whole: Estimate, free_bytes: int) -> int:
    """The widest stack of such members that the free memory should hold, at least 1."""
    headroom = _MEASURED_HEADROOM if whole.measured else _HEADROOM
    room = int((free_bytes - whole.fixed_bytes) * headroom)
    many = (room - whole.check_bytes) // max(1, whole.member_bytes)
    few = room // max(1, whole.member_bytes + whole.checked_bytes)  # a narrow stack takes less to be checked
    return max(1, many, few if 0 < few * whole.checked_bytes <= whole.check_bytes else 1)


def slices(members: Sequence[T], limit: int) -> list[Sequence[T]]:
    """The members in as few near-equal slices of at most `limit` as possible.

    >>> [len(part) for part in slices(range(10), 4)]
    [4, 3, 3]
    """
    count = -(-len(members) // limit)
    edges = [-(-len(members) * i // count) for i in range(count + 1)]
    return [members[a:b] for a, b in pairwise(edges)]


def spread(rows: Sequence[T], most: int) -> Sequence[T]:
    """At most so many of them, evenly spread from the first to the last.

    >>> spread(range(10), 4), spread("ab", 4), spread("abc", 1)
    ([0, 3, 6, 9], 'ab', ['a'])
    """
    if len(rows) <= most:
        return rows
    return [rows[i * (len(rows) - 1) // max(1, most - 1)] for i in range(most)]


def num_panels(width: int, member_bytes: int, cache_bytes: int) -> int:
    """In how many parts a stack runs so that what a part's step passes over stays in the cache; one where that is not known.

    >>> num_panels(512, 64 << 10, 32 << 20), num_panels(8, 64 << 10, 32 << 20), num_panels(512, 64 << 10, 0), num_panels(4, 64 << 20, 32 << 20)
    (2, 1, 1, 4)
    """
    if not cache_bytes:
        return 1
    most = max(1, int(cache_bytes * _CACHE_SHARE) // max(1, member_bytes))
    return -(-width // most)


def bucket(active: int) -> int:
    """The bucket width for so many active members: a power of two, so that few widths are ever compiled.

    >>> [bucket(n) for n in (1, 3, 8, 9)]
    [1, 4, 8, 16]
    """
    return 1 << max(0, active - 1).bit_length()


def repacked(width: int, active: int, launches_left: int, launch_s: float, prepare_s: float) -> int | None:
    """The width worth repacking to, or None.

    A launch costs about in proportion to its width; the saving must exceed what preparing the narrower step
    (trace, compile, capture) took the last time.

    >>> repacked(width=64, active=7, launches_left=1000, launch_s=0.01, prepare_s=2.0)
    8
    >>> repacked(width=64, active=7, launches_left=100, launch_s=0.01, prepare_s=2.0) is None
    True
    """
    target = bucket(active)
    if target > width // 2:
        return None
    saving_s = launches_left * launch_s * (1 - target / width)
    return target if saving_s > prepare_s else None


def compiling_budget_s(remaining_s: float) -> float:
    """Processor seconds that compiling a step may take whose launches would take so long uncompiled.

    A compiled step saves about three quarters of them (measured: docs/performance.md). Half of them keeps the guess safe,
    and nothing is worth more than a few minutes.

    >>> compiling_budget_s(12.0), compiling_budget_s(86400.0)
    (6.0, 300.0)
    """
    return min(_MOST_COMPILING_S, remaining_s * _COMPILING_SHARE)
