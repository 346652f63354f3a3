"""What frameworks say of data that a model or a loss does not take, as one error: whose, what came, what to do.

Known by the frameworks' own words, since a step that raises them has run as the user wrote it. What is not
known stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from carpool.errors import CarpoolError, DataError, described, sentence
from carpool.job import Job

_MOST_TEXT = 300
_MOST_ARRAYS = 4


@dataclass(frozen=True)
class Mistake:
    """Words that frameworks have for it, what was expected, and the remedy."""

    words: tuple[str, ...]
    expected: str
    remedy: str

    def is_said(self, text: str) -> bool:
        return any(re.search(word, text) for word in self.words)


MISTAKES = (
    Mistake(
        (
            r"expected target dtype to be",
            r"expected scalar type Long but found",
            r"gather\(\): Expected dtype int",
            r"nll_loss\w* not implemented for '(Float|Double|Half|BFloat16)'",
            r"Value passed to parameter 'labels' has DataType \w+ not in list",
            r"subdtype of <class 'numpy\.integer'>, got",
        ),
        "targets that are class numbers, of an integer type (int64 in torch)",
        'cast them: y.long() of torch, y.astype("int64") of NumPy; or take a loss for such targets',
    ),
    Mistake(
        (r"Target \S+ is out of bounds", r"Received a label value of", r"index out of range in self"),
        "class numbers, or indices of an embedding, from 0 to one below their count",
        "count from 0, or widen the layer that has one output or row for each",
    ),
    Mistake(
        (
            r"\d+D target tensor expected",
            r"Expected input batch_size .* to match target batch_size",
            r"Rank mismatch: Rank of labels",
            r"target size \(.*\) (that is different|must be the same)",
        ),
        "targets of the shape that the loss takes, such as one class number for each sample",
        "reshape them: y.squeeze(1), say",
    ),
    Mistake(
        (
            r"must have the same dtype",
            r"to have the same dtype",
            r"Input type \(.*\) and (weight|bias) type \(.*\) should be the same",
            r"expected scalar type \w+ but found",
            r"Found dtype \w+ but expected \w+",
            r"must have the type torch\.\w+, got type",
            r"mixed dtype",
            r"has type \w+ that does not match type \w+ of argument",
            r"was expected to be a \w+ tensor but is a \w+ tensor",
        ),
        "data of the type that the model's weights have",
        'cast it: x.astype("float32") of NumPy, x.float() of torch; or make the model of the data\'s type',
    ),
    Mistake(
        (
            r"shapes cannot be multiplied",
            r"must have the same reduction dim|contraction dim",
            r"to have \d+ channels, but got",
            r"must be equal to input_size",
            r"size of tensor a \(\d+\) must match",
            r"normalized_shape",
            r"running_mean should contain",
            r"dot_general requires contracting dimensions",
            r"ncompatible shapes",
            r"matmul: Input operand \d has a mismatch",
            r"Dimensions must be equal, but are",
            r"size-incompatible",
            r"Initializer expected to generate shape",
            r"feature_group_count .* to equal|conv_general_dilated .* feature",
        ),
        "data of the shape that the model and the loss take",
        "make the model's first layer as wide as a sample of x, and its last as wide as the loss wants y",
    ),
)
"""The first that is said counts: what targets should be, before what data should be."""


def explained(job: Job, error: BaseException) -> BaseException:
    """The error itself, or one that says what was expected of the job's data, from it.

    >>> import numpy as np
    >>> job = Job(dict, (np.ones((8, 3)), np.ones(8)), loss=max, name="a")
    >>> error = explained(job, RuntimeError("mat1 and mat2 must have the same dtype, but got Double and Float"))
    >>> str(error).partition(". Received: ")[0]
    "Job 'a': Expected data of the type that the model's weights have"
    """
    if isinstance(error, CarpoolError) or not isinstance(error, Exception):
        return error
    told = described(error)
    found = next((mistake for mistake in MISTAKES if mistake.is_said(told)), None)
    if found is None:
        return error
    made = DataError(f"Job {job.name!r}: " + sentence(found.expected, _received(job, told), found.remedy))
    made.__cause__ = error
    return made


def _received(job: Job, told: str) -> str:
    """What the data is, as far as it can be seen, and what the framework says of it."""
    short = told if len(told) <= _MOST_TEXT else told[: _MOST_TEXT - 3] + "..."
    arrays = list(_arrays(job.data))[:_MOST_ARRAYS]
    return f"{', '.join(arrays)} ({short.rstrip('.')})" if arrays else short.rstrip(".")


def _arrays(data: Any) -> Iterator[str]:
    """The arrays of a pair or of a dict, each in a few words."""
    if isinstance(data, Mapping):
        named = [(str(name), value) for name, value in data.items()]
    elif isinstance(data, tuple | list):
        words = ("x", "y") if len(data) == 2 else tuple(f"array {place}" for place in range(len(data)))
        named = list(zip(words, data, strict=True))
    else:
        named = []
    for name, value in named:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is not None and dtype is not None:
            kind = getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
            yield f"{name} of {tuple(shape)} {kind}"
