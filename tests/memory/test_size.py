import pytest

from carpool.errors import OptionError
from carpool.memory.size import Limit, limit, shown, size


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GiB", 8 << 30), ("8 gib", 8 << 30), ("1.5MiB", 3 << 19), ("2GB", 2 * 10**9), ("512", 512), (7, 7)],
)
def test_sizes_as_people_write_them(text, expected):
    assert size(text) == expected
    assert limit(text) == Limit(size_bytes=expected)


@pytest.mark.parametrize(
    "text", ["12 bananas", "", "GiB", "-1GiB", "0", 0, -5, 1.5, True, None, "1e3", "0%", "101%", "5%%"]
)
def test_what_is_no_size_is_refused_with_a_remedy(text):
    with pytest.raises(OptionError, match=r'Expected memory="auto", a size such as .* Received: .* Remedy: '):
        limit(text)


def test_a_budget_is_a_size_and_not_a_share():
    with pytest.raises(OptionError, match="Expected budget as a size"):
        size("50%")


def test_a_share_is_of_the_whole_device_and_never_more_than_is_free():
    assert limit("90%").of(total_bytes=1000, free_bytes=950) == 900
    assert limit("90%").of(total_bytes=1000, free_bytes=400) == 400
    assert limit("auto").of(total_bytes=1000, free_bytes=400) == 400


def test_sizes_are_shown_in_the_unit_that_fits():
    assert [shown(n) for n in (5, 2048, 5 << 20, 5 << 30)] == ["5 B", "2 KiB", "5 MiB", "5.0 GiB"]
