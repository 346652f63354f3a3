"""Empty caches for those who compile: a first call is one only if nothing was compiled before, in an earlier run either."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

COMPILERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
EVERYONE = (*COMPILERS, "CARPOOL_CACHE", "CUDA_CACHE_PATH")


def variables(folder: str, names: tuple[str, ...]) -> dict[str, str]:
    """A place for each cache in the folder."""
    return {name: f"{folder}/{name.partition('_')[0].lower()}" for name in names}


@contextmanager
def environment(added: Mapping[str, str]) -> Iterator[None]:
    """These variables in the environment, of processes that are started inside too."""
    before = {name: os.environ.get(name) for name in added}
    os.environ |= dict(added)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ |= {name: value} if value is not None else {}


@contextmanager
def empty_compilers() -> Iterator[None]:
    """Compilers in this process find an empty cache, which is removed afterwards."""
    folder = tempfile.TemporaryDirectory(prefix="benchmarks-", ignore_cleanup_errors=True)
    with folder as empty, environment(variables(empty, COMPILERS)):
        yield
