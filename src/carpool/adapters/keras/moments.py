"""A job's callbacks at Keras' own moments.

A moment that no callback has anything to do at costs nothing. At the others the model holds the row's state, and what a callback
changes in it goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras import callbacks as keras_callbacks
from keras.src.utils import is_default

from carpool.errors import JobError, sentence
from carpool.job import Job

_EACH_TRAINING_BATCH = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_EACH_TEST_BATCH = ("on_test_batch_begin", "on_test_batch_end")
_BY_EPOCH = (keras_callbacks.ModelCheckpoint, keras_callbacks.BackupAndRestore)
"""These look at every batch only where their `save_freq` says so."""


class Moments:
    """The Keras callbacks among a job's callbacks."""

    def __init__(self, job: Job, model: Any) -> None:
        self._model = model
        self._name, self._epochs = str(job.name), job.epochs
        self.callbacks = [one for one in job.callbacks if isinstance(one, keras_callbacks.Callback)]
        for one in job.callbacks:
            if not isinstance(one, keras_callbacks.Callback) and not callable(one):
                raise JobError(
                    f"Job {job.name!r}: "
                    + sentence(
                        "callbacks that are keras.callbacks.Callback objects, or functions",
                        type(one).__name__,
                        "pass these",
                    )
                )
        self._list: Any = None
        self.epochs_ended = 0

    def own(self, validates: bool) -> str | None:
        """Why these callbacks need the model's own `fit`, or None."""
        for one in self.callbacks:
            if isinstance(one, keras_callbacks.BackupAndRestore):
                return "BackupAndRestore decides where training begins"
            if isinstance(one, keras_callbacks.TensorBoard):
                return "TensorBoard watches Keras' own functions"
            if validates and any(_does(one, moment) for moment in _EACH_TEST_BATCH):
                return f"its {type(one).__name__} sees every validation batch"
        return None

    @property
    def each_batch(self) -> str | None:
        """The callback that sees every training batch, if one does: no launch can then cover more than one."""
        for one in self.callbacks:
            by_epoch = isinstance(one, _BY_EPOCH) and one.save_freq == "epoch"
            if not by_epoch and any(_does(one, moment) for moment in _EACH_TRAINING_BATCH):
                return type(one).__name__
        return None

    def __bool__(self) -> bool:
        return bool(self.callbacks)

    def begin(self, steps: int) -> None:
        """Before the first moment: sets each callback's model and params, and `model.history`."""
        self._model.stop_training = False
        self._list = keras_callbacks.CallbackList(
            self.callbacks, add_history=True, model=self._model, epochs=self._epochs, steps=steps, verbose=0
        )
        self.epochs_ended = 0
        for kind in ("train", "test", "predict"):
            setattr(self._list, f"_async_{kind}", False)  # a moment is over when it has been taken
        if not self.callbacks:
            self._list.on_train_begin()
            self._list.on_train_end()

    def has(self, moment: str) -> bool:
        """Whether a callback does something then."""
        return any(_does(one, moment) for one in self.callbacks)

    def at(self, moment: str, *arguments: Any, logs: Mapping[str, float] | None = None) -> None:
        """The moment has come. History, which Keras adds to the callbacks, hears of it too."""
        if self.callbacks:
            getattr(self._list, moment)(*arguments, dict(logs or {}))

    def end_epoch(self, epoch: int, logs: Mapping[str, float]) -> dict[str, float]:
        """The epoch's end; what callbacks added to its logs, such as the learning rate, which History then holds."""
        self.epochs_ended += 1
        history = self._model.history
        if not self.callbacks:  # what History would do, without asking it a thousand times
            history.epoch.append(epoch)
            for name, value in logs.items():
                history.history.setdefault(name, []).append(value)
            return {}
        before = {name: len(values) for name, values in history.history.items()}
        self.at("on_epoch_end", epoch, logs=logs)
        grown = [name for name, values in history.history.items() if len(values) > before.get(name, 0)]
        return {name: history.history[name][-1] for name in grown if name not in logs}

    def restored(self, initial_epoch: int) -> int | None:
        """After the end of training: the epoch, counted from the first of this training, whose weights a callback has put back."""
        for one in reversed(self.callbacks):
            if not isinstance(one, keras_callbacks.EarlyStopping) or not one.restore_best_weights:
                continue
            if one.best_weights is not None:
                return one.best_epoch - initial_epoch
        return None

    def end(self) -> None:
        """Training is over: another one would begin anew."""
        self._list = None

    @property
    def has_begun(self) -> bool:
        return self._list is not None

    @property
    def stops(self) -> bool:
        """Whether a callback asked for the end of training."""
        return bool(self.callbacks) and bool(getattr(self._model, "stop_training", False))


def _does(callback: Any, moment: str) -> bool:
    return not is_default(getattr(callback, moment))
