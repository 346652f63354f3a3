"""Members that move together: a sweep of thousands stands in one place, and is moved and cut as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from carpool.planning.cursor import Chunk, Course, Cursor, Supply, cut


@dataclass
class Cohort:
    """Rows with one course that stand at one cursor."""

    rows: tuple[int, ...]
    course: Course
    cursor: Cursor
    decides: bool
    """Whether something is decided at the end of each epoch for one of them."""
    validates: bool
    """Whether one of them has validation data."""

    def __post_init__(self) -> None:
        self.held = frozenset(self.rows)

    @property
    def through(self) -> bool:
        """Whether all their steps are enqueued."""
        return self.cursor.epoch == self.course.epochs


class Moving(Protocol):
    """What has a cohort."""

    cohort: Cohort
    decides: bool
    validates: bool


def cohorts(members: Mapping[int, Moving]) -> list[Cohort]:
    """The members' cohorts, which they share from now on; one whose data streams has its own, because only the session knows what is there."""
    alike: dict[tuple[Course, Cursor, int | None], list[int]] = {}
    for row, member in members.items():
        course, cursor = member.cohort.course, member.cohort.cursor
        alike.setdefault((course, cursor, row if course.streamed else None), []).append(row)
    found = []
    for (course, cursor, _), rows in alike.items():
        held = [members[row] for row in rows]
        decides, validates = any(one.decides for one in held), any(one.validates for one in held)
        cohort = Cohort(tuple(rows), course, cursor, decides, validates)
        for row in rows:
            members[row].cohort = cohort
        found.append(cohort)
    return found


def chunk_of(supplied: Sequence[tuple[Cohort, Supply]], max_steps: int) -> Chunk | None:
    """The next chunk of the rows of these cohorts, or None where there are none."""
    chunk = cut(
        {place: supply for place, (_, supply) in enumerate(supplied)},
        {place: cohort.cursor for place, (cohort, _) in enumerate(supplied)},
        max_steps,
    )
    if chunk is None:
        return None
    chosen = [supplied[place][0] for place in chunk.rows]
    ends = {id(supplied[place][0]) for place in chunk.ends}
    if len(chosen) == 1:
        (cohort,) = chosen
        rows = cohort.rows
        return Chunk(
            rows, (cohort.cursor,) * len(rows), chunk.size, chunk.steps, rows if id(cohort) in ends else ()
        )
    by_row = sorted(((row, cohort) for cohort in chosen for row in cohort.rows), key=lambda pair: pair[0])
    return Chunk(
        tuple(row for row, _ in by_row),
        tuple(cohort.cursor for _, cohort in by_row),
        chunk.size,
        chunk.steps,
        tuple(row for row, cohort in by_row if id(cohort) in ends),
    )


def moved(found: Iterable[Cohort], chunk: Chunk) -> bool:
    """Moves the cohorts of a chunk that was enqueued; False, and nothing moved, where the rows of one part ways."""
    found = list(found)
    for cohort in found:
        is_one = chunk.rows is cohort.rows  # all of it, and no other
        if is_one and (not chunk.ends or chunk.ends is cohort.rows):
            cohort.cursor = cohort.cursor.advanced(chunk.steps, bool(chunk.ends))
            return True
    rows, ends = frozenset(chunk.rows), frozenset(chunk.ends)
    going = [cohort for cohort in found if not cohort.held.isdisjoint(rows)]
    if any(
        not cohort.held <= rows or not (cohort.held <= ends or cohort.held.isdisjoint(ends))
        for cohort in going
    ):
        return False
    for cohort in going:
        cohort.cursor = cohort.cursor.advanced(chunk.steps, cohort.held <= ends)
    return True
