"""TensorFlow's errors that have a remedy here, with it."""

from __future__ import annotations

import tensorflow as tf

from carpool.errors import StepError, described, sentence


def explained(error: BaseException) -> BaseException:
    """The error itself, or one that says what to do, from it."""
    text = " ".join(str(error).split())
    if isinstance(error, tf.errors.FailedPreconditionError) and (
        "uninitialized" in text or "Could not find variable" in text or "does not exist" in text
    ):
        expected, remedy = "every variable to have a value", "leave init out: it initialises all variables"
    elif isinstance(error, tf.errors.InvalidArgumentError) and "must feed a value for placeholder" in text:
        expected, remedy = "a value for every placeholder", "name it in data=, or in what feeds gives"
    else:
        return error
    made = StepError(sentence(expected, described(error)[:400], remedy))
    made.__cause__ = error
    return made
