"""A job that trains by its model's own `fit`, in a thread that only runs while the job has its turn.

For what no program can run: data that Keras reads batch by batch, eager steps, callbacks that look inside. All is as Keras does it;
between two batches the thread waits, so that other jobs have their turns, and the interpreter never runs two of them at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from keras import callbacks as keras_callbacks
from keras.src.backend.common.global_state import GLOBAL_STATE_TRACKER

from carpool.adapters.base import JobState, MetricRow, Session, StepFailure, Ticket
from carpool.adapters.keras.fit import Fit
from carpool.adapters.keras.order import Ordered, Reordered, as_arrays, in_order
from carpool.adapters.keras.seeds import draws_from
from carpool.ambient import Ambient
from carpool.planning.cursor import MAX_CHUNK_STEPS, Chunk, Cursor, Supply

_SLICE_S = 0.05


class _Ended(BaseException):
    """Unwinds a fit whose session is closed."""


class OwnFit(Session):
    """A fit between two of its batches."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._turn, self._pause = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=f"carpool fit {fit.job.name}", daemon=True)
        self._ambient = Ambient(fit.job.seed)
        self._enough_s = 0.0
        self._steps = 0
        self._logs: dict[str, float] | None = None
        self._error: BaseException | None = None
        self._is_over = self._is_closed = False
        self._globals = dict(vars(GLOBAL_STATE_TRACKER))
        """Keras' own state is a thread's own: the fit finds that of the thread it was asked for in."""

    # The thread's side

    def _run(self) -> None:
        self._turn.acquire()
        vars(GLOBAL_STATE_TRACKER).update(self._globals)
        draws_from(self._fit.job.seed)
        try:
            if not self._is_closed:
                self._fit.model.fit(**_arguments(self._fit, self))
        except _Ended:
            pass
        except BaseException as error:
            self._error = error
        self._is_over = True
        self._pause.release()

    def stepped(self) -> None:
        """A batch is through: the thread waits if the turn is over."""
        self._steps += 1
        if time.perf_counter() > self._enough_s or self._steps == MAX_CHUNK_STEPS:
            self._wait()

    def epoch_ended(self, epoch: int, logs: Mapping[str, float]) -> None:
        """The thread waits, but for the last epoch: then all that `fit` does at its end comes first."""
        self._logs = dict(logs)
        if epoch + 1 < self._fit.job.epochs and not self._fit.model.stop_training:
            self._wait()

    def _wait(self) -> None:
        self._pause.release()
        self._turn.acquire()
        if self._is_closed:
            raise _Ended

    # Our side

    def supply(self, rows: Sequence[int]) -> Mapping[int, Supply | BaseException]:
        return {row: Supply(size=1, steps=MAX_CHUNK_STEPS, ends=False) for row in rows}

    def advance(self, chunk: Chunk) -> Ticket:
        """Lets the fit run to the end of the slice, of an epoch, or of itself."""
        if not self._thread.is_alive() and not self._is_over:
            self._thread.start()
        self._steps, self._logs = 0, None
        with self._ambient.inside(self._thread.ident):
            self._enough_s = time.perf_counter() + _SLICE_S
            self._turn.release()
            self._pause.acquire()
        ends = chunk.rows if self._logs is not None else ()
        done = Chunk(chunk.rows, chunk.cursors, 1, self._steps, ends)
        stops = ends and self.wants_to_stop(0)  # who wants to stop is asked
        ticket = Ticket(done, self._logs, final=self._is_over and self._error is None and not stops)
        if self._error is not None:
            raise StepFailure([ticket], {chunk.rows[0]: self._error}) from self._error
        return ticket

    def metrics(self, ticket: Ticket) -> tuple[MetricRow, ...]:
        sums = dict(ticket.payload or {})
        return (MetricRow(0, ticket.chunk.steps, len(ticket.chunk.ends), sums),)

    def evaluate(self, rows: Sequence[int]) -> tuple[MetricRow, ...]:
        return ()

    def end_epoch(self, row: int, metrics: Mapping[str, float]) -> None:
        return

    def wants_to_stop(self, row: int) -> bool:
        return bool(getattr(self._fit.model, "stop_training", False)) and self._is_over

    def keep(self, rows: Sequence[int]) -> None:
        return

    def revert(self, rows: Sequence[int]) -> None:
        return

    def restored(self, row: int) -> int | None:
        return self._fit.moments.restored(self._fit.options.initial_epoch)

    def state(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        return (JobState(Cursor(), {}),)

    def leave(self, rows: Sequence[int]) -> tuple[JobState, ...]:
        self.close()
        return self.state(rows)

    def load(self, row: int, state: JobState) -> None:
        return  # the model holds it

    def predict(self, inputs: Any, rows: Sequence[int] | None = None) -> Any:
        return self._fit.model.predict(inputs, verbose=0)

    def close(self) -> None:
        self._is_closed = True
        if self._thread.is_alive():
            self._turn.release()
            self._thread.join()


class _Baton(keras_callbacks.Callback):
    """The last callback of a fit: hands the turn back, and tells the data which epoch is read."""

    def __init__(self, session: OwnFit, data: Any) -> None:
        super().__init__()
        self._session, self._data = session, data

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if isinstance(self._data, Ordered | Reordered):
            self._data.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._session.stepped()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._session.epoch_ended(epoch, logs or {})


def _arguments(fit: Fit, session: OwnFit) -> dict[str, Any]:
    options, job = fit.options, fit.job
    validation, data = fit.given_validation, in_order(fit)
    made: dict[str, Any] = {
        "x": as_arrays(data),
        "epochs": job.epochs,
        "initial_epoch": options.initial_epoch,
        "steps_per_epoch": options.steps_per_epoch,
        "validation_steps": options.validation_steps,
        "validation_batch_size": options.validation_batch_size,
        "validation_freq": options.validation_freq,
        "callbacks": [*fit.moments.callbacks, _Baton(session, data)],
        "class_weight": options.class_weight if fit.training is None else None,
        "verbose": 0,
        "shuffle": False,
    }
    if validation is not None:
        made["validation_data"] = (
            (validation.x, validation.y, validation.sample_weight) if validation.is_arrays else validation.x
        )
        if validation.is_arrays and options.validation_batch_size is None:
            made["validation_batch_size"] = job.batch_size
    return made
