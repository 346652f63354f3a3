"""Torch's functions that are made of others, opened: what they call inside is seen by a mode again."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any


def opened(function: Any) -> Callable[..., Any]:
    """The same code, without its first question whether a mode wants the call as a whole."""
    inner = {name: _never for name in function.__globals__ if name.startswith("has_torch_function")}
    made = FunctionType(
        function.__code__,
        function.__globals__ | inner,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _never(*_: Any) -> bool:
    return False
