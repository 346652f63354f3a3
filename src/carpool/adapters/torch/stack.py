"""The tensors of a fused group on the device: allocation by shape, and rows going in and out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carpool.adapters.base import JobState
from carpool.adapters.torch.absorb import group_options, scheduler_state, slots_by_key
from carpool.adapters.torch.build import Built
from carpool.adapters.torch.layout import Layout
from carpool.adapters.torch.panels import Panels
from carpool.adapters.torch.transfer import landed
from carpool.kernels.updates import number_dtype
from carpool.planning.cursor import MAX_CHUNK_STEPS, Cursor

Tensors = dict[str, Tensor]


def state_tensors(
    layout: Layout, built: Built, width: int, values: int, device: str, shared: Collection[str] = ()
) -> Tensors:
    """What the members are: weights, optimizer slots, fixed parameters and buffers, a row for each.

    Where a phase may sit a step out, also the values that its last run showed. `shared` leaves are one object in all
    members and get no rows.
    """
    learning = {leaf.name for leaf in layout.leaves}
    made = {"weights": torch.zeros(width, layout.width, dtype=layout.dtype, device=device)}
    for slot in layout.slots:
        made[f"slot:{slot}"] = torch.zeros(width, layout.width, dtype=layout.dtype, device=device)
    for tally, starts in layout.tallies.items():
        before = torch.tensor(starts, dtype=number_dtype(), device=device)
        made[f"tally:{tally}"] = before.repeat(width, 1)
    for name, parameter in built.model.named_parameters():
        if name not in learning and name not in shared:
            made[f"fixed:{name}"] = torch.zeros(width, *parameter.shape, dtype=parameter.dtype, device=device)
    for name, buffer in built.model.named_buffers():
        if name not in shared:
            made[f"buffer:{name}"] = torch.zeros(width, *buffer.shape, dtype=buffer.dtype, device=device)
    if any(phase.every > 1 for phase in built.phases):
        made["last"] = torch.zeros(width, values, dtype=torch.float64, device=device)
    if built.job.accumulate > 1:
        made["gathered"] = torch.zeros_like(made["weights"])
    made["updates"] = torch.zeros(width, len(layout.spans), dtype=torch.int64, device=device)
    made["seeds"] = torch.zeros(width, dtype=torch.int64, device=device)
    made["steps"] = torch.zeros(width, dtype=torch.int64, device=device)
    made["alive"] = torch.ones(width, dtype=torch.bool, device=device)
    return made


def shared_tensors(
    built: Built, shared: Collection[str], made: Callable[..., Tensor], device: str
) -> Tensors:
    """The leaves that are one object in all members, each by what `made` makes of it."""
    leaves = {**dict(built.model.named_parameters()), **dict(built.model.named_buffers())}
    return {f"shared:{name}": made(leaves[name].detach(), device=device) for name in shared}


def num_columns(layout: Layout) -> int:
    """The most scalars that a group's update reads."""
    return max(span.num_columns for span in layout.spans)


def feed_tensors(layout: Layout, built: Built, panels: Panels, values: int, device: str) -> Tensors:
    """What a chunk says: who is active from where, with which scalars; and what comes back."""
    width = panels.width
    wide = torch.float64 if layout.dtype == torch.float64 else torch.float32
    return {
        "active": torch.zeros(width, dtype=torch.bool, device=device),
        "first": torch.zeros(width, dtype=torch.int64, device=device),
        "batch": torch.zeros(width, dtype=torch.int64, device=device),
        "k": torch.zeros(panels.count, dtype=torch.int64, device=device),
        "table": torch.zeros(
            width, MAX_CHUNK_STEPS, len(layout.spans), num_columns(layout), dtype=wide, device=device
        ),
        "due": torch.zeros(width, MAX_CHUNK_STEPS, len(built.phases), dtype=torch.bool, device=device),
        "clip": torch.full((width,), torch.inf, dtype=wide, device=device),
        "sums": torch.zeros(width, values, dtype=torch.float64, device=device),
        "taken": torch.zeros(width, dtype=torch.int64, device=device),
    }


_OF_UPDATES = ("gathered", "updates", "last")


def evaluation_tensors(state: Tensors, values: int, device: str) -> Tensors:
    """The same members with a feed of their own for validation."""
    width, count = len(state["weights"]), len(state["k"])
    kept = {
        name: t
        for name, t in state.items()
        if is_state(name) or name == "seeds" or name.startswith("shared:")
    }
    kept = {
        name: t
        for name, t in kept.items()
        if not name.startswith(("slot:", "tally:")) and name not in _OF_UPDATES
    }
    return kept | {
        "active": torch.zeros(width, dtype=torch.bool, device=device),
        "first": torch.zeros(width, dtype=torch.int64, device=device),
        "batch": torch.zeros(width, dtype=torch.int64, device=device),
        "k": torch.zeros(count, dtype=torch.int64, device=device),
        "sums": torch.zeros(width, values, dtype=torch.float64, device=device),
        "taken": torch.zeros(width, dtype=torch.int64, device=device),
    }


def empty_data(
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], rows: int, order_length: int, device: str
) -> Tensors:
    """Data and order tensors of the right shapes without contents, for tracing."""
    made = {f"data:{i}": torch.empty(s, dtype=d, device=device) for i, (s, d) in enumerate(shapes)}
    return made | {"order": torch.zeros(rows, order_length, dtype=torch.int32, device=device)}


def activate(feed: Tensors, rows: Tensor, starts: Tensor) -> None:
    """Makes these rows active, each from its own start in its order, or all from one; the others follow the first of them without effect.

    What they would read of their own may hold what would raise.
    """
    feed["active"].zero_()
    feed["active"].index_fill_(0, rows, True)  # by index with a number the host would wait for the device
    if len(feed["order"]) > 1:  # else there is one for all
        starts = starts + rows * feed["order"].shape[1]
    feed["first"].copy_(starts[0].expand_as(feed["first"]))
    feed["first"][rows] = starts


# Rows in


def initial_states(built: Built) -> JobState:
    """A job's state as its live objects hold it now (no copies are made)."""
    model = {name: t.detach() for name, t in (*built.model.named_parameters(), *built.model.named_buffers())}
    return JobState(Cursor(), model, slots_by_key(built), group_options(built), scheduler_state(built))


def write_rows(layout: Layout, tensors: Tensors, rows: Sequence[int], states: Sequence[JobState]) -> None:
    """Writes states into rows. Stacked on the host first: one copy to the device a leaf, not one a member."""
    index = torch.tensor(list(rows), device=tensors["weights"].device)
    _put(tensors["weights"], index, _matrix(layout, [state.model for state in states]))
    for slot in layout.slots:
        if any(state.optimizer for state in states):
            _put(
                tensors[f"slot:{slot}"],
                index,
                _matrix(layout, [_slot(layout, state, slot) for state in states]),
            )
        else:  # fresh optimizers: zeros need no trip from the host
            tensors[f"slot:{slot}"].index_fill_(0, index, 0)
    for tally in layout.tallies:
        rows_of = [tallied(layout, state)[tally] for state in states]
        _put(tensors[f"tally:{tally}"], index, torch.tensor(rows_of, dtype=torch.float64))
    for name, tensor in tensors.items():
        kind, _, leaf = name.partition(":")
        if kind in ("fixed", "buffer"):
            _put(tensor, index, torch.stack([state.model[leaf].detach().cpu() for state in states]))
    for name in ("gathered", "last"):
        if name in tensors:
            tensors[name].index_fill_(0, index, 0)
    _put(tensors["updates"], index, torch.tensor(np.array([updates_done(layout, s) for s in states])))
    _put(tensors["steps"], index, torch.tensor([state.cursor.step for state in states]))
    tensors["alive"][index] = True


def fill_up(tensors: Tensors, members: int) -> None:
    """Rows after the members' are the first member's again: with zeros a model may not be able to compute anything."""
    for name, tensor in tensors.items():
        if is_state(name) or name == "seeds":
            tensor[members:] = tensor[:1]


def _put(tensor: Tensor, index: Tensor, rows: Tensor) -> None:
    tensor.index_copy_(0, index, rows.to(tensor.device, tensor.dtype))


def _matrix(layout: Layout, members: Sequence[Mapping[str, Tensor]]) -> Tensor:
    if not layout.leaves:
        return torch.zeros(len(members), layout.width, dtype=layout.dtype)
    return layout.flat(
        {leaf.name: torch.stack([m[leaf.name].detach().cpu() for m in members]) for leaf in layout.leaves}
    )


def _slot(layout: Layout, state: JobState, slot: str) -> Mapping[str, Tensor]:
    blank = {leaf.name: torch.zeros(leaf.shape, dtype=layout.dtype) for leaf in layout.leaves}
    held = {leaf.name: state.optimizer.get(leaf.key, {}).get(slot) for leaf in layout.leaves}
    return blank | {name: value for name, value in held.items() if value is not None}


def updates_done(layout: Layout, state: JobState) -> np.ndarray:
    """How many updates each parameter group has had. Raises ValueError where a group's leaves disagree."""
    counts = np.zeros(len(layout.spans))
    if not state.optimizer:
        return counts
    for number, span in enumerate(layout.spans):
        seen = {_count(state.optimizer.get(leaf.key, {})) for leaf in span.leaves}
        if len(seen) > 1:
            raise ValueError(f"parameters of one group are at different steps ({sorted(seen)})")
        counts[number] = next(iter(seen), 0.0)
    return counts


def tallied(layout: Layout, state: JobState) -> dict[str, list[float]]:
    """The tallies of each parameter group. Raises ValueError where a group's leaves disagree."""
    found: dict[str, list[float]] = {}
    for tally, starts in layout.tallies.items():
        found[tally] = []
        for span, start in zip(layout.spans, starts, strict=True):
            held = (state.optimizer.get(leaf.key, {}) for leaf in span.leaves)
            seen = {float(slots.get(tally, start)) for slots in held}
            if len(seen) > 1:
                raise ValueError(f"parameters of one group differ in {tally!r} ({sorted(seen)})")
            found[tally].append(next(iter(seen), start))
    return found


def _count(slots: Mapping[str, Tensor]) -> float:
    if "step" in slots:
        return float(slots["step"])
    return 1.0 if any(slot is not None for slot in slots.values()) else 0.0


# What it takes


def checked_bytes(tensors: Tensors) -> int:
    """What checking one member takes.

    Its state before, twice alone and once together; beside that its gradients, which of their elements count, and of one leaf at a time
    what is between: at most as much as four times the weights.
    """
    state = sum(tensor.nbytes for name, tensor in tensors.items() if is_state(name))
    return 4 * (state + tensors["weights"].nbytes) // len(tensors["weights"])


# Rows out


def read_rows(
    layout: Layout, tensors: Tensors, rows: Sequence[int], members: Sequence[Built]
) -> tuple[JobState, ...]:
    """The states of these rows, on the host."""
    out = {name: landed(_chosen(tensor, rows)) for name, tensor in tensors.items() if is_state(name)}
    steps = out["steps"].tolist()
    models = _rows_of(layout, out["weights"])
    for name, tensor in out.items():
        kind, _, leaf = name.partition(":")
        if kind in ("fixed", "buffer"):
            models[leaf] = tensor.unbind(0)
    slots = {slot: _rows_of(layout, out[f"slot:{slot}"]) for slot in layout.slots}
    optimizers = _optimizer_rows(layout, out, slots)
    return tuple(
        JobState(
            Cursor(step=steps[i]),
            {name: leaves[i] for name, leaves in models.items()},
            optimizers[i],
            group_options(built),
            scheduler_state(built),
        )
        for i, built in enumerate(members)
    )


def _rows_of(layout: Layout, matrix: Tensor) -> dict[str, Sequence[Tensor]]:
    """Each leaf's rows as views: a few operations for all members, not a few for each."""
    return {name: leaf.unbind(0) for name, leaf in layout.views(matrix).items()}


def _chosen(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows; where they follow one another, without a copy on the device."""
    first = rows[0]
    if list(rows) == list(range(first, first + len(rows))):
        return tensor[first : first + len(rows)]
    return tensor.index_select(0, torch.tensor(list(rows), device=tensor.device))


def is_state(name: str) -> bool:
    """Whether a tensor of this name is part of what a member is."""
    return name in ("weights", "steps", *_OF_UPDATES) or name.startswith(
        ("slot:", "tally:", "fixed:", "buffer:")
    )


def _optimizer_rows(
    layout: Layout, out: Tensors, slots: Mapping[str, Mapping[str, Sequence[Tensor]]]
) -> list[dict[str, dict[str, Any]]]:
    """What the optimizers keep, row by row."""
    made: list[dict[str, dict[str, Any]]] = [{} for _ in range(len(out["steps"]))]
    for number, span in enumerate(layout.spans):
        update, counts = span.update, out["updates"][:, number].tolist()
        for own, (i, count) in zip(made, enumerate(counts), strict=True):
            if count == 0 and not update.eager:
                continue  # most optimizers have no state before their first step
            for leaf in span.leaves:
                held: dict[str, Any] = {"step": update.counter(count)} if update.counts else {}
                for tally, _ in update.tallies:
                    held[tally] = out[f"tally:{tally}"][i, number].clone()
                for slot in span.slots:
                    held[slot] = slots[slot][leaf.name][i]
                if held:
                    own[leaf.key] = held
    return made
