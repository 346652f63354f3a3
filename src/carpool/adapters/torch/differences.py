"""How far apart two sides of a step are: a stack's rows and the same members alone, or a member alone in two precisions.

What is compared stays on the device and is read once: for each member by itself the host would wait several times for each of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from carpool.adapters.torch.check import Alone
from carpool.adapters.torch.layout import Span
from carpool.adapters.torch.stacked import Recipe

_STRAYS = 1e-4  # of a tensor's elements: a ReLU at zero, or a gradient that is, may fall to either side in single precision

Leaves = Callable[[str], Tensor]


class Side(Protocol):
    """What a step gave some rows: each tensor has them first."""

    def losses(self) -> Tensor: ...

    def weights(self) -> Leaves: ...

    def slots(self, slot: str) -> Leaves: ...

    def tally(self, name: str, span: int, leaf: str) -> Tensor: ...

    def buffer(self, name: str) -> Tensor: ...


class Together:
    """The rows as the stack left them."""

    def __init__(self, recipe: Recipe, size: int, rows: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        self._layout, self._size, self._tensors = recipe.layout, size, tensors
        self._index: Tensor | None = None
        if list(rows) != list(range(len(tensors["weights"]))):
            self._index = torch.tensor(list(rows), device=tensors["weights"].device)

    def losses(self) -> Tensor:
        return self._of("sums")[:, 0] / self._size

    def weights(self) -> Leaves:
        return self._layout.views(self._of("weights")).__getitem__

    def slots(self, slot: str) -> Leaves:
        return self._layout.views(self._of(f"slot:{slot}")).__getitem__

    def tally(self, name: str, span: int, leaf: str) -> Tensor:
        return self._of(f"tally:{name}")[:, span]

    def buffer(self, name: str) -> Tensor:
        return self._of(f"buffer:{name}")

    def _of(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return tensor if self._index is None else tensor.index_select(0, self._index)


class Alones:
    """Rows whose steps alone gave the same kinds of things."""

    def __init__(self, alone: Sequence[Alone], device: torch.device) -> None:
        self._alone, self.device = alone, device
        self.first = alone[0]

    def only(self, place: int) -> Alones:
        return Alones([self._alone[place]], self.device)

    def losses(self) -> Tensor:
        return self._stacked([own.loss for own in self._alone])

    def weights(self) -> Leaves:
        return lambda name: self._stacked([own.weights[name] for own in self._alone])

    def slots(self, slot: str) -> Leaves:
        return lambda name: self._stacked([torch.as_tensor(own.slots[name][slot]) for own in self._alone])

    def tally(self, name: str, span: int, leaf: str) -> Tensor:
        return self.slots(name)(leaf)

    def buffer(self, name: str) -> Tensor:
        return self._stacked([own.buffers[name] for own in self._alone])

    def sound(self, noise: float) -> dict[str, Tensor]:
        """Which elements of each leaf count: those whose gradient is no rounding error."""
        return {
            name: self._stacked([own.grads[name] for own in self._alone]).abs()
            > _beside(noise * self._stacked([own.largest[name] for own in self._alone]), grad)
            for name, grad in self.first.grads.items()
        }

    def _stacked(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(rows)).to(self.device)


def alike(recipe: Recipe, alone: Mapping[int, Alone]) -> list[list[int]]:
    """Rows whose steps alone gave the same things: nearly always all of them."""
    kinds: dict[Hashable, list[int]] = {}
    spans = {leaf.name: span for span in recipe.layout.spans for leaf in span.leaves}
    for row, own in alone.items():
        held = {name: tuple(_described(spans[name], slots).items()) for name, slots in own.slots.items()}
        kind = (tuple(own.grads), tuple(own.buffers), tuple(held.items()))
        kinds.setdefault(kind, []).append(row)
    return list(kinds.values())


@dataclass(frozen=True)
class Differences:
    """How far apart two sides are: `values` has a line for each place and a column for each row."""

    kinds: list[str]
    places: list[str]
    values: np.ndarray

    @classmethod
    def between(cls, recipe: Recipe, one: Side, other: Alones, sound: Mapping[str, Tensor]) -> Differences:
        """What was infinite or no number on the other side counts for nothing: it diverged at once, alone as well."""
        found = {
            "loss": _losses(one, other),
            "weights": _weights(recipe, one, other, sound),
            "state": _slots(recipe, one, other, sound),
            "buffers": _buffers(one, other),
        }
        gaps = [gap.to(torch.float64) for part in found.values() for gap, _ in part]
        values = torch.stack(gaps).cpu().numpy()
        values[:, ~np.isfinite(other.losses().cpu().numpy())] = 0.0
        kinds = [kind for kind, part in found.items() for _ in part]
        places = [place for part in found.values() for _, place in part]
        return cls(kinds, places, np.where(np.isnan(values), np.inf, values))

    @property
    def largest(self) -> float:
        return float(self.values.max(initial=0.0))

    def words(self, row: int, reach: np.ndarray) -> str | None:
        """Where a row is furthest beyond what each place allows, or None."""
        place = int((self.values[:, row] / reach).argmax())
        if self.values[place, row] <= reach[place]:
            return None
        return f"{self.places[place]} by {self.values[place, row]:.1e} (allowed: {reach[place]:.0e})"


Gap = tuple[Tensor, str]


def _losses(one: Side, other: Alones) -> list[Gap]:
    own = other.losses()
    return [((one.losses() - own).abs() / own.abs().clamp(min=1.0), "loss")]


def _weights(recipe: Recipe, one: Side, other: Alones, sound: Mapping[str, Tensor]) -> list[Gap]:
    here, there = one.weights(), other.weights()
    names = [leaf.name for leaf in recipe.layout.leaves]
    return [(_relative(here(name), there(name), sound.get(name)), repr(name)) for name in names]


def moved(
    recipe: Recipe, before: Mapping[str, Tensor], after: Alones, sound: Mapping[str, Tensor]
) -> np.ndarray:
    """By how much one row's step changed its weights, leaf by leaf: in the places and the measure of their differences."""
    there = after.weights()
    names = [leaf.name for leaf in recipe.layout.leaves]
    found = [_relative(before[name][None].to(after.device), there(name), sound.get(name)) for name in names]
    return torch.stack(found)[:, 0].cpu().numpy()


def _buffers(one: Side, other: Alones) -> list[Gap]:
    return [
        (_relative(one.buffer(name), other.buffer(name), None), repr(name)) for name in other.first.buffers
    ]


def _slots(recipe: Recipe, one: Side, other: Alones, sound: Mapping[str, Tensor]) -> list[Gap]:
    """How far apart the optimizers' slots are: an update that leaves a wrong slot errs only in the steps to come."""
    found: list[Gap] = []
    first, layout = other.first, recipe.layout
    for number, span in enumerate(layout.spans):
        for name in (leaf.name for leaf in span.leaves if leaf.name in first.slots):
            kept, held = _kept(span, first.weights[name]), _described(span, first.slots[name])
            if kept != held:
                endless = torch.full_like(other.losses(), torch.inf)
                return [(endless, f"the optimizer's state of {name!r} (fused: {kept}; alone: {held})")]
            for tally, _ in span.update.tallies:
                value = one.tally(tally, number, name)
                expected = other.tally(tally, number, name).to(value.dtype)
                gap = (value - expected).abs() / expected.abs().clamp(min=1.0)
                found.append((gap, f"{tally!r} of {name!r}"))
    for phase in range(len(recipe.phases)):
        for slot in layout.slots:
            names = [name for name in layout.names_of(phase) if slot in first.slots.get(name, {})]
            filled = [name for name in names if first.weights[name].numel()]
            if filled:
                least = torch.finfo(layout.dtype).tiny
                found += _slot(slot, filled, one.slots(slot), other.slots(slot), sound, least)
    return found


def _slot(
    slot: str, names: Sequence[str], here: Leaves, there: Leaves, sound: Mapping[str, Tensor], least: float
) -> list[Gap]:
    """Rounding is relative to the largest gradient of all leaves; ten times as much, because slots hold squares."""
    gaps, largest = [], []
    for name in names:  # a leaf at a time, for the memory that takes
        value = there(name)
        gaps.append(_gap(here(name), value, sound[name]).amax(1).double())
        largest.append(_largest(value).double())
    scale = (10 * torch.stack(largest).amax(0)).clamp(min=least)
    return [(gap / scale, f"{slot!r} of {name!r}") for name, gap in zip(names, gaps, strict=True)]


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
