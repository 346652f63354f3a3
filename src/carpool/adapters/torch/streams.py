"""Data that comes in batches: loaders, datasets, iterables, functions and queues, each as passes that a reader reads ahead.

The order of a pass depends on the source alone (or on the job's seed, where carpool makes the batches), never on what else
draws from torch's global generator: a loader's sampler without a generator of its own is lent one, keyed by the epoch.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from carpool.adapters.torch.build import Arrays, make_index
from carpool.data import Item, Queue
from carpool.errors import DataError, sentence
from carpool.job import Job
from carpool.order import batch_order
from carpool.planning.cursor import Supply
from carpool.source import Source


@dataclass(frozen=True)
class Batch:
    """A batch on its device: its leaves, how they nest, how many samples it has, and when its copy is through."""

    leaves: tuple[Any, ...]
    nest: Any
    size: int
    there: torch.cuda.Event | None = None

    def whole(self, shared: bool = False) -> Any:
        """The batch as its source made it, for whoever uses it on the current stream; a copy where others use it too."""
        self.arrive()
        leaves = [leaf.clone() if shared and isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.nest)

    def arrive(self) -> None:
        """What is enqueued on the current stream from now on comes after the copy."""
        if self.there is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.there)
            for leaf in self.leaves:
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                    leaf.record_stream(stream)


def supply_of(items: Sequence[Item]) -> Supply | None:
    """The batches at the front that have one size and lie in one epoch."""
    if not items:
        return None
    size, steps = items[0].batch.size, 0
    for item in items:
        if item.batch.size != size:
            break
        steps += 1
        if item.last:
            return Supply(size, steps, ends=True)
    return Supply(size, steps, ends=False)


@dataclass(frozen=True)
class Streamed(Arrays):
    """A job's streamed data. `tensors` are those of its first batch, which tell shapes and types."""

    source: Source | None = None
    batches: int | None = None
    """How many an epoch has, where the source says."""
    foreign: str | None = None
    """What a batch holds beside tensors, which no stack can."""

    @property
    def length(self) -> int:
        return len(self.tensors[0])


@dataclass
class Streams:
    """The sources of a run: one for each thing that jobs name."""

    device: Callable[[], str]
    _sources: dict[Hashable, tuple[Any, Source]] = field(default_factory=dict)

    def of(self, job: Job, data: Any, again: Callable[[], Any] | None) -> Streamed:
        """The stream of a job. `again` makes the data anew for a later pass, where a function made it."""
        key, passes, batches = _passes(job, data, again)
        capacity = data.capacity if isinstance(data, Queue) else job.prefetch
        held = self._sources.get(key)
        if held is None:
            held = self._sources[key] = (data, Source(passes, capacity, _Landing(self.device())))
        return _described(job, held[1], batches)

    def gathered(self, data: Any, batch_size: int) -> Any:
        """One pass as arrays, for validation: read once and kept."""
        if isinstance(data, Dataset):
            data = DataLoader(data, batch_size)
        batches = [pytree.tree_map(_as_tensor, batch) for batch in data]
        if not batches:
            raise DataError(sentence("at least one batch as validation_data", "none", "pass more data"))
        return pytree.tree_map(lambda *parts: torch.cat(parts), batches[0], *batches[1:])

    def stop(self) -> None:
        for _, source in self._sources.values():
            source.stop()
        self._sources.clear()


def is_stream(data: Any) -> bool:
    """Whether the data comes in batches (or samples), not as arrays."""
    if isinstance(data, TensorDataset):
        return False
    if isinstance(data, Dataset | DataLoader | Queue):
        return True
    if isinstance(data, tuple | list | dict | torch.Tensor | np.ndarray | str):
        return False
    return hasattr(data, "__iter__")


def _passes(
    job: Job, data: Any, again: Callable[[], Any] | None
) -> tuple[Hashable, Callable[[int], Iterable[Any]], int | None]:
    """What makes two jobs' data one source, its passes, and how many batches one has."""
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return _dataset_passes(job, data)
    if job.index is not None:
        raise DataError(
            f"Job {job.name!r}: "
            + sentence("index= beside arrays or a map-style Dataset", type(data).__name__, "leave index= out")
        )
    if isinstance(data, IterableDataset):  # of samples: whoever yields batches passes an iterable of its own
        loader = DataLoader(data, job.batch_size)
        return (id(data), job.batch_size), lambda epoch: _loader_pass(loader, epoch), _length(loader)
    if isinstance(data, DataLoader):
        return id(data), lambda epoch: _loader_pass(data, epoch), _length(data)
    if again is None:
        return id(data), lambda epoch: data, _length(data)
    first = [data]
    return id(data), lambda epoch: first.pop() if first else again(), _length(data)


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _loader_pass(loader: DataLoader[Any], epoch: int) -> Iterator[Any]:
    """One pass. Passes of one loader may overlap (a group that falls back reads anew), so each has its own copy of it.

    A sampler without a generator is lent one, and so is the loader for its workers' seeds, each keyed by the epoch.
    """
    own = loader if loader.persistent_workers else _copied(loader)
    lent = [thing for thing in _samplers(own) if getattr(thing, "generator", thing) is None]
    for thing in lent:
        thing.generator = torch.Generator().manual_seed(epoch)
    iterator = iter(own)
    try:
        yield from iterator
    finally:
        for thing in lent:
            thing.generator = None
        if not loader.persistent_workers and (end := getattr(iterator, "_shutdown_workers", None)):
            end()


def _copied(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader with samplers of its own, over the same dataset, generators and functions."""
    made, sampler, batches = copy.copy(loader), copy.copy(loader.sampler), copy.copy(loader.batch_sampler)
    if getattr(batches, "sampler", None) is loader.sampler:
        vars(batches)["sampler"] = sampler
    vars(made).update(sampler=sampler, batch_sampler=batches)
    return made


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    found = (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return list({id(thing): thing for thing in found if thing is not None}.values())


_reading = threading.Lock()


def _dataset_passes(
    job: Job, data: Dataset[Any]
) -> tuple[Hashable, Callable[[int], Iterable[Any]], int | None]:
    length = len(data)  # type: ignore[arg-type]
    view = make_index(job, job.index, length)
    places = np.arange(length) if view is None else view.numpy()

    def batches(epoch: int) -> Iterator[Any]:
        order = places[batch_order(job.seed, epoch, len(places))] if job.shuffle else places
        for start in range(0, len(order), job.batch_size):
            with _reading:  # jobs of other seeds read the same object in threads of their own
                samples = [data[int(place)] for place in order[start : start + job.batch_size]]
            yield default_collate(samples)

    key = (id(data), job.seed if job.shuffle else None, job.batch_size, places.tobytes())
    return key, batches, -(-len(places) // job.batch_size)


def _described(job: Job, source: Source, batches: int | None) -> Streamed:
    first = source.first()
    tensors = tuple(leaf for leaf in first.leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0)
    foreign = next(
        (
            type(leaf).__name__ if not isinstance(leaf, torch.Tensor) else "a tensor without samples"
            for leaf in first.leaves
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0
        ),
        None,
    )
    if job.loss is not None and not (first.nest.type in (tuple, list) and first.nest.num_children == 2):
        raise DataError(
            f"Job {job.name!r}: "
            + sentence("batches (x, y) beside loss=", "another nest", "yield pairs, or use step=")
        )
    return Streamed(tensors, first.nest, source=source, batches=batches, foreign=foreign)


class _Landing:
    """Takes a batch to the device: pinned, on a stream of its own, so that copying overlaps with computing."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, batch: Any) -> Batch:
        leaves, nest = pytree.tree_flatten(batch)
        made = tuple(_as_tensor(leaf) for leaf in leaves)
        size = next((len(leaf) for leaf in made if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), 0)
        if not size:
            raise DataError(
                sentence(
                    "batches with at least one tensor of samples",
                    _words(leaves),
                    "yield tensors or arrays with a batch dimension",
                )
            )
        if not self._device.startswith("cuda"):
            return Batch(made, nest, size)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = tuple(self._moved(leaf) for leaf in made)
            there = torch.cuda.Event()
            there.record()
        return Batch(moved, nest, size, there)

    def _moved(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        pinned = leaf.pin_memory() if leaf.device.type == "cpu" else leaf
        return pinned.to(self._device, non_blocking=True)


def _as_tensor(leaf: Any) -> Any:
    return torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype != object else leaf


def _words(leaves: Sequence[Any]) -> str:
    return ", ".join(type(leaf).__name__ for leaf in leaves[:4]) or "an empty batch"
