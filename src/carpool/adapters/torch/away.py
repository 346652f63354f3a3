"""Models that are away on a device while their jobs train, and where they come home to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

Place = tuple[int, str]


@dataclass
class _Absence:
    """A leaf's module (held, so that its id stays taken), its memory at home, and how many sessions have it away."""

    module: nn.Module
    home: torch.Tensor
    sessions: int = 0


class Away:
    """Sends models to a device and brings them home. A leaf that several jobs share comes home with the last of them."""

    def __init__(self) -> None:
        self._absent: dict[Place, _Absence] = {}

    def send(self, model: nn.Module, device: str) -> None:
        for place, module, leaf in _leaves(model):
            self._absent.setdefault(place, _Absence(module, leaf.data)).sessions += 1
        try:
            model.to(device)
        except BaseException:
            self.bring(model)
            raise

    def bring(self, model: nn.Module) -> None:
        """Into the memory that the leaves came from."""
        for place, _, leaf in _leaves(model):
            absence = self._absent.get(place)
            if absence is None:
                continue  # it was made on the device, in training
            absence.sessions -= 1
            if absence.sessions == 0:
                leaf.data = _at_home(leaf.data, absence.home)
                del self._absent[place]


def _leaves(model: nn.Module) -> Iterator[tuple[Place, nn.Module, torch.Tensor]]:
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, leaf in held.items():
                if leaf is not None:
                    yield (id(module), name), module, leaf


def _at_home(leaf: torch.Tensor, home: torch.Tensor) -> torch.Tensor:
    if leaf.device == home.device:
        return leaf
    fits = leaf.shape == home.shape and leaf.dtype == home.dtype and 0 not in home.stride()
    return home.copy_(leaf) if fits else leaf.to(home.device)
