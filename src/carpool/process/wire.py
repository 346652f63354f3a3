"""Messages between us and a worker: cloudpickle over a socket, large arrays beside it in memory that both of us map.

A block of such memory has no name, only descriptors that travel with the message: it is gone when the last process that maps it is,
whatever became of the others. That is why it is not `multiprocessing.shared_memory`, whose names outlive a process that is killed,
and whose /dev/shm is 64 MB small in a container.
"""

from __future__ import annotations

import importlib
import io
import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

from carpool.process.ready import ready

LARGE_BYTES = 64 * 1024
_ALIGNED = 64  # what frameworks' own allocators give: kernels may round differently elsewhere
_HEADER = struct.Struct("!QI")
_MOST_DESCRIPTORS = 200  # in one call; the system takes 253
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Region:
    """Bytes of a message's blocks: which block, from where, how many. It arrives as a writable view of them."""

    block: int
    start: int
    size: int


@dataclass(frozen=True)
class Large:
    """Memory that goes beside the pickle: `key` says when two are one, and `rebuild(view, *rest)` makes the object again."""

    key: tuple[object, ...]
    holder: Any
    """Keeps the memory, and so the key, from being used again."""
    bytes: np.ndarray
    rebuild: Callable[..., Any]
    rest: tuple[Any, ...]


Special = Callable[[Any], Large | tuple[Any, ...] | None]
"""What of an object is not pickled in the usual way: memory, or what `__reduce__` would return; None for nothing."""
SPECIAL = {"torch": "carpool.adapters.torch.wire:special"}
"""The functions that know frameworks' objects: asked only where the framework is imported already."""


class Closed(Exception):
    """The other side is gone."""


# Encoding


@dataclass(frozen=True)
class Encoded:
    """A message ready to be sent: its pickle, and the descriptors of its blocks."""

    text: bytes
    descriptors: tuple[int, ...]
    own: tuple[int, ...]
    """Those that nobody else will name: closed when the message has been sent."""

    def close(self) -> None:
        for descriptor in self.own:
            os.close(descriptor)


class Blocks:
    """Encodes messages. An array that `survey` saw in several of them is written into memory once, for all of them."""

    def __init__(self) -> None:
        self._seen: dict[tuple[object, ...], tuple[Large, int]] = {}
        self._kept: dict[tuple[object, ...], tuple[int, int]] = {}
        self._descriptors: list[int] = []

    def survey(self, message: Any) -> None:
        """Notes a message's arrays and copies nothing. Raises what pickling the message raises."""
        found: dict[tuple[object, ...], Large] = {}

        def place(large: Large) -> Region:
            found[large.key] = large
            return Region(0, 0, 0)

        _pickled(message, place)
        for key, large in found.items():
            _, count = self._seen.get(key, (large, 0))
            self._seen[key] = (large, count + 1)

    def surveyed(self) -> None:
        """No more messages to survey: what only one of them names is forgotten."""
        self._seen = {key: seen for key, seen in self._seen.items() if seen[1] > 1}

    def encode(self, message: Any) -> Encoded:
        """The message, with its large arrays in blocks: one for those that are its own, earlier ones for shared arrays."""
        own, shared = _Packing(), _Packing()
        blocks: list[_Packing | int] = []

        def place(large: Large) -> Region:
            kept = self._kept.get(large.key)
            if kept is not None:
                block, start = kept
            else:
                block = shared if large.key in self._seen else own
                start = block.place(large)
            if block not in blocks:
                blocks.append(block)
            return Region(blocks.index(block), start, large.bytes.nbytes)

        text = _pickled(message, place)
        descriptors = [block if isinstance(block, int) else block.written() for block in blocks]
        if shared in blocks:
            descriptor = descriptors[blocks.index(shared)]
            self._descriptors.append(descriptor)
            self._kept |= {key: (descriptor, start) for key, start in shared.starts.items()}
        closing = (descriptors[blocks.index(own)],) if own in blocks else ()
        return Encoded(text, tuple(descriptors), closing)

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._kept.clear()
        self._seen.clear()

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Packing:
    """Arrays side by side in one block."""

    def __init__(self) -> None:
        self.starts: dict[tuple[object, ...], int] = {}
        self._arrays: list[tuple[int, np.ndarray, Any]] = []
        self._size = 0

    def place(self, large: Large) -> int:
        if large.key not in self.starts:
            self.starts[large.key] = self._size
            self._arrays.append((self._size, large.bytes, large.holder))
            self._size += -(-large.bytes.nbytes // _ALIGNED) * _ALIGNED
        return self.starts[large.key]

    def written(self) -> int:
        """The descriptor of a block that holds them."""
        descriptor = _memory(self._size)
        with mmap.mmap(descriptor, self._size) as mapped:
            whole = np.frombuffer(mapped, np.uint8)
            for start, array, _ in self._arrays:
                whole[start : start + array.nbytes] = array
            del whole  # the map cannot be closed while it is looked at
        return descriptor


def _memory(size: int) -> int:
    """Memory without a name, all of it there: too little of it is an error here, and no crash at the first touch."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("carpool")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise MemoryError(f"no {size} bytes of memory to share with a worker: {error}") from error
    return descriptor


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, place: Callable[[Large], Region]) -> None:
        super().__init__(file)
        self._place = place
        self._special = list(_special())

    def reducer_override(self, obj: Any) -> Any:
        for special in self._special:
            found = special(obj)
            if isinstance(found, Large):
                return found.rebuild, (self._place(found), *found.rest)
            if found is not None:
                return found
        return super().reducer_override(obj)

    def persistent_id(self, obj: Any) -> Any:
        return (obj.block, obj.start, obj.size) if type(obj) is Region else None


def _pickled(message: Any, place: Callable[[Large], Region]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, place).dump(message)
    return file.getvalue()


def _special() -> Iterator[Special]:
    yield _large_array
    for framework, path in SPECIAL.items():
        if framework in sys.modules:
            module, _, name = path.partition(":")
            yield getattr(importlib.import_module(module), name)


def _large_array(thing: Any) -> Large | None:
    if type(thing) not in (np.ndarray, np.memmap) or thing.nbytes < LARGE_BYTES or thing.dtype.hasobject:
        return None
    order = "F" if thing.flags.f_contiguous and not thing.flags.c_contiguous else "C"
    flat = np.ascontiguousarray(np.asarray(thing).reshape(-1, order=order))
    kind = (thing.dtype, thing.shape, order)
    return Large(("array", id(thing)), thing, flat.view(np.uint8), _array, kind)


def _array(view: memoryview, dtype: np.dtype, shape: tuple[int, ...], order: Any) -> np.ndarray:
    return np.frombuffer(view, np.uint8).view(dtype).reshape(shape, order=order)


# Decoding


class _Unpickler(pickle.Unpickler):
    def __init__(self, text: bytes, maps: Sequence[mmap.mmap]) -> None:
        super().__init__(io.BytesIO(text))
        self._maps = maps

    def persistent_load(self, pid: Any) -> memoryview:
        block, start, size = pid
        return memoryview(self._maps[block])[start : start + size]


@dataclass(frozen=True)
class Frame:
    """A message that has arrived whole, not yet decoded: decoding imports what the message names, and may raise."""

    text: bytes
    descriptors: tuple[int, ...]

    def decode(self) -> Any:
        """The message. Its arrays are views of the blocks; what is written into one is copied then, and seen by nobody else."""
        try:
            maps = [mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY) for descriptor in self.descriptors]
        finally:
            for descriptor in self.descriptors:
                os.close(descriptor)
        return _Unpickler(self.text, maps).load()


# The socket


class Channel:
    """Our end of the socket. Any thread may send."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._read = bytearray()
        self._descriptors: list[int] = []
        self.sent_bytes = 0
        """How much has gone through the socket."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, blocks: Blocks | None = None) -> None:
        """Waits until the message is out. Raises what pickling it raises, with nothing sent, and Closed."""
        encoded = (blocks or Blocks()).encode(message)
        try:
            with self._sending:
                self._send(encoded)
        except OSError as error:
            raise Closed(str(error)) from error
        finally:
            encoded.close()

    def _send(self, encoded: Encoded) -> None:
        self._socket.sendall(_HEADER.pack(len(encoded.text), len(encoded.descriptors)))
        for batch in _batches(encoded.descriptors):
            socket.send_fds(self._socket, [b"."], batch)
        self._socket.sendall(encoded.text)
        self.sent_bytes += _HEADER.size + len(encoded.text)

    def poll(self) -> Frame | None:
        """The next message, if all of it has come."""
        while (frame := self._frame()) is None:
            if not ready([self._socket], 0):
                return None
            self._take()
        return frame

    def wait(self) -> Frame:
        """The next message."""
        while (frame := self._frame()) is None:
            self._take()
        return frame

    def _take(self) -> None:
        try:
            text, descriptors, _, _ = socket.recv_fds(
                self._socket, _READ_BYTES, _MOST_DESCRIPTORS, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            )
        except OSError as error:
            raise Closed(str(error)) from error
        self._descriptors += descriptors
        self._read += text
        if not text:
            raise Closed("the other side closed the socket")

    def _frame(self) -> Frame | None:
        if len(self._read) < _HEADER.size:
            return None
        size, count = _HEADER.unpack_from(self._read)
        start = _HEADER.size + -(-count // _MOST_DESCRIPTORS)
        if len(self._read) < start + size:
            return None
        text = bytes(self._read[start : start + size])
        del self._read[: start + size]
        descriptors, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return Frame(text, tuple(descriptors))

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._socket.close()


def _batches(descriptors: Sequence[int]) -> Iterator[list[int]]:
    for start in range(0, len(descriptors), _MOST_DESCRIPTORS):
        yield list(descriptors[start : start + _MOST_DESCRIPTORS])


def round_trip(thing: Any) -> Any:
    """What arrives of this at the other side."""
    return pickle.loads(cloudpickle.dumps(thing))
