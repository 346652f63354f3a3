"""Data on the device: every distinct array once, and the positions each job reads in each epoch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch

from carpool.adapters.torch.away import Away
from carpool.adapters.torch.build import Arrays
from carpool.adapters.torch.transfer import sent
from carpool.kernels.order import orders

_SORT_ELEMENTS = 1 << 22  # keys sorted at a time, for the memory that takes


def key_of(tensor: torch.Tensor) -> Hashable:
    """What makes two tensors the same array: memory, shape, strides and type."""
    return (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Store:
    """What a run has on its device: the models that train alone, and the arrays; asking twice for one array gives the one copy."""

    def __init__(self) -> None:
        self.away = Away()
        self._held: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def on(self, device: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device. The host's own is kept too, so that its address stays taken."""
        key = (device, key_of(tensor))
        if key not in self._held:
            self._held[key] = (tensor, tensor.to(device))
            if device.startswith("cuda"):
                torch.cuda.current_stream(device).synchronize()  # sessions read it on streams of their own
        return self._held[key][1]


class Pool:
    """The data of a fused group: one set of arrays, and where in it each member's samples lie.

    Members that name the same arrays share them. Distinct arrays are laid end to end, so that one gather serves all.
    """

    def __init__(self, members: Sequence[Arrays]) -> None:
        self._sets: dict[Hashable, Arrays] = {}
        self._offsets: dict[Hashable, int] = {}
        self.length = 0
        for member in members:
            key = set_key(member)
            if key not in self._sets:
                self._sets[key] = member
                self._offsets[key] = self.length
                self.length += len(member.tensors[0])

    def holds(self, member: Arrays) -> bool:
        return set_key(member) in self._sets

    def shapes(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and type of each of the joined arrays."""
        first = next(iter(self._sets.values()))
        return tuple(((self.length, *tensor.shape[1:]), tensor.dtype) for tensor in first.tensors)

    def arrays(self, store: Store, device: str) -> tuple[torch.Tensor, ...]:
        """The joined arrays on the device."""
        sets = list(self._sets.values())
        if len(sets) == 1:
            return tuple(store.on(device, tensor) for tensor in sets[0].tensors)
        columns = zip(*(arrays.tensors for arrays in sets), strict=True)
        return tuple(torch.cat([tensor.to(device) for tensor in column]) for column in columns)

    def positions(self, member: Arrays) -> torch.Tensor:
        """Where in the pool the member's samples are, in the member's own order."""
        index = member.index if member.index is not None else torch.arange(member.length)
        return (index + self._offsets[set_key(member)]).to(torch.int32)


def set_key(arrays: Arrays) -> Hashable:
    """What makes two jobs' arrays the same."""
    return tuple(key_of(tensor) for tensor in arrays.tensors)


def shuffled(positions: torch.Tensor, seeds: np.ndarray, epochs: np.ndarray) -> torch.Tensor:
    """Each row of positions in the order of `carpool.batch_order(seed, epoch, length)`, a seed and an epoch for each row.

    Rows that have both in common are sorted once. What is the same is found on the host: asking the device would wait for it.
    """
    length = positions.shape[1]
    rows = max(1, _SORT_ELEMENTS // max(1, length))
    numbers = _numbered(seeds, epochs)
    parts = []
    for start in range(0, len(positions), rows):
        part = slice(start, start + rows)
        keys = np.stack([seeds[part], epochs[part]])
        _, first, places = np.unique(numbers[part], return_index=True, return_inverse=True)
        is_repeating = len(first) < len(places)
        own, when = sent(keys[:, first] if is_repeating else keys, positions.device).unbind(0)
        order = orders(own, when, length)
        if is_repeating:
            order = order[sent(places, positions.device)]
        parts.append(positions[part].gather(1, order))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _numbered(seeds: np.ndarray, epochs: np.ndarray) -> np.ndarray:
    """A number for each pair, equal where both are."""
    _, own = np.unique(seeds, return_inverse=True)
    when = epochs - epochs.min()
    return own * (when.max() + 1) + when
