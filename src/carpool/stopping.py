"""Early stopping: a policy that is a value, and its state that is another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from carpool.arguments import MOST, Arguments, hinted
from carpool.errors import OptionError, sentence

_UP = ("acc", "auc", "f1", "precision", "recall", "score", "r2", "top", "iou", "bleu")


def direction(metric: str, mode: str = "auto") -> str:
    """Whether a metric is better when it is "min" or "max"; "auto" reads its name.

    >>> direction("val_loss"), direction("val_accuracy"), direction("distance", "max")
    ('min', 'max', 'max')
    """
    if mode in ("min", "max"):
        return mode
    if mode != "auto":
        raise OptionError(sentence('mode "auto", "min" or "max"', repr(mode), "pass one of the three"))
    name = metric.removeprefix("val_").lower()
    return "max" if any(part.startswith(_UP) for part in name.split("_")) else "min"


@dataclass(frozen=True)
class EarlyStopping:
    """Stop a job when `metric` has not improved by `min_delta` for `patience` epochs.

    >>> EarlyStopping("val_loss", patience=3, restore_best=True).patience
    3
    """

    metric: str = "val_loss"
    patience: int = 0
    min_delta: float = 0.0
    restore_best: bool = False
    mode: str = "auto"

    def __post_init__(self) -> None:
        says = Arguments()
        says.text("a metric's name", self.metric, 'pass "val_loss", or the name of a metric')
        direction(self.metric, self.mode)
        made = {
            "patience": says.whole("a patience", self.patience, "pass patience=0 or more epochs", 0, MOST),
            "min_delta": says.number("a min_delta", self.min_delta, "pass min_delta=0.0 or more", least=0),
            "restore_best": says.flag("restore_best", self.restore_best),
        }
        for field, value in made.items():
            object.__setattr__(self, field, value)


EarlyStopping.__init__ = hinted(EarlyStopping.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True)
class Patience:
    """How an `EarlyStopping` stands: the best value, when it was, and the verdict on the last epoch."""

    policy: EarlyStopping
    best: float | None = None
    best_epoch: int = -1
    waited: int = 0
    improved: bool = False

    @property
    def exhausted(self) -> bool:
        # As in Keras: patience 0 and 1 both stop at the first epoch without improvement.
        return self.waited >= max(1, self.policy.patience)

    def after(self, epoch: int, metrics: Mapping[str, float]) -> Patience:
        """The state after an epoch's metrics; raises if the watched metric is not among them."""
        if self.policy.metric not in metrics:
            raise OptionError(
                sentence(
                    f"EarlyStopping to watch one of {', '.join(sorted(metrics))}",
                    repr(self.policy.metric),
                    "name one of these, or pass validation_data for a val_ metric",
                )
            )
        value = metrics[self.policy.metric]
        if self._better(value):
            return replace(self, best=value, best_epoch=epoch, waited=0, improved=True)
        return replace(self, waited=self.waited + 1, improved=False)

    def _better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        if direction(self.policy.metric, self.policy.mode) == "max":
            return value > self.best + self.policy.min_delta
        return value < self.best - self.policy.min_delta
