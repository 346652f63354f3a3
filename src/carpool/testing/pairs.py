"""All pairs of values of several axes in few combinations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product


def pairwise(axes: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Combinations in which every two values of two axes meet at least once; greedy and always the same.

    >>> rows = pairwise({"a": ["1", "2"], "b": ["x", "y"], "c": ["p", "q"]})
    >>> len(rows) < 8, all(len(row) == 3 for row in rows)
    (True, True)
    """
    names = list(axes)
    missing = {((a, x), (b, y)) for a, b in combinations(names, 2) for x, y in product(axes[a], axes[b])}
    rows: list[dict[str, str]] = []
    while missing:
        seed = min(missing)
        row = dict(seed)
        for name in names:
            if name not in row:
                row[name] = max(axes[name], key=lambda value, name=name: _met(row | {name: value}, missing))
        missing -= _pairs(row)
        rows.append({name: row[name] for name in names})
    return rows


def _pairs(row: Mapping[str, str]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    items = list(row.items())
    both = set()
    for one, other in combinations(items, 2):
        both |= {(one, other), (other, one)}
    return both


def _met(row: Mapping[str, str], missing: set[tuple[tuple[str, str], tuple[str, str]]]) -> int:
    return len(_pairs(row) & missing)
