"""Why a step could not be traced, in one sentence: the operation, the module it is in, and the user's own line."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import resolve_name

from carpool.errors import described
from carpool.kernels.random import Keyed
from carpool.kernels.refusal import Unkeyed, Unstackable

_OURS = str(Path(__file__).parents[2])
_TORCHS = str(Path(torch.__file__).parent)
_LONGEST = 300
_MISTAKES = (KeyError, AttributeError, NameError, AssertionError)
"""What a call with arguments that do not fit would hardly raise in our own lines."""


def blame(error: BaseException) -> str:
    """An error in one line, with the user's own line that led to it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    line = _users_line(traceback.extract_tb(error.__traceback__))
    _tell_if_ours(error, frames, line)
    return _sentence(error, frames)[:_LONGEST] + (f" (at {line})" if line else "")


def _tell_if_ours(error: BaseException, frames: Sequence[FrameType], line: str | None) -> None:
    """A fault in our own lines, which nobody else's led to, is nothing that a model has: trained another way, it would stay hidden."""
    if not frames or line is not None or not isinstance(error, _MISTAKES):
        return
    last = frames[-1].f_code
    if last.co_filename.startswith(_OURS):
        at = f"{Path(last.co_filename).name}, {last.co_name}"
        warnings.warn(
            f"carpool: a fault of its own keeps a step from being traced, so its job trains another way ({described(error)}, in {at})",
            stacklevel=3,
        )


def _sentence(error: BaseException, frames: Sequence[FrameType]) -> str:
    text = str(error)
    if isinstance(error, Unstackable):
        return text
    operation = _operation(frames) + _inside(frames)
    if isinstance(error, DataDependentOutputException):
        return f"{operation} needs a tensor's value, which is another for each member"
    if isinstance(error, DynamicOutputShapeException):
        return f"{operation} makes a shape that depends on values, which are others for each member"
    if isinstance(error, Unkeyed) or "called random operation" in text:
        return f"{operation} draws random numbers that are not keyed by job"
    if found := re.search(
        r"(aten::\S+) hit the vmap fallback|Batching rule not implemented for (aten::\w+)", text
    ):
        return f"torch has no batching rule for {found[1] or found[2]}"
    if "setup_context staticmethod" in text or "does not have vmap support" in text:
        return f"{_function(frames)} is a torch.autograd.Function without a setup_context and a vmap rule"
    return described(error)


# What a user calls it, where torch's name is another.
_WORDS: dict[Any, str] = {
    Tensor.__bool__: "an `if`, `while` or `assert` on a tensor",
    Tensor.item: "`.item()`",
    Tensor.tolist: "`.tolist()`",
    Tensor.numpy: "`.numpy()`",
    Tensor.__float__: "`float(...)` of a tensor",
    Tensor.__int__: "`int(...)` of a tensor",
    Tensor.__index__: "an index or a size taken from a tensor",
    Tensor.__getitem__: "indexing by a mask",
    Tensor.__setitem__: "assigning by a mask",
}


def _operation(frames: Sequence[FrameType]) -> str:
    """The last of torch's functions that was called under our mode."""
    for frame in reversed(frames):
        if frame.f_code is Keyed.__torch_function__.__code__:
            function = frame.f_locals["func"]
            return _WORDS.get(function) or resolve_name(function) or getattr(function, "__name__", "a call")
    return "an operation"


def _function(frames: Sequence[FrameType]) -> str:
    """The user's autograd function, by its name."""
    for frame in reversed(frames):
        kind = frame.f_locals.get("cls")
        if isinstance(kind, type) and issubclass(kind, torch.autograd.Function):
            return kind.__name__
    return "a part"


def _inside(frames: Sequence[FrameType]) -> str:
    module = _torchs_module(frames)
    return f" in {' '.join(repr(module).split())}" if module is not None else ""


def _torchs_module(frames: Sequence[FrameType]) -> nn.Module | None:
    """The innermost of torch's own modules that the error came from, below the user's line."""
    for frame in _below_the_user(frames):
        module = frame.f_locals.get("self")
        ordinary = isinstance(module, nn.Module) and not isinstance(module, nn.ModuleList | nn.Sequential)
        if ordinary and type(module).__module__.startswith("torch.nn.modules"):
            return module
    return None


def _below_the_user(frames: Sequence[FrameType]) -> Iterator[FrameType]:
    for frame in reversed(frames):
        if _is_users(frame.f_code.co_filename):
            return
        yield frame


def _users_line(frames: Sequence[traceback.FrameSummary]) -> str | None:
    for frame in reversed(frames):
        if _is_users(frame.filename):
            return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return None


def _is_users(filename: str) -> bool:
    return not filename.startswith((_OURS, _TORCHS, "<"))
