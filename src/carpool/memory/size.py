"""Amounts of memory as people write them: "16GiB", "500 MB", "90%", "auto", or a number of bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Integral

from carpool.errors import OptionError, sentence

Size = str | int

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
_BY_LOWER = {unit.lower(): factor for unit, factor in _UNITS.items()}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(%|[a-z]*)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Limit:
    """How much of a device may be used: so many bytes, or a share of it; neither is all that is free."""

    size_bytes: int | None = None
    share: float | None = None

    def of(self, total_bytes: int, free_bytes: int) -> int:
        """In bytes, for a device of this size; never more than is free.

        >>> Limit(share=0.5).of(total_bytes=100, free_bytes=80), Limit(size_bytes=90).of(100, 80), Limit().of(100, 80)
        (50, 80, 80)
        """
        if self.size_bytes is not None:
            return min(self.size_bytes, free_bytes)
        return free_bytes if self.share is None else min(int(self.share * total_bytes), free_bytes)


def limit(text: Size, word: str = "memory") -> Limit:
    """What a run may use, from what the user wrote. `word` names the option in the message.

    >>> limit("16GiB").size_bytes == 16 * 1024**3, limit("90%").share, limit("auto")
    (True, 0.9, Limit(size_bytes=None, share=None))
    """
    if isinstance(text, str) and text.strip().lower() == "auto":
        return Limit()
    if isinstance(text, str) and (found := _AMOUNT.fullmatch(text)) and found.group(2) == "%":
        share = float(found.group(1)) / 100
        if 0 < share <= 1:
            return Limit(share=share)
    elif (size := _bytes(text)) is not None:
        return Limit(size_bytes=size)
    raise OptionError(
        sentence(
            f'{word}="auto", a size such as "16GiB" or a share such as "90%"', repr(text), "pass one of these"
        )
    )


def size(text: Size, word: str = "budget") -> int:
    """So many bytes.

    >>> size("1.5 KiB"), size(2048), size("2 KB")
    (1536, 2048, 2000)
    """
    found = _bytes(text)
    if found is None:
        raise OptionError(
            sentence(f'{word} as a size such as "8GiB" or a number of bytes', repr(text), "pass one of these")
        )
    return found


def shown(size_bytes: float) -> str:
    """A size for people.

    >>> shown(1536), shown(3 * 1024**3)
    ('2 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


def _bytes(text: Size) -> int | None:
    """None for what is no size, and for nothing."""
    if isinstance(text, Integral) and not isinstance(text, bool):
        return max(0, int(text)) or None
    found = _AMOUNT.fullmatch(text) if isinstance(text, str) else None
    factor = _BY_LOWER.get(found.group(2).lower()) if found else None
    if found is None or factor is None:
        return None
    amount = int(float(found.group(1)) * factor)
    return amount if amount > 0 else None
