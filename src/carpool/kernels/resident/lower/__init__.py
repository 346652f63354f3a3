"""From a traced graph of torch's operators to loops: one lowering an operator, in one table."""

from carpool.kernels.resident.lower import (
    activations,
    convolutions,
    draws,
    indexing,
    losses,
    pointwise,
    pools,
    products,
    reductions,
    resample,
    views,
)
from carpool.kernels.resident.lower.table import LOWERINGS, TYPES, lowered, lowers, type_of

__all__ = [
    "LOWERINGS",
    "TYPES",
    "activations",
    "convolutions",
    "draws",
    "indexing",
    "losses",
    "lowered",
    "lowers",
    "pointwise",
    "pools",
    "products",
    "reductions",
    "resample",
    "type_of",
    "views",
]
