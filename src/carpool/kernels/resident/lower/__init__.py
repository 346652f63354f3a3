"""From a traced graph of torch's operators to loops: one lowering an operator, in one table."""

from carpool.kernels.resident.lower import indexing, pointwise, products, reductions, views
from carpool.kernels.resident.lower.table import LOWERINGS, TYPES, lowered, lowers, type_of

__all__ = [
    "LOWERINGS",
    "TYPES",
    "indexing",
    "lowered",
    "lowers",
    "pointwise",
    "products",
    "reductions",
    "type_of",
    "views",
]
