"""The output of many scripts on one terminal: line by line, each behind its script's name."""

from __future__ import annotations

import select
import time
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
    """Writes lines behind names, coloured where that is wanted. A stream that takes no more ends the showing, nothing else.

    `lost` says why then. No stream is one that was closed from the start; `patience_s` is how long a full one that does not block may
    take nothing.
    """

    def __init__(self, stream: BinaryIO | None, is_coloured: bool, patience_s: float = 10.0) -> None:
        # Unbuffered: what a full disk did not take would be tried again at the very end, by Python.
        self._stream: BinaryIO | None = getattr(stream, "raw", stream)
        self.lost = "" if stream is not None else "it is closed"
        self._is_coloured, self._patience_s = is_coloured, patience_s
        self._prefixes: dict[str, bytes] = {}

    def show(self, name: str, lines: list[bytes]) -> None:
        """Bytes stay as they are, whatever they are encoded in."""
        prefix = self._prefix(name)
        self._write(b"".join(prefix + line + b"\n" for line in lines))

    def say(self, text: str) -> bool:
        """Writes a text that is no script's; whether it could."""
        self._write(text.encode(errors="backslashreplace") + b"\n")
        return not self.lost

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest and self._stream is not None:
                count = self._stream.write(rest)
                if count is None:  # of one that does not block: it is full
                    self._wait(self._stream)
                rest = rest[count or 0 :]
        except (OSError, ValueError) as error:
            self._stream, self.lost = None, getattr(error, "strerror", None) or str(error)

    def _wait(self, stream: BinaryIO) -> None:
        """Until the stream takes more."""
        poll, end = select.poll(), time.monotonic() + self._patience_s
        poll.register(stream.fileno(), select.POLLOUT)
        while not poll.poll(1e3 * max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                raise TimeoutError(f"nobody read from it for {self._patience_s:g} s")

    def _prefix(self, name: str) -> bytes:
        if name not in self._prefixes:
            colour = _COLOURS[len(self._prefixes) % len(_COLOURS)]
            shown = f"{printable(name)} |"
            text = f"\x1b[{colour}m{shown}\x1b[0m " if self._is_coloured else f"{shown} "
            self._prefixes[name] = text.encode(errors="backslashreplace")
        return self._prefixes[name]


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
