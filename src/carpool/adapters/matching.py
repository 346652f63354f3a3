"""Saved arrays beside those that an object has: by name, each of the same shape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from carpool.arrays import Array
from carpool.errors import ModelError, sentence

_FEW = 3


def matched(
    shapes: Mapping[str, tuple[int | None, ...]], arrays: Mapping[str, Array], numbered: bool = False
) -> dict[str, Array]:
    """The arrays under the object's names. Raises ModelError where names or shapes are others.

    `numbered`: its library numbers what it makes ("dense_3"), so that names may differ in such numbers, in the same order.
    """
    found = dict(arrays)
    if numbered and found.keys() != shapes.keys() and [*map(_bare, found)] == [*map(_bare, shapes)]:
        found = dict(zip(shapes, found.values(), strict=True))
    strange = [
        *(name for name in found if name not in shapes),
        *(name for name in shapes if name not in found),
    ]
    strange += [
        f"{name} {found[name].shape}"
        for name, shape in shapes.items()
        if not strange and found[name].shape != tuple(shape)
    ]
    if strange:
        more = f" and {len(strange) - _FEW} more" if len(strange) > _FEW else ""
        raise ModelError(
            sentence(
                "an object of the structure that was saved",
                f"one that differs in {', '.join(strange[:_FEW])}{more}",
                "make it as it was made for training",
            )
        )
    return found


def told_apart(names: Iterable[str]) -> list[str]:
    """The names, the second of one name with its number.

    >>> told_apart(["kernel", "bias", "kernel"])
    ['kernel', 'bias', 'kernel#2']
    """
    seen: dict[str, int] = {}
    made = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        made.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return made


def _bare(name: str) -> str:
    return re.sub(r"_\d+(?=[/.#]|$)", "", name)
