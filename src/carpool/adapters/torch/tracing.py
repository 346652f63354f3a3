"""Functions as graphs, one at a time: torch's tracer changes the whole process's modules while it works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

_tracing = threading.RLock()


def graph_of(
    function: Callable[..., Any],
    *inputs: Tensor,
    table: Mapping[Any, Callable[..., Any]] | None = None,
    is_strict: bool = False,
) -> GraphModule:
    """What the function does with such inputs; nothing is computed. `table` replaces operators by others.

    Two threads that trace at once put torch's modules back in each other's place, and one of them fails.
    """
    make = make_fx(function, dict(table or {}), "fake", _allow_non_fake_inputs=not is_strict)
    with _tracing:
        return make(*inputs)
