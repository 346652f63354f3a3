"""Tensors without contents, in silence: what cannot run on them is told by us, or runs as it is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

_LOG = logging.getLogger(fake_tensor.__name__)


@contextmanager
def unlogged() -> Iterator[None]:
    """Inside, torch writes no traceback of an operator that refuses tensors without contents."""
    own = threading.get_ident()

    def is_anothers(record: logging.LogRecord) -> bool:
        return record.thread != own

    _LOG.addFilter(is_anothers)
    try:
        yield
    finally:
        _LOG.removeFilter(is_anothers)


@contextmanager
def faked() -> Iterator[FakeTensorMode]:
    """Inside, new tensors have no contents, and nothing is logged."""
    with unlogged(), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        yield fake
