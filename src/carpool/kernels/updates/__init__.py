"""Optimizer updates for stacked parameters, each member with hyper-parameters of its own.

`UPDATES` says which optimizers can be fused, `UNFUSED` why some of torch's own cannot; `register` adds another.
"""

from carpool.kernels.updates.clip import clipped
from carpool.kernels.updates.table import UNFUSED, UPDATES, register
from carpool.kernels.updates.update import Columns, Options, Update, number_dtype

__all__ = ["UNFUSED", "UPDATES", "Columns", "Options", "Update", "clipped", "number_dtype", "register"]
