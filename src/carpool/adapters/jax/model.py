"""`carpool.jax.Model`: parameters and the function that applies them, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from carpool.arguments import Arguments
from carpool.errors import ModelError


@dataclass(frozen=True)
class Model:
    """Parameters, a nest of arrays, and `apply(parameters, x) -> prediction`.

    With `state` (statistics of batch normalisation, say) it is `apply(parameters, state, x) -> prediction, state`. `apply` is given `key=` and
    `train=` where it has such arguments.

    >>> import jax.numpy as jnp
    >>> model = Model({"w": jnp.ones((3, 1))}, lambda p, x: x @ p["w"])
    >>> model(jnp.ones((2, 3))).tolist()
    [[3.0], [3.0]]
    """

    parameters: Any
    apply: Callable[..., Any]
    state: Any = None

    def __post_init__(self) -> None:
        Arguments(ModelError).function("apply", self.apply, "pass a function of (parameters, x)")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        held = () if self.state is None else (self.state,)
        return self.apply(self.parameters, *held, *inputs, **options)
