"""The one training loop: it cuts chunks, lets a session advance them, and decides between chunks.

Covers epochs, histories, validation, early stopping, callbacks, divergence, failures of single rows, checking fused
steps and repacking. Does not cover opening sessions or choosing which runs next (`interleaved.py`), nor a single step
(`adapters/`). It is a generator that pauses after every chunk and wherever it would have to wait, and says for what, so
several sessions can share a device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from carpool import collector
from carpool.adapters.base import (
    DeviceFull,
    FusedSession,
    JobState,
    MetricColumns,
    MetricRow,
    Reading,
    Session,
    StepFailure,
    Ticket,
    Told,
    Unstackable,
)
from carpool.errors import StepError, failure, sentence
from carpool.events import (
    BatchesRead,
    Emit,
    EpochEnded,
    GroupAdvanced,
    GroupResized,
    GroupTried,
    GroupVerified,
    hears,
)
from carpool.executors.books import Entry
from carpool.executors.cohort import Cohort, chunk_of, cohorts, moved
from carpool.executors.journal import Journal
from carpool.executors.member import Member
from carpool.planning.cursor import MAX_CHUNK_STEPS, Chunk, Supply, most_steps, stretch
from carpool.planning.widths import repacked, spread
from carpool.result import Outcome
from carpool.stopping import Patience

FIRST_CHECKED = 64  # members checked at the first step; a wider group checks so many spread over it: a few ms each on an H200
_SAMPLE_ROWS = 4  # members that verify=True checks at the start of each epoch


Ready = Callable[[], bool]
"""What a paused driver waits for: whether it can go on now."""


def at_once() -> bool:
    return True


class Unfit(Exception):
    """A fused group turned out not to equal its members alone."""


@dataclass(frozen=True)
class _Enqueued:
    """A chunk that a session was given, and the validation that was enqueued after it, if its rows' epochs end with it."""

    session: Session
    ticket: Ticket
    is_quiet: bool
    """Whether it is read without a look at every row: nothing hangs on it."""
    validated: Reading | None

    def done(self) -> bool:
        """Whether reading it would not wait."""
        return self.session.done(self.ticket) and (self.validated is None or self.validated.done())


@dataclass(frozen=True)
class _Stretched:
    """Whole epochs that a session was told at once."""

    told: Told

    def done(self) -> bool:
        return self.told.done()


class Finish(Protocol):
    """Takes a member that has reached its outcome, with its last state."""

    def __call__(
        self, member: Member, outcome: Outcome, state: JobState | None, error: BaseException | None = None
    ) -> None: ...


class Driver:
    """Drives one session's members to their ends."""

    def __init__(
        self, session: Session, members: Sequence[Member], finish: Finish, emit: Emit, group: int
    ) -> None:
        self._session = session
        self._members = dict(enumerate(members))
        self._cohorts = cohorts(self._members)
        self._journal = Journal(emit)
        self._finish = finish
        self._emit = emit
        self._group = group
        self._pending: list[_Enqueued | _Stretched] = []
        self._is_thinned = False
        """Whether members have ended since the stack was last packed."""
        self.slice_s: float | None = None
        """The seconds a chunk should take at most, while others wait for the device."""

    @property
    def unfinished(self) -> tuple[Member, ...]:
        self._journal.write(self._members)
        return tuple(self._members.values())

    def run(self, verify: bool = False, measure: bool = False) -> Iterator[Ready]:
        """Trains until every member has an outcome, pausing after each chunk and before each wait.

        `measure` gives a fused group up where it is slower than its members one after another.
        """
        yield from self._prepared(self._cut(1))
        if measure:
            self._try()  # before the check, which costs more
        yield from self._check_first_steps()
        while any(not cohort.through for cohort in self._cohorts):
            self._repack()
            if not verify and (told := self._tell_epochs()) is not None:
                yield from self._follow(told)
                continue
            chunk = self._cut(self._most_steps())
            if chunk is None:
                yield self._has_supply
                continue
            due = verify and any(cursor.batch == 0 and cursor.epoch > 0 for cursor in chunk.cursors)
            if due and not self._check(chunk, _sample(chunk)):
                continue
            yield from self._prepared(chunk)
            yield from self._advance(chunk)
        yield from self._settle()
        self._end(tuple(self._members), Outcome.COMPLETED)  # who ended exactly where an epoch had ended

    def _prepared(self, chunk: Chunk | None) -> Iterator[Ready]:
        """Waits for a compiler, if the chunk must: other sessions go on meanwhile."""
        is_through = self._session.preparing(chunk) if chunk is not None else None
        if is_through is not None:
            yield is_through

    def interrupt(self) -> None:
        """Ends every member where it stands."""
        self._settle_now()
        self._end(tuple(self._members), Outcome.INTERRUPTED)

    def salvage(self) -> dict[str, tuple[Member, JobState]]:
        """The members that can go on in another session from where they stand, and their states; the books are closed for it."""
        self._settle_now()
        rows = [row for row, m in self._members.items() if m.movable]
        states = self._session.state(rows) if rows else ()
        return {
            self._members[row].name: (self._members[row], replace(state, cursor=self._members[row].cursor))
            for row, state in zip(rows, states, strict=True)
        }

    # Chunks

    def _regroup(self) -> None:
        """After members left, or parted ways."""
        self._cohorts = cohorts(self._members)

    def _cut(self, max_steps: int, rows: Collection[int] | None = None) -> Chunk | None:
        """The next chunk of what can run now, of these rows or of all."""
        found = [
            (cohort, supply)
            for cohort, supply in self._supplies()
            if rows is None or not cohort.held.isdisjoint(rows)
        ]
        chunk = chunk_of(found, max_steps)
        if chunk is None or rows is None or frozenset(rows).issuperset(chunk.rows):
            return chunk
        return chunk.of(rows)

    def _asked(self) -> list[tuple[Cohort, Supply | BaseException]]:
        """What can run now, or what its input raised."""
        going = [cohort for cohort in self._cohorts if not cohort.through]
        streamed = [cohort.rows[0] for cohort in going if cohort.course.streamed]
        there = self._session.supply(streamed) if streamed else {}
        found: list[tuple[Cohort, Supply | BaseException]] = []
        for cohort in going:
            if not cohort.course.streamed:
                found.append((cohort, cohort.course.supply(cohort.cursor.batch)))
            elif cohort.rows[0] in there:
                found.append((cohort, there[cohort.rows[0]]))
        return found

    def _supplies(self) -> list[tuple[Cohort, Supply]]:
        """What can run now. Rows whose input raised fail."""
        found = self._asked()
        errors = {cohort.rows[0]: one for cohort, one in found if isinstance(one, BaseException)}
        if errors:
            self._settle_now()
            self._fail(errors)
        known = {cohort.rows: one for cohort, one in found if isinstance(one, Supply)}
        return [(cohort, known[cohort.rows]) for cohort in self._cohorts if cohort.rows in known]

    def _has_supply(self) -> bool:
        """Whether some row can run, or has input that raises; or there is nothing left to wait for."""
        try:
            return all(cohort.through for cohort in self._cohorts) or bool(self._asked())
        except Unstackable:
            return True

    def _most_steps(self) -> int:
        """How many steps fit the slice, as far as the session knows."""
        if not isinstance(self._session, FusedSession):
            return MAX_CHUNK_STEPS
        launch_s, _ = self._session.timing()
        return most_steps(launch_s, self.slice_s)

    def _advance(self, chunk: Chunk) -> Iterator[Ready]:
        errors: Mapping[int, BaseException] = {}
        full: DeviceFull | None = None
        tickets: Sequence[Ticket] = ()
        try:
            tickets = [self._session.advance(chunk)]
        except StepFailure as failure:
            tickets, errors = failure.tickets, failure.errors
        except DeviceFull as raised:
            if not raised.tickets:
                raise
            tickets, full = raised.tickets, raised
        waits = [self._note(ticket) for ticket in tickets]
        if full is not None:
            raise full
        if errors:
            self._settle_now()
            for row in errors.keys() & self._members.keys():
                self._members[row].tear()
            self._fail(errors)
        yield from self._settle(leave=0 if any(waits) else self._session.in_flight)
        yield at_once

    def _note(self, ticket: Ticket) -> bool:
        """Moves the rows of a chunk that was enqueued, and their validation after it; whether something hangs on what it shows."""
        done = ticket.chunk
        self._move(ticket)
        going = [cohort for cohort in self._cohorts if not cohort.held.isdisjoint(done.ends)]
        waits = any(self._session.schedules or cohort.decides or cohort.through for cohort in going)
        validated = None
        if not waits and any(cohort.validates for cohort in going):
            validated = self._begin_validation(done.ends)
            waits = validated is None
        is_quiet = not waits and not hears(self._emit, EpochEnded)
        self._pending.append(_Enqueued(self._session, ticket, is_quiet, validated))
        self._emit(GroupAdvanced(self._group, done.steps * len(done.rows)))
        self._report_input(done)
        return waits

    def _tell_epochs(self) -> Told | None:
        """Whole epochs of the rows that are furthest behind, told at once, where nothing is decided in them and the session takes them."""
        cohort = min((one for one in self._cohorts if not one.through), key=lambda one: one.cursor.epoch)
        if cohort.decides or self._session.schedules:
            return None
        asked = stretch(cohort.rows, cohort.course, cohort.cursor, cohort.course.epochs, cohort.validates)
        told = self._session.advance_epochs(asked) if asked is not None else None
        if told is not None:
            cohort.cursor = told.stretch.end
        return told

    def _follow(self, told: Told) -> Iterator[Ready]:
        self._pending.append(_Stretched(told))
        self._emit(
            GroupAdvanced(self._group, told.stretch.epochs * told.stretch.steps * len(told.stretch.rows))
        )
        yield from self._settle(leave=self._session.in_flight)
        yield at_once

    def _begin_validation(self, rows: Sequence[int]) -> Reading | None:
        """What is raised here is raised again where it is waited for, and told there."""
        try:
            return self._session.begin_evaluating(rows)
        except BaseException as error:
            failure(error)
            return None

    def _move(self, ticket: Ticket) -> None:
        """Moves the rows of a chunk that was enqueued."""
        done = ticket.chunk
        if not ticket.final and moved(self._cohorts, done):
            return
        ends = frozenset(done.ends)
        for row in done.rows:
            member = self._members[row]
            cursor = member.cursor.advanced(done.steps, row in ends)
            member.stand(cursor, cursor.epoch if ticket.final else None)
        self._regroup()

    def _report_input(self, chunk: Chunk) -> None:
        if not any(cohort.course.streamed for cohort in self._cohorts):
            return
        for row in chunk.rows:
            if self._members[row].course.streamed and (found := self._session.depth(row)) is not None:
                self._emit(BatchesRead(self._members[row].name, chunk.steps, *found))

    def _settle(self, leave: int = 0) -> Iterator[Ready]:
        """Reads what the enqueued chunks computed, oldest first, and takes the decisions that hang on it.

        The last `leave` chunks stay enqueued: while nothing is decided the device runs on ahead of the books.
        """
        while len(self._pending) > leave:
            oldest = self._pending[0]
            if not oldest.done():
                yield oldest.done
            self._pending.pop(0)
            if isinstance(oldest, _Stretched):
                self._settle_epochs(oldest.told)
            else:
                self._settle_one(oldest)

    def _settle_now(self) -> None:
        for _ in self._settle():
            pass
        self._journal.write(self._members)

    def _settle_one(self, enqueued: _Enqueued) -> None:
        ends, shown = enqueued.ticket.chunk.ends, self._session.metrics(enqueued.ticket)
        validated = enqueued.validated.read() if enqueued.validated is not None else None
        if enqueued.is_quiet and isinstance(shown, MetricColumns) and self._is_plain(shown, ends, validated):
            self._journal.add(Entry(shown, bool(ends), validated), self._members)
            return
        self._journal.write(self._members)
        rows = [row for row in shown if row.row in self._members]
        for row in rows:
            self._members[row.row].count(row)
        diverged = [row.row for row in rows if row.diverged]
        for row in diverged:
            member = self._members[row]
            member.stand(member.cursor._replace(step=member.steps))
        self._end(diverged, Outcome.DIVERGED)
        self._fail_late(shown.errors if isinstance(shown, MetricColumns) else {})
        self._end_epochs([row for row in ends if row in self._members], validated)

    def _settle_epochs(self, told: Told) -> None:
        """Nothing hangs on them, unless a row did not go through them, or somebody hears of each of its epochs."""
        each = hears(self._emit, EpochEnded)
        columns = None if each or not self._are_there(told.stretch.rows) else told.columns()
        if columns is not None:
            self._journal.add_epochs(columns, self._members)
            return
        for ticket, validated in told.tickets():
            self._settle_one(_Enqueued(self._session, ticket, not each, validated))

    def _is_plain(self, shown: MetricColumns, ends: Sequence[int], validated: MetricColumns | None) -> bool:
        """Whether all rows went on as one: none diverged or is gone, and an epoch ended for all or for none."""
        return (
            not shown.diverged.any()
            and not shown.errors
            and (not ends or ends == shown.rows)
            and (validated is None or validated.rows == shown.rows)
            and self._are_there(shown.rows)
        )

    def _are_there(self, rows: tuple[int, ...]) -> bool:
        """Whether none of these rows is gone: who leaves is in no cohort."""
        return any(rows is cohort.rows for cohort in self._cohorts) or self._members.keys() >= frozenset(rows)

    # Epochs

    def _end_epochs(self, rows: Sequence[int], validated: Iterable[MetricRow] | None) -> None:
        """`validated` is what validation gave, where it was enqueued with the epoch's last steps."""
        if not rows:
            return
        metrics = {row: self._members[row].epoch_metrics() for row in rows}
        shown, failed = self._evaluated(rows) if validated is None else (validated, {})
        for row in shown:
            means = {f"val_{name}": total / max(1, row.samples) for name, total in row.sums.items()}
            metrics.get(row.row, {}).update(means)  # of rows that diverged meanwhile, to nobody
        for row in rows:
            if row not in failed and (error := self._end_epoch(row, metrics[row])) is not None:
                failed[row] = error
        self._fail(failed)
        self._stop([row for row in rows if row not in failed])

    def _evaluated(self, rows: Sequence[int]) -> tuple[Sequence[MetricRow], dict[int, BaseException]]:
        """The rows' validation. Where that raises, each is tried alone: who raises again has failed."""
        try:
            return self._session.evaluate(rows), {}
        except DeviceFull:
            raise
        except BaseException as error:
            failure(error)
            if len(rows) == 1:
                return (), {rows[0]: error}
        shown: list[MetricRow] = []
        failed: dict[int, BaseException] = {}
        for row in rows:
            alone, errors = self._evaluated([row])
            shown += alone
            failed |= errors
        return shown, failed

    def _end_epoch(self, row: int, metrics: Mapping[str, float]) -> BaseException | None:
        """Writes the history, steps the schedule, calls the callbacks; what these raise is the job's own failure."""
        member = self._members[row]
        raised: BaseException | None = None
        try:
            metrics = {**metrics, **(self._session.end_epoch(row, metrics) or {})}
        except BaseException as error:
            failure(error)
            raised = error
        event = EpochEnded(member.name, member.epochs_ended, metrics)
        member.end_epoch(metrics)
        self._emit(event)
        if raised is not None:
            return raised
        try:
            if member.patience is not None:
                member.patience = member.patience.after(event.epoch, metrics)
            member.call_back(event)
            self._check_undisturbed(row)
        except BaseException as error:
            failure(error)
            return error
        return None

    def _check_undisturbed(self, row: int) -> None:
        """A fused job's weights and code are in the stack: what a callback changes elsewhere would be lost in silence."""
        member = self._members[row]
        if not member.job.callbacks or not isinstance(self._session, FusedSession):
            return
        changed = self._session.disturbed(row)
        if changed is not None:
            raise StepError(
                f"Job {member.name!r}: "
                + sentence(
                    "callbacks of a fused job to change nothing but hyper-parameters of its optimizer",
                    f"a change of {changed}",
                    'pass strategy="in_turn", or change it without a callback',
                )
            )

    def _stop(self, rows: Sequence[int]) -> None:
        """Ends the rows that are through, stopped early or complete, with their best weights where asked for."""
        watched = {row: patience for row in rows if (patience := self._members[row].patience) is not None}
        self._session.keep([row for row, p in watched.items() if p.improved and p.policy.restore_best])
        complete = [
            row for row in rows if self._members[row].epochs_ended == self._members[row].course.epochs
        ]
        going = frozenset(rows) - frozenset(complete)
        stopped = [
            row
            for row in rows
            if row in going
            and (((p := watched.get(row)) and p.exhausted) or self._session.wants_to_stop(row))
        ]
        self._restore((*complete, *stopped), watched)
        self._end(complete, Outcome.COMPLETED)
        self._end(stopped, Outcome.STOPPED)
        self._is_thinned |= bool(complete or stopped)

    def _restore(self, rows: Sequence[int], watched: Mapping[int, Patience]) -> None:
        """Puts the best weights of rows that end back where that was asked for, and notes which they are."""
        best = {
            row: p.best_epoch
            for row in rows
            if (p := watched.get(row)) and p.policy.restore_best and p.best_epoch >= 0
        }
        self._session.revert(list(best))
        for row in rows:
            self._members[row].restored = best.get(row, self._session.restored(row))

    # Ends

    def _end(self, rows: Sequence[int], outcome: Outcome) -> None:
        if not rows:
            return
        self._journal.write(self._members)
        with collector.put_off():
            for row, state in zip(rows, self._session.leave(rows), strict=True):
                member = self._members.pop(row)
                self._finish(member, outcome, replace(state, cursor=member.cursor))
        self._regroup()

    def _fail_late(self, errors: Mapping[int, BaseException]) -> None:
        """Rows that raised in a chunk that was enqueued whole: they stand where they raised."""
        for row in errors.keys() & self._members.keys():
            member = self._members[row]
            member.stand(member.cursor._replace(step=member.steps))
            member.tear()
        self._fail({row: error for row, error in errors.items() if row in self._members})

    def _fail(self, errors: Mapping[int, BaseException]) -> None:
        self._journal.write(self._members)
        for row, error in errors.items():
            failure(error)
            if row not in self._members:
                continue  # it diverged in the chunk in which it raised, and has ended
            state = self._session.leave([row])[0]
            member = self._members.pop(row)
            self._finish(member, Outcome.FAILED, replace(state, cursor=member.cursor), error)
        if errors:
            self._regroup()

    # What only fused groups need

    def _check_first_steps(self) -> Iterator[Ready]:
        if not isinstance(self._session, FusedSession):
            return
        unchecked = [row for cohort in self._cohorts if not cohort.through for row in cohort.rows]
        while unchecked:
            chunk = self._cut(1, unchecked)
            if chunk is None:
                yield self._has_supply
            else:
                checked = frozenset(
                    chunk.rows if self._check(chunk, spread(chunk.rows, FIRST_CHECKED)) else ()
                )
                unchecked = [row for row in unchecked if row not in checked]
            unchecked = [row for row in unchecked if row in self._members]

    def _try(self) -> None:
        if not isinstance(self._session, FusedSession):
            return
        chunk = self._cut(1)
        trial = self._session.trial(chunk) if chunk is not None else None
        if trial is not None:
            self._emit(GroupTried(self._group, trial))
            if not trial.pays:
                raise Unfit(f"measured: {trial}")

    def _check(self, chunk: Chunk, rows: Sequence[int]) -> bool:
        """Raises when a step differs. False when a row ended before it could be told: the chunk is cut anew."""
        if not isinstance(self._session, FusedSession):
            return True
        self._settle_now()
        if not self._members.keys() >= set(chunk.rows):
            return False
        try:
            check = self._session.check(chunk, rows)
        except StepFailure as failure:
            self._fail(failure.errors)
            return False
        if check.mismatch is not None:
            raise Unfit(check.mismatch)
        if check.checked:
            self._emit(GroupVerified(self._group, check.checked, check.max_difference, check.proof))
        return True

    def _repack(self) -> None:
        """Where members have ended. Not while a chunk is enqueued: it tells of rows where they are now."""
        if not self._is_thinned or self._pending or not isinstance(self._session, FusedSession):
            return
        self._is_thinned = False
        launch_s, prepare_s = self._session.timing()
        left = max(cohort.course.steps - cohort.cursor.step for cohort in self._cohorts)
        width = self._session.width
        target = repacked(width, len(self._members), left, launch_s, prepare_s)
        if target is None:
            return
        placed = self._session.resize(target)
        self._members = {placed[row]: member for row, member in self._members.items()}
        self._regroup()
        self._emit(GroupResized(self._group, width, self._session.width))


def _sample(chunk: Chunk) -> tuple[int, ...]:
    """A few rows, others at each epoch, so that a long run comes round to all of them.

    Of those that begin one: in the middle of an epoch a row may hold gradients of batches before, which its step alone knows nothing of.
    """
    begin = [place for place, cursor in enumerate(chunk.cursors) if cursor.batch == 0]
    start = chunk.cursors[begin[0]].epoch * _SAMPLE_ROWS
    return tuple(chunk.rows[begin[(start + i) % len(begin)]] for i in range(min(_SAMPLE_ROWS, len(begin))))
