"""What shows that jobs do together what they do alone: the kinds of proof, and how far apart two orders of summation may be.

Pure: engines say what they compared, how, and in which precision; the numbers are here, for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Proof(Enum):
    """How a fused step was held against its members' steps."""

    STEPS = "steps"
    """Their steps alone were run, and the weights afterwards compared."""
    TRACES = "traces"
    """Their steps, as they were traced, are equal but for numbers. No step was run alone."""


@dataclass(frozen=True)
class Tolerance:
    """How far apart a step together and the same step alone may be, in the measure that an engine compares by."""

    weight: float
    """Torch: relative to the largest weight of a tensor."""
    noise: float
    """Torch: relative to the largest gradient. Below it an Adam step is the sign of a rounding error, and is not compared."""
    value: float
    """Keras: relative to each value by itself, and a tenth of it for values near zero."""
    step: float
    """TensorFlow: the largest difference, relative to the largest that the step changed. Adam's first divides by roots of tiny squares."""
    norm: float
    """JAX: the norm of all differences, relative to the norm of the step. Adam's first is as long where a gradient is nothing but rounding."""
    ground: float
    """JAX: the same, relative to the norm of the weights: what they round off when they are changed."""


DOUBLE = Tolerance(weight=1e-9, noise=1e-12, value=2e-4, step=1e-7, norm=1e-2, ground=1e-6)
SINGLE = Tolerance(weight=1e-4, noise=1e-5, value=2e-4, step=1e-3, norm=1e-2, ground=1e-6)
LOW = Tolerance(weight=1e-2, noise=5e-2, value=2e-2, step=1e-1, norm=1e-1, ground=4e-3)

_BITS = {"float64": 64, "complex128": 64, "float32": 32, "complex64": 32}  # any other has 16 or fewer


def lowest(dtypes: Iterable[str]) -> str:
    """Of the names of floating types, that of the lowest precision; "float64" where there are none.

    >>> lowest(["float64", "float32", "float64"]), lowest([])
    ('float32', 'float64')
    """
    return min(dtypes, key=lambda name: _BITS.get(name, 16), default="float64")


def tolerance(dtype: str) -> Tolerance:
    """What may be between two correct steps whose lowest precision is this type's.

    >>> tolerance("float32").weight
    0.0001
    """
    return {64: DOUBLE, 32: SINGLE}.get(_BITS.get(dtype, 16), LOW)
