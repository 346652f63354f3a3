"""Things named as "module:attribute"."""

from __future__ import annotations

import importlib
from typing import Any

from carpool.errors import ModelError, sentence


def imported(path: str) -> Any:
    """What stands under the name.

    >>> imported("math:sqrt")(4)
    2.0
    """
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(
            sentence('a model as "module:function"', repr(path), f"make it importable ({error})")
        ) from error
