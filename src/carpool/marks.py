"""What a fingerprint is made of: hashable values that compare by what they stand for and read well in a sentence."""

from __future__ import annotations

import types
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

Parts = tuple[Hashable, ...]


class Plain(NamedTuple):
    """A plain value with its type, shown as the value."""

    type: type
    key: Hashable

    def __repr__(self) -> str:
        return repr(self.key) if type(self.key) is self.type else str(self.key)


class Made(NamedTuple):
    """Something made of parts; a part is a fingerprint or a pair (name, fingerprint)."""

    kind: Hashable
    parts: Parts

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(map(_shown, self.parts))})"

    def named_parts(self) -> tuple[tuple[str, Hashable], ...] | None:
        """The parts when each has a name, else None."""
        pairs = [part for part in self.parts if type(part) is tuple and type(part[0]) is str]
        return tuple(pairs) if len(pairs) == len(self.parts) else None


class Code(tuple[Hashable, ...]):
    """What a code object does, shown as a short number."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"code {hash(self) & 0xFFFFFF:06x}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Identity:
    """Equal only for the very same object, which it keeps alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return type(other) is Identity and self.value is other.value

    def __hash__(self) -> int:
        return hash(id(self.value))

    def __repr__(self) -> str:
        value, kind = self.value, type(self.value)
        if issubclass(kind, type) or kind is types.FunctionType:
            return value.__qualname__
        named = kind in (types.BuiltinFunctionType, types.ModuleType)
        return value.__name__ if named else f"{kind.__qualname__} object"


def _shown(part: Hashable) -> str:
    return f"{part[0]}={part[1]}" if type(part) is tuple and len(part) == 2 else str(part)
