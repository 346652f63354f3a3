"""What the members of a group have in common, so that a stack holds it once and computes it once.

A frozen tensor that is one object in all members gets no rows. Where all members read the same batches, a batch has no rows
either: then what depends on nothing else, such as a frozen trunk that all of them share, is computed once a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from carpool.adapters.torch.build import Built
from carpool.adapters.torch.store import set_key
from carpool.adapters.torch.streams import Streamed
from carpool.adapters.torch.template import shared_names

if TYPE_CHECKING:
    from carpool.adapters.torch.fuse import Known


def shared_leaves(known: Sequence[Known]) -> frozenset[str]:
    """Frozen parameters, and buffers of modules in evaluation mode, that are one object in all members."""
    if len(known) < 2:
        return frozenset()
    still = _still(known[0].built.model)
    return frozenset(name for name in shared_names([member.built.model for member in known]) if name in still)


def _still(model: nn.Module) -> set[str]:
    """The leaves that no step changes."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for prefix, module in model.named_modules():
        if not module.training:
            inside = f"{prefix}." if prefix else ""
            frozen |= {f"{inside}{name}" for name, _ in module.named_buffers(recurse=False)}
    return frozen


def reads_alike(known: Sequence[Known]) -> bool:
    """Whether all members read the same batches in the same order."""
    first = known[0].built
    return len(known) > 1 and all(_alike(first, member.built) for member in known[1:])


def _alike(a: Built, b: Built) -> bool:
    if isinstance(a.data, Streamed) or isinstance(b.data, Streamed):
        return (
            isinstance(a.data, Streamed) and isinstance(b.data, Streamed) and a.data.source is b.data.source
        )
    ordered = a.job.shuffle == b.job.shuffle and (a.seed == b.seed or not a.job.shuffle)
    return ordered and set_key(a.data) == set_key(b.data) and _same_view(a.data.index, b.data.index)


def _same_view(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
