"""Lines behind names, from bytes that come as they like."""

from __future__ import annotations

import io

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


def test_a_reader_that_goes_away_is_no_failure():
    class Gone(io.BytesIO):
        writes = 0

        def write(self, data) -> int:
            self.writes += 1
            raise BrokenPipeError

    stream = Gone()
    show = Prefixed(stream, is_coloured=False)
    show.show("a", [b"1"])
    show.show("a", [b"2"])
    assert stream.writes == 1
