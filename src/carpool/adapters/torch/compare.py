"""A fused step beside its members' steps alone: how far apart they are, in all members at once, and whether that is rounding.

What is compared stays on the device and is read once: for each member by itself the host would wait several times for each of its tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from carpool.adapters.base import Check
from carpool.adapters.torch import precision
from carpool.adapters.torch.build import Built
from carpool.adapters.torch.check import Alone
from carpool.adapters.torch.layout import Span
from carpool.adapters.torch.stacked import Recipe

_STRAYS = 1e-4  # of a tensor's elements: a ReLU at zero, or a gradient that is, may fall to either side in single precision


@dataclass(frozen=True)
class Tolerance:
    """How far apart two orders of summation may end up in one step.

    `weight` is relative to the leaf's largest weight. `noise` is relative to the largest gradient: below it an Adam
    step is the sign of a rounding error, so such elements are not compared.
    """

    weight: float
    noise: float


def tolerance(
    dtype: torch.dtype,
    device: torch.device,
    convolves: bool,
    recurs: bool = False,
    lowered: bool = False,
) -> Tolerance:
    """The tolerance for a type, given the precision that the user's settings leave to matrix products.

    `lowered` says that autocast computes in 16 bits; it leaves float64 alone.
    """
    if dtype == torch.float64:
        return Tolerance(1e-9, 1e-12)
    loose = lowered or dtype in (torch.bfloat16, torch.float16)
    if device.type == "cuda":
        loose |= precision.multiplies_in_tf32() or (convolves and precision.convolves_in_tf32())
        loose |= recurs and precision.recurs_in_tf32()
    return Tolerance(1e-2, 5e-2) if loose else Tolerance(1e-4, 1e-5)


def compare(
    recipe: Recipe,
    size: int,
    alone: Mapping[int, Alone],
    together: Mapping[str, Tensor],
    members: Mapping[int, Built],
) -> Check:
    """The largest difference, and the first member beyond the tolerance, in words."""
    convolves = any(len(leaf.shape) > 2 for leaf in recipe.layout.leaves)
    recurs = any(isinstance(module, nn.RNNBase) for module in recipe.training.modules())
    device = together["weights"].device
    lowered = any(precision.computes_in_16_bits(b.job.precision, device.type) for b in members.values())
    allowed = tolerance(recipe.layout.dtype, device, convolves, recurs, lowered)
    found: dict[int, tuple[float, str]] = {}
    for rows in _alike(recipe, alone):
        found |= _Compared(recipe, size, rows, [alone[row] for row in rows], together, allowed.noise).worst()
    worst = max((difference for difference, _ in found.values()), default=0.0)
    for row in alone:
        difference, place = found[row]
        if not difference <= allowed.weight:
            return Check(
                len(alone),
                worst,
                f"the fused step of {members[row].job.name!r} differs from its step alone at {place} "
                f"by {difference:.1e} (allowed: {allowed.weight:.0e})",
            )
    return Check(len(alone), worst, None)


def _alike(recipe: Recipe, alone: Mapping[int, Alone]) -> list[list[int]]:
    """Rows whose steps alone gave the same things: nearly always all of them."""
    kinds: dict[Hashable, list[int]] = {}
    spans = {leaf.name: span for span in recipe.layout.spans for leaf in span.leaves}
    for row, own in alone.items():
        held = {name: tuple(_described(spans[name], slots).items()) for name, slots in own.slots.items()}
        kind = (tuple(own.grads), tuple(own.buffers), tuple(held.items()))
        kinds.setdefault(kind, []).append(row)
    return list(kinds.values())


class _Compared:
    """Rows of one kind: each difference is a vector of them."""

    def __init__(
        self,
        recipe: Recipe,
        size: int,
        rows: Sequence[int],
        alone: Sequence[Alone],
        together: Mapping[str, Tensor],
        noise: float,
    ) -> None:
        self._recipe, self._size, self._rows, self._alone = recipe, size, rows, alone
        self._together = together
        self._index: Tensor | None = None
        if list(rows) != list(range(len(together["weights"]))):
            self._index = torch.tensor(list(rows), device=together["weights"].device)
        self._sound = {
            name: self._stacked([own.grads[name] for own in alone]).abs()
            > _beside(noise * self._stacked([own.largest[name] for own in alone]), grad)
            for name, grad in alone[0].grads.items()
        }

    def worst(self) -> dict[int, tuple[float, str]]:
        """Of each row its largest difference, and where that was."""
        found = [*self._loss(), *self._weights(), *self._slots(), *self._buffers()]
        values = torch.stack([gap.to(torch.float64) for gap, _ in found]).cpu().numpy()
        lost = ~np.isfinite(self._losses().cpu().numpy())
        values[:, lost] = 0.0  # it diverged at once, alone as well; the mask leaves the row as it was
        values = np.where(np.isnan(values), np.inf, values)
        places = values.argmax(0)
        return {
            row: (float(values[place, i]), found[place][1])
            for i, (row, place) in enumerate(zip(self._rows, places, strict=True))
        }

    def _losses(self) -> Tensor:
        return self._stacked([own.loss for own in self._alone])

    def _loss(self) -> list[tuple[Tensor, str]]:
        own = self._losses()
        gap = (self._fused("sums")[:, 0] / self._size - own).abs()
        return [(gap / own.abs().clamp(min=1.0), "loss")]

    def _weights(self) -> list[tuple[Tensor, str]]:
        fused = self._recipe.layout.views(self._fused("weights"))
        return [
            (_relative(weight, self._own("weights", name), self._sound.get(name)), repr(name))
            for name, weight in fused.items()
        ]

    def _buffers(self) -> list[tuple[Tensor, str]]:
        return [
            (_relative(self._fused(f"buffer:{name}"), self._own("buffers", name), None), repr(name))
            for name in self._alone[0].buffers
        ]

    def _slots(self) -> list[tuple[Tensor, str]]:
        """How far apart the optimizers' slots are: an update that leaves a wrong slot errs only in the steps to come."""
        found: list[tuple[Tensor, str]] = []
        first, layout = self._alone[0], self._recipe.layout
        endless = torch.full((len(self._rows),), torch.inf, device=self._together["weights"].device)
        for number, span in enumerate(layout.spans):
            for name in (leaf.name for leaf in span.leaves if leaf.name in first.slots):
                kept, held = _kept(span, first.weights[name]), _described(span, first.slots[name])
                if kept != held:
                    return [(endless, f"the optimizer's state of {name!r} (fused: {kept}; alone: {held})")]
                for tally, _ in span.update.tallies:
                    value = self._fused(f"tally:{tally}")[:, number]
                    expected = self._slot(name, tally).to(value.dtype)
                    gap = (value - expected).abs() / expected.abs().clamp(min=1.0)
                    found.append((gap, f"{tally!r} of {name!r}"))
        for phase in range(len(self._recipe.phases)):
            for slot in layout.slots:
                names = [name for name in layout.names_of(phase) if slot in first.slots.get(name, {})]
                found += self._slot_differences(slot, [name for name in names if first.weights[name].numel()])
        return found

    def _slot_differences(self, slot: str, names: Sequence[str]) -> list[tuple[Tensor, str]]:
        """Rounding is relative to the largest gradient of all leaves; ten times as much, because slots hold squares."""
        if not names:
            return []
        fused = self._recipe.layout.views(self._fused(f"slot:{slot}"))
        gaps, largest = [], []
        for name in names:  # a leaf at a time, for the memory that takes
            value = self._slot(name, slot)
            gaps.append(_gap(fused[name], value, self._sound[name]).amax(1).double())
            largest.append(_largest(value).double())
        scale = (10 * torch.stack(largest).amax(0)).clamp(min=torch.finfo(self._recipe.layout.dtype).tiny)
        return [(gap / scale, f"{slot!r} of {name!r}") for name, gap in zip(names, gaps, strict=True)]

    def _fused(self, name: str) -> Tensor:
        """What the rows are together."""
        tensor = self._together[name]
        return tensor if self._index is None else tensor.index_select(0, self._index)

    def _own(self, kind: str, name: str) -> Tensor:
        return self._stacked([getattr(own, kind)[name] for own in self._alone])

    def _slot(self, name: str, slot: str) -> Tensor:
        return self._stacked([torch.as_tensor(own.slots[name][slot]) for own in self._alone])

    def _stacked(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(rows)).to(self._together["weights"].device)


def _beside(rows: Tensor, tensor: Tensor) -> Tensor:
    """A number for each row, beside rows of such tensors."""
    return rows.view(-1, *(1,) * tensor.dim())


def _flat(rows: Tensor) -> Tensor:
    """A vector for each row, also where a row is a number."""
    return rows.reshape(len(rows), -1)


def _largest(rows: Tensor) -> Tensor:
    """Of each row its largest absolute value, infinite ones left out."""
    return _flat(torch.where(torch.isfinite(rows), rows.abs(), 0.0)).amax(1)


def _gap(a: Tensor, b: Tensor, counts: Tensor | None) -> Tensor:
    """How far a is from b where that counts; infinite or no number in both is the same."""
    gap = torch.where(a.isfinite() | b.isfinite(), (a - b).abs(), 0.0)
    return _flat(gap if counts is None else torch.where(counts, gap, 0.0))


def _relative(a: Tensor, b: Tensor, counts: Tensor | None) -> Tensor:
    """For each row the largest difference, its strays left out, relative to the largest value."""
    if not a.numel():
        return a.new_zeros(len(a), dtype=torch.float64)
    least = 1e-3
    if not (a.is_floating_point() and b.is_floating_point()):
        a, b, least = a.double(), b.double(), 1.0
    gap = _gap(a, b, counts)
    strays = int(gap.shape[1] * _STRAYS) if a.dtype != torch.float64 else 0
    worst = gap.topk(strays + 1, dim=1).values[:, -1] if strays else gap.amax(1)
    return worst.double() / _largest(b).double().clamp(min=least)


def _kept(span: Span, weight: Tensor) -> dict[str, str]:
    """What a parameter's state will be after the fused run, name by name."""
    update = span.update
    counter = {"step": update.counter(1.0)} if update.counts else {}
    tallies = {name: torch.tensor(start) for name, start in update.tallies}
    return _described(span, counter | tallies | dict.fromkeys(span.slots, weight))


def _described(span: Span, slots: Mapping[str, Any]) -> dict[str, str]:
    """Types, and of slots the shapes: of a number only whether it is a tensor, for fused optimizers count in float32."""
    return {
        name: f"{tuple(slot.shape)} {str(slot.dtype).removeprefix('torch.')}"
        if isinstance(slot, Tensor) and name in span.slots
        else type(slot).__name__
        for name, slot in sorted(slots.items())
    }
