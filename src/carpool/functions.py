"""Which function is meant by a name, such as Keras takes: jobs take functions, and whoever writes a name is told which."""

from __future__ import annotations

from typing import Any

_LOSSES: dict[str, tuple[str, str]] = {
    "cross_entropy": (
        "torch.nn.functional.cross_entropy",
        "optax.softmax_cross_entropy_with_integer_labels",
    ),
    "binary_cross_entropy": (
        "torch.nn.functional.binary_cross_entropy_with_logits",
        "optax.sigmoid_binary_cross_entropy",
    ),
    "mse": ("torch.nn.functional.mse_loss", "optax.squared_error"),
    "mae": ("torch.nn.functional.l1_loss", "optax.l1_loss"),
    "huber": ("torch.nn.functional.huber_loss", "optax.huber_loss"),
    "nll": ("torch.nn.functional.nll_loss", "optax.softmax_cross_entropy_with_integer_labels"),
}
"""In torch, and in JAX, where a loss is of each sample and its mean is what a job minimises."""
_OTHER_WORDS = {
    "crossentropy": "cross_entropy",
    "sparsecategoricalcrossentropy": "cross_entropy",
    "categoricalcrossentropy": "cross_entropy",
    "ce": "cross_entropy",
    "binarycrossentropy": "binary_cross_entropy",
    "bce": "binary_cross_entropy",
    "meansquarederror": "mse",
    "mseloss": "mse",
    "l2": "mse",
    "meanabsoluteerror": "mae",
    "l1": "mae",
    "l1loss": "mae",
    "huberloss": "huber",
    "nllloss": "nll",
}
_OPTIMIZERS = {
    "adam": "Adam",
    "adamw": "AdamW",
    "sgd": "SGD",
    "rmsprop": "RMSprop",
    "nadam": "NAdam",
    "radam": "RAdam",
    "adamax": "Adamax",
    "adagrad": "Adagrad",
    "adadelta": "Adadelta",
}


def named_function(word: str, name: Any) -> str:
    """What to pass as `word` ("loss", "optimizer", ...) instead of a name; nothing for what is no name.

    >>> named_function("optimizer", "adam")
    'pass a function of parameters: partial(torch.optim.Adam, lr=1e-3), or optax.adam(1e-3) in JAX; a Keras model has its own in compile'
    """
    if not isinstance(name, str):
        return ""
    bare = "".join(letter for letter in name.lower() if letter.isalnum())
    if word == "optimizer":
        return _optimizer(_OPTIMIZERS.get(bare, "Adam"))
    if word == "loss":
        return _loss(_OTHER_WORDS.get(bare, bare))
    return "pass a function of (prediction, target)" if word == "metric" else ""


def _optimizer(name: str) -> str:
    return (
        f"pass a function of parameters: partial(torch.optim.{name}, lr=1e-3), or optax.{name.lower()}(1e-3) in JAX; "
        "a Keras model has its own in compile"
    )


def _loss(name: str) -> str:
    in_torch, in_jax = _LOSSES.get(name, ("torch.nn.functional.cross_entropy", "one of optax"))
    example = "" if name in _LOSSES else ", say"
    mean = f"the mean of {in_jax}" if name in _LOSSES else in_jax
    return (
        f"pass a function: loss={in_torch}{example}, or {mean} in JAX; a Keras model has its own in compile"
    )
