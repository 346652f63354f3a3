"""Members that move together: a sweep of thousands stands in one place, and is moved and cut as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from carpool.planning.cursor import Chunk, Course, Cursor, Supply, cut


@dataclass
class Pace:
    """Rows with one course that stand at one cursor."""

    rows: tuple[int, ...]
    course: Course
    cursor: Cursor
    decides: bool
    """Whether something is decided at the end of each epoch for one of them."""

    def __post_init__(self) -> None:
        self.held = frozenset(self.rows)

    @property
    def through(self) -> bool:
        """Whether all their steps are enqueued."""
        return self.cursor.epoch == self.course.epochs


class Moving(Protocol):
    """What has a pace."""

    pace: Pace
    decides: bool


def paces(members: Mapping[int, Moving]) -> list[Pace]:
    """The members' paces, which they share from now on; one whose data streams has its own, because only the session knows what is there."""
    alike: dict[tuple[Course, Cursor, int | None], list[int]] = {}
    for row, member in members.items():
        course, cursor = member.pace.course, member.pace.cursor
        alike.setdefault((course, cursor, row if course.streamed else None), []).append(row)
    found = []
    for (course, cursor, _), rows in alike.items():
        pace = Pace(tuple(rows), course, cursor, any(members[row].decides for row in rows))
        for row in rows:
            members[row].pace = pace
        found.append(pace)
    return found


def chunk_of(supplied: Sequence[tuple[Pace, Supply]], max_steps: int) -> Chunk | None:
    """The next chunk of the rows of these paces, or None where there are none."""
    chunk = cut(
        {place: supply for place, (_, supply) in enumerate(supplied)},
        {place: pace.cursor for place, (pace, _) in enumerate(supplied)},
        max_steps,
    )
    if chunk is None:
        return None
    chosen = [supplied[place][0] for place in chunk.rows]
    ends = {id(supplied[place][0]) for place in chunk.ends}
    if len(chosen) == 1:
        (pace,) = chosen
        rows = pace.rows
        return Chunk(
            rows, (pace.cursor,) * len(rows), chunk.size, chunk.steps, rows if id(pace) in ends else ()
        )
    by_row = sorted(((row, pace) for pace in chosen for row in pace.rows), key=lambda pair: pair[0])
    return Chunk(
        tuple(row for row, _ in by_row),
        tuple(pace.cursor for _, pace in by_row),
        chunk.size,
        chunk.steps,
        tuple(row for row, pace in by_row if id(pace) in ends),
    )


def moved(found: Iterable[Pace], chunk: Chunk) -> bool:
    """Moves the paces of a chunk that was enqueued; False, and nothing moved, where the rows of one part ways."""
    rows, ends = frozenset(chunk.rows), frozenset(chunk.ends)
    going = [pace for pace in found if not pace.held.isdisjoint(rows)]
    if any(not pace.held <= rows or not (pace.held <= ends or pace.held.isdisjoint(ends)) for pace in going):
        return False
    for pace in going:
        pace.cursor = pace.cursor.advanced(chunk.steps, pace.held <= ends)
    return True
