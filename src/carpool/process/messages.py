"""What we and a worker say to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """To a worker: call this. `News` objects that the function sends meanwhile come before its end."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Started:
    """From a worker, first of all: the variables it found and the frameworks that were imported by then (none should be)."""

    pid: int
    environment: Mapping[str, str]
    frameworks: tuple[str, ...]


@dataclass(frozen=True)
class Beat:
    """From a worker, every second: what it holds. It is no sign of progress: a thread of its own sends it."""

    rss_bytes: int | None
    device_bytes: int | None


@dataclass(frozen=True)
class News:
    """From a worker: something that the function it was given has to say."""

    content: Any


@dataclass(frozen=True)
class Returned:
    """From a worker: what the function returned."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """From a worker: what the function raised, or a WorkerError with its text where that cannot travel."""

    error: BaseException


Message = Call | Started | Beat | News | Returned | Raised
