"""Lines behind names, from bytes that come as they like."""

from __future__ import annotations

import io
import os

import pytest

from carpool.reporters.prefixed import Lines, Prefixed


def test_lines_are_put_together_from_pieces():
    lines = Lines()
    assert lines.take(b"one\ntw") == [b"one"]
    assert lines.take(b"o") == []
    assert lines.take(b"\n\nthree") == [b"two", b""]
    assert lines.rest() == [b"three"]
    assert lines.rest() == []


def test_bytes_of_any_encoding_survive():
    assert Lines().take(b"\xff\xfe caf\xe9\n") == [b"\xff\xfe caf\xe9"]


def test_a_progress_bar_is_its_last_state():
    lines = Lines()
    assert lines.take(b"\r10 %\r20 %") == []
    assert lines.take(b"\r99 %\r100 %\nended\r\n") == [b"100 %", b"ended"]


def test_a_line_that_never_ends_is_shown_in_parts():
    lines = Lines()
    assert lines.take(b"x" * 70_000) == [b"x" * 70_000]
    assert lines.rest() == []


def test_names_stand_before_lines():
    stream = io.BytesIO()
    show = Prefixed(stream, is_coloured=False)
    show.show("a", [b"1", b"\xff"])
    show.show("b", [])
    assert stream.getvalue() == b"a | 1\na | \xff\n"


def test_a_name_that_would_give_orders_is_spelt_out():
    stream = io.BytesIO()
    Prefixed(stream, is_coloured=False).show("a\x1b[31m\n", [b"1"])
    assert stream.getvalue() == rb"a\x1b[31m\n | 1" + b"\n"


def test_each_name_has_a_colour_of_its_own_that_stays():
    stream = io.BytesIO()
    show = Prefixed(stream, is_coloured=True)
    for name in ("a", "b", "a"):
        show.show(name, [b"x"])
    first, second, third = stream.getvalue().splitlines()
    assert first == third == b"\x1b[36ma |\x1b[0m x"
    assert second == b"\x1b[33mb |\x1b[0m x"


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")], ids=str
)
def test_a_stream_that_takes_no_more_is_no_failure(error: OSError):
    class Gone(io.BytesIO):
        writes = 0

        def write(self, data) -> int:
            self.writes += 1
            raise error

    stream = Gone()
    show = Prefixed(stream, is_coloured=False)
    assert not show.lost
    show.show("a", [b"1"])
    show.show("a", [b"2"])
    assert not show.say("table")
    assert (stream.writes, show.lost) == (1, error.strerror)


def test_no_stream_is_a_closed_one():
    show = Prefixed(None, is_coloured=False)
    show.show("a", [b"1"])
    assert not show.say("table")
    assert show.lost == "it is closed"


def test_what_a_stream_takes_in_parts_is_written_whole():
    class Slow(io.BytesIO):
        def write(self, data) -> int:
            return super().write(bytes(data[:3]))

    stream = Slow()
    Prefixed(stream, is_coloured=False).show("a", [b"12345", b"6"])
    assert stream.getvalue() == b"a | 12345\na | 6\n"


def test_a_pipe_that_nobody_reads_and_does_not_block_is_given_up():
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with open(theirs, "wb", buffering=0) as stream:
        show = Prefixed(stream, is_coloured=False, patience_s=0.01)
        show.show("a", [b"x" * (1 << 20)])
        assert show.lost == "nobody read from it for 0.01 s"
    os.close(ours)
