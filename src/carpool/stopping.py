"""Which way a metric is better, and early stopping: a policy that is a value, and its state that is another."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from carpool.arguments import MOST, Arguments, hinted
from carpool.errors import OptionError, sentence, shown

_LOWER = frozenset(
    [
        "loss",
        "losses",
        "error",
        "errors",
        "err",
        "cost",
        "regret",
        "perplexity",
        "ppl",
        "nll",
        "bce",
        "crossentropy",
        "hinge",
        "logcosh",
        "brier",
        "mse",
        "mae",
        "mape",
        "msle",
        "rmse",
        "rmsle",
        "smape",
        "wer",
        "cer",
        "fid",
        "lpips",
    ]
)
_HIGHER = frozenset(
    [
        "accuracy",
        "acc",
        "auc",
        "auroc",
        "auprc",
        "f1",
        "fbeta",
        "f1score",
        "precision",
        "recall",
        "sensitivity",
        "specificity",
        "r2",
        "mcc",
        "kappa",
        "iou",
        "miou",
        "jaccard",
        "dice",
        "psnr",
        "ssim",
        "bleu",
        "rouge",
        "meteor",
        "mrr",
        "ndcg",
        "reward",
        "rewards",
    ]
)
_TURNED = frozenset(
    [
        "neg",
        "negative",
        "minus",
        "inv",
        "inverse",
        "one",
        "drop",
        "gain",
        "improvement",
        "reduction",
        "decrease",
        "increase",
        "change",
    ]
)
"""Words that may turn a name's meaning around: a loss's reduction is no loss."""
_WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+")


def direction(metric: str, mode: str = "auto") -> str:
    """Whether a metric is better when it is "min" or "max"; "auto" knows the usual names, and refuses the others.

    A word that says that lower is better wins: `accuracy_loss` is a loss.

    >>> direction("val_loss"), direction("top5_error"), direction("val_dice"), direction("elbo", "max")
    ('min', 'min', 'max', 'max')
    """
    check_mode(mode)
    found = _known(metric) if mode == "auto" else mode
    if found is None:
        raise OptionError(
            sentence(
                "a metric whose better direction is known by its name, or a mode",
                f'{metric!r} with mode="auto"',
                'pass mode="min" if lower is better, or mode="max" if higher is better',
            )
        )
    return found


def check_mode(mode: Any) -> None:
    """Whether it is one of the three words."""
    if mode not in ("auto", "min", "max"):
        raise OptionError(sentence('mode "auto", "min" or "max"', shown(mode), "pass one of the three"))


def is_known(metric: str) -> bool:
    """Whether a metric's name says which way it is better.

    >>> is_known("val_accuracy"), is_known("map")
    (True, False)
    """
    return _known(metric) is not None


def declared(policies: Iterable[Any]) -> dict[str, str]:
    """The modes that policies name for what they watch: `EarlyStopping`, and Keras' callbacks, which say `monitor`.

    >>> declared([EarlyStopping("map", mode="max"), EarlyStopping("loss"), print])
    {'map': 'max'}
    """
    named = [(getattr(p, "metric", None) or getattr(p, "monitor", None), p) for p in policies]
    said = {(name, getattr(p, "mode", None)) for name, p in named if isinstance(name, str)}
    found = {name: mode for name, mode in said if mode in ("min", "max")}
    return {
        name: mode for name, mode in found.items() if len({m for n, m in said if n == name} - {"auto"}) == 1
    }


def _known(metric: str) -> str | None:
    words = frozenset(_words(metric))
    if words & _TURNED:
        return None
    if words & _LOWER or {"cross", "entropy"} <= words:
        return "min"
    return "max" if words & _HIGHER else None


def _words(metric: str) -> Iterator[str]:
    """A name's words in lower case, also without the number at their end: "topKAcc_1" has top, k and acc."""
    for part in re.split(r"[^A-Za-z0-9]+", metric):
        for word in (part, *_WORD.findall(part)):
            yield word.lower()
            yield word.lower().rstrip("0123456789")


@dataclass(frozen=True)
class EarlyStopping:
    """Stop a job when `metric` has not improved by `min_delta` for `patience` epochs.

    `mode` says whether lower ("min") or higher ("max") is better; "auto" takes that from the metric's name where it is a usual one.

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
            "min_delta": says.number(
                "a min_delta", self.min_delta, "pass min_delta=0.0 or more", least=0, is_finite=True
            ),
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
