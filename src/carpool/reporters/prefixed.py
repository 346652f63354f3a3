"""The output of many scripts on one terminal: line by line, each behind its script's name."""

from __future__ import annotations

from typing import BinaryIO

from carpool.errors import printable

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_LONGEST = 1 << 16  # of a line that does not end; what comes after it is the next line


class Lines:
    """Bytes in as they come, whole lines out. Of a progress bar that writes over its line, the last state is left.

    >>> lines = Lines()
    >>> lines.take(b"one" + bytes([10]) + b"10 %" + bytes([13]) + b"20 %"), lines.rest()
    ([b'one'], [b'20 %'])
    """

    def __init__(self) -> None:
        self._partial = b""

    def take(self, data: bytes) -> list[bytes]:
        """The lines that are complete now, without their ends."""
        *whole, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _LONGEST:
            whole.append(self._partial)
            self._partial = b""
        return [_last_state(line) for line in whole]

    def rest(self) -> list[bytes]:
        """A last line that never ended."""
        partial, self._partial = self._partial, b""
        return [_last_state(partial)] if partial else []


class Prefixed:
    """Writes lines behind names, coloured where that is wanted. A reader that goes away ends the showing, nothing else."""

    def __init__(self, stream: BinaryIO, is_coloured: bool) -> None:
        self._stream: BinaryIO | None = stream
        self._is_coloured = is_coloured
        self._prefixes: dict[str, bytes] = {}

    def show(self, name: str, lines: list[bytes]) -> None:
        """Bytes stay as they are, whatever they are encoded in."""
        if self._stream is None or not lines:
            return
        prefix = self._prefix(name)
        try:
            self._stream.write(b"".join(prefix + line + b"\n" for line in lines))
            self._stream.flush()
        except BrokenPipeError:
            self._stream = None

    def _prefix(self, name: str) -> bytes:
        if name not in self._prefixes:
            colour = _COLOURS[len(self._prefixes) % len(_COLOURS)]
            shown = f"{printable(name)} |"
            text = f"\x1b[{colour}m{shown}\x1b[0m " if self._is_coloured else f"{shown} "
            self._prefixes[name] = text.encode(errors="backslashreplace")
        return self._prefixes[name]


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
