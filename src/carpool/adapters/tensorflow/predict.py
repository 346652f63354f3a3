"""Predictions of many modules for the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from carpool.adapters.tensorflow.step import words
from carpool.errors import DataError, ModelError, sentence


def predict(models: Sequence[Any], inputs: Any, batch_size: int | None, place: str) -> list[Any]:
    """Each module's outputs in evaluation mode, as tensors on the device. A module is traced once for each size of a batch."""
    with tf.device(place):
        batches = [
            tf.nest.map_structure(tf.convert_to_tensor, batch) for batch in _batches(inputs, batch_size)
        ]
        return [_outputs(model, batches) for model in models]


def _outputs(model: Any, batches: Sequence[Any]) -> Any:
    if not callable(model):
        remedy = "give it __call__"
        raise ModelError(sentence("a module that can be called", type(model).__name__, remedy))
    known = words(type(model).__call__)
    given = {word: False for word in ("training", "train", "is_training") if word in known}
    run = tf.function(lambda batch: model(batch, **given), autograph=False)
    made = [run(batch) for batch in batches]
    return tf.nest.map_structure(lambda *pieces: tf.concat(pieces, 0), *made)


def _batches(inputs: Any, size: int | None) -> list[Any]:
    lengths = {int(leaf.shape[0]) if leaf.shape else 0 for leaf in tf.nest.flatten(inputs)}
    if len(lengths) != 1 or lengths == {0}:
        raise DataError(
            sentence("inputs of one length", f"lengths {sorted(lengths)}", "align the first dimensions")
        )
    length = lengths.pop()
    step = size or length
    return [
        tf.nest.map_structure(lambda leaf, start=start: leaf[start : start + step], inputs)
        for start in range(0, length, step)
    ]
