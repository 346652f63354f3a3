"""How many bytes of tensors are alive at once: counted operation by operation, on real tensors or on fake ones that hold none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from carpool.kernels import random

_CONVOLUTIONS = {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}
_WRITTEN_OUT = random.compiled_forms()


class Live(TorchDispatchMode):
    """Counts the memory of every tensor that an operation makes inside, from then until it is freed.

    `capacity_bytes` makes it a simulated device: an operation that goes beyond it raises what a full GPU raises. That is
    found out after the operation, whose result is dropped. Of real and fake tensors it counts one kind: a step that is traced
    meanwhile takes no memory.
    """

    def __init__(self, capacity_bytes: int | None = None, fake: bool = False) -> None:
        super().__init__()
        self._fake = fake
        self.live_bytes = self.peak_bytes = 0
        self.capacity_bytes = capacity_bytes
        self._held: dict[int, int] = {}

    def count(self, tensors: Any) -> None:
        """Counts tensors that were made before."""
        for leaf in pytree.tree_leaves(tensors):
            if (
                isinstance(leaf, torch.Tensor)
                and isinstance(leaf, FakeTensor) == self._fake
                and not leaf.is_meta
            ):
                self._note(leaf)
        if self.capacity_bytes is not None and self.live_bytes > self.capacity_bytes:
            raise torch.OutOfMemoryError(
                f"simulated device out of memory: {self.live_bytes} bytes needed, {self.capacity_bytes} available"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (written := _WRITTEN_OUT.get(func)) is not None:
            with self:  # an operator of ours that is many: what they hold on the way counts too
                return written(*args, **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        self.count(made)
        if self._fake and func in _CONVOLUTIONS:
            self._pass_by(pytree.tree_leaves((args, made)))
        return made

    def _pass_by(self, tensors: Sequence[Any]) -> None:
        """On a GPU a convolution may copy its tensors into the layout that its kernel reads."""
        sizes = (t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.device.type == "cuda")
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + sum(sizes))

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return
        size = self._held[key] = storage.nbytes()
        weakref.finalize(storage, self._forget, key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._held.pop(key)


def peak_bytes(call: Callable[..., object], inputs: Sequence[torch.Tensor]) -> int:
    """The most memory that would be alive while the call runs on fake tensors, its inputs included."""
    with Live(fake=True) as live:
        live.count(list(inputs))
        call(*inputs)
    return live.peak_bytes
