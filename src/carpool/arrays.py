"""Arrays of any framework as bytes with a type and a shape, and safetensors files of them. Imports no framework."""

from __future__ import annotations

import importlib
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from carpool.errors import FileError, sentence

_NUMPY = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
_SMALL = {"BF16": ("bfloat16", 2), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1)}
"""Types that NumPy has from ml_dtypes, and the bytes that they take."""
_NAMES = {name: dtype for dtype, name in _NUMPY.items()} | {
    name: dtype for dtype, (name, _) in _SMALL.items()
}
_COMPLEX = "complex128"
_MOST_HEADER_BYTES = 100 << 20


class Array(NamedTuple):
    """An array's bytes, in rows, with its type in safetensors' words."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, values: Any) -> Array:
        """A NumPy array, or what becomes one.

        >>> Array.of(np.float32([1.0, 2.0])).shape
        (2,)
        """
        array = np.asarray(values)
        return cls.named(array.dtype.name, array.shape, array.tobytes())

    @classmethod
    def named(cls, dtype: str, shape: tuple[int, ...], data: bytes) -> Array:
        """Of a type in NumPy's words, which torch and JAX have too."""
        if dtype == _COMPLEX:
            return cls(_COMPLEX, shape, data)
        if dtype not in _NAMES:
            raise TypeError(sentence("an array of numbers that safetensors has", dtype, "save it yourself"))
        return cls(_NAMES[dtype], shape, data)

    @property
    def name(self) -> str:
        """Its type in NumPy's words."""
        return self.dtype if self.dtype == _COMPLEX else _NUMPY.get(self.dtype) or _SMALL[self.dtype][0]

    def numpy(self) -> np.ndarray:
        """The values; of a type that NumPy has only from ml_dtypes, where that is missing, as float32, which holds them all."""
        if self.dtype in _SMALL:
            return self._small()
        return np.frombuffer(self.data, self.name).reshape(self.shape).copy()

    def _small(self) -> np.ndarray:
        try:
            kind = getattr(importlib.import_module("ml_dtypes"), self.name)
        except ImportError:
            if self.dtype != "BF16":
                raise
            wide = np.frombuffer(self.data, np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.shape)
        return np.frombuffer(self.data, kind).reshape(self.shape).copy()


def write(path: Path, arrays: Mapping[str, Array], about: Mapping[str, str] | None = None) -> None:
    """A safetensors file. What is one array under several names is written once, and the other names point to it."""
    first: dict[int, str] = {}
    told = dict(about or {})
    header: dict[str, Any] = {}
    for name, array in arrays.items():
        if (known := first.setdefault(id(array), name)) != name:
            told[name] = known
            continue
        header[name] = {"dtype": array.dtype, "shape": list(array.shape)}
        if array.dtype == _COMPLEX:  # safetensors has it not: as pairs
            header[name] = {"dtype": "F64", "shape": [*array.shape, 2]}
            told[f"{_COMPLEX} {name}"] = name
    held: list[bytes] = []
    place = 0
    for name in sorted(header, key=lambda name: -_size(header[name]["dtype"])):  # so that each lies aligned
        data = arrays[name].data
        header[name]["data_offsets"] = [place, place + len(data)]
        held.append(data)
        place += len(data)
    text = json.dumps({"__metadata__": told, **header} if told else header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for data in held:
            file.write(data)


def read(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """The arrays of a safetensors file under all their names, and what is said about them."""
    try:
        with path.open("rb") as file:
            whole = file.read()
        (length,) = struct.unpack_from("<Q", whole)
        header = json.loads(whole[8 : 8 + length] if length <= _MOST_HEADER_BYTES else b"")
        told = header.pop("__metadata__", {})
        body = memoryview(whole)[8 + length :]
        arrays = {name: _array(entry, body) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        received = f"{path}: {type(error).__name__}: {error}"
        raise FileError(sentence("a safetensors file", received, "save the results again")) from error
    for name, known in told.items():
        if known not in arrays:
            continue
        if name == f"{_COMPLEX} {known}":
            pairs = arrays[known]
            arrays[known] = Array(_COMPLEX, pairs.shape[:-1], pairs.data)
    return arrays | {
        name: arrays[known] for name, known in told.items() if _points(name, known, arrays)
    }, told


def _points(name: str, known: str, arrays: Mapping[str, Array]) -> bool:
    return known in arrays and name not in arrays and name != f"{_COMPLEX} {known}"


def _array(entry: Mapping[str, Any], body: memoryview) -> Array:
    dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
    start, end = entry["data_offsets"]
    if not 0 <= start <= end <= len(body) or end - start != math.prod(shape) * _size(dtype):
        raise ValueError("its sizes do not fit")
    return Array(dtype, shape, bytes(body[start:end]))


def _size(dtype: str) -> int:
    if dtype == _COMPLEX:
        return 16
    return _SMALL[dtype][1] if dtype in _SMALL else np.dtype(_NUMPY[dtype]).itemsize
