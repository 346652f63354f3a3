"""Products printed as C, in blocks whose sums stay in registers through all the depth."""

from __future__ import annotations

from math import isqrt

from carpool.kernels.resident.elements import Lanes, Scope, Text, at
from carpool.kernels.resident.loops import Product
from carpool.kernels.resident.spaces import fits_lanes

SUMS = {32: 8, 64: 16}
"""Vectors of sums in registers, by the bytes of one: of 16 registers, and of the 32 that AVX-512 has.

Fewer than eight would wait for one another: a sum takes four cycles, and two are begun in each.
"""
_PART = 256  # of a depth: longer sums are added up in parts, as errors grow with how many follow one another


class Blocks:
    """A product, block after block of rows and of vectors of columns."""

    def __init__(self, text: Text, product: Product, lanes: int, sums: int) -> None:
        self.text, self.product, self.lanes, self.most = text, product, lanes, sums
        self.batch = [f"i{dim}" for dim in range(len(product.batch))]

    def print(self) -> None:
        text, product = self.text, self.product
        for name, size in zip(self.batch, product.batch, strict=True):
            text.begin(f"for (i8 {name} = 0; {name} < {size}; ++{name})")
        vectors = isqrt(self.most)
        block = vectors * self.lanes
        whole = product.columns - product.columns % block
        if whole:
            text.begin(f"for (i8 j = 0; j < {whole}; j += {block})")
            self._rows([self.lanes] * vectors)
            text.end()
        if rest := product.columns - whole:
            text.begin("")
            text.add(f"const i8 j = {whole};")
            self._rows([min(self.lanes, rest - start) for start in range(0, rest, self.lanes)])
            text.end()
        for _ in self.batch:
            text.end()

    def _rows(self, counts: list[int]) -> None:
        """All rows of as many vectors as there are counts; so many lanes of each are kept."""
        text, rows = self.text, self.product.rows
        each = _even(rows, self.most // len(counts))
        whole, rest = rows - rows % each, rows % each
        if whole:
            text.begin(f"for (i8 i = 0; i < {whole}; i += {each})")
            self._block(counts, each)
            text.end()
        if rest:
            text.begin("")
            text.add(f"const i8 i = {whole};")
            self._block(counts, rest)
            text.end()

    def _block(self, counts: list[int], rows: int) -> None:
        self._sums(len(counts), rows)
        for place, count in enumerate(counts):
            self._stored(place, count, rows)

    def _sums(self, vectors: int, rows: int) -> None:
        text, left, right = self.text, self.product.left, self.product.right
        t = left.array.type
        zeros = "{" + ", ".join(["{" + ", ".join(["{}"] * vectors) + "}"] * rows) + "}"
        depth = self.product.depth
        is_long = depth > 2 * _PART
        text.add(f"v{t} sums[{rows}][{vectors}] = {zeros};")
        text.add(f"const {t} *a = {at(left, [*self.batch, 'i', '0'])};")
        text.add(f"const {t} *b = {at(right, [*self.batch, '0', 'j'])};")
        name = "sums"
        if is_long:
            name = "part"
            text.begin(f"for (i8 from = 0; from < {depth}; from += {_PART})")
            text.add(f"const i8 to = from + {_PART} < {depth} ? from + {_PART} : {depth};")
            text.add(f"v{t} part[{rows}][{vectors}] = {zeros};")
        text.begin("for (i8 k = from; k < to; ++k)" if is_long else f"for (i8 k = 0; k < {depth}; ++k)")
        for v in range(vectors):
            text.add(f"const v{t} b{v} = ld_{t}(b + {right.strides[-2]} * k + {v} * V);")
        for r in range(rows):
            text.add(f"const v{t} a{r} = bc_{t}(a[{left.strides[-2]} * {r} + {left.strides[-1]} * k]);")
            for v in range(vectors):
                text.add(f"{name}[{r}][{v}] += a{r} * b{v};")
        text.end()
        if is_long:
            for r in range(rows):
                for v in range(vectors):
                    text.add(f"sums[{r}][{v}] += part[{r}][{v}];")
            text.end()

    def _stored(self, place: int, count: int, rows: int) -> None:
        """What becomes of a vector of sums, row by row."""
        text, outs, t = self.text, self.product.outs, self.product.left.array.type
        if rows > 1:
            text.lines.append(f"#pragma GCC unroll {rows}")
            text.begin(f"for (int r = 0; r < {rows}; ++r)")
        else:
            text.begin("")
            text.add("const int r = 0;")
        text.add("const i8 row = i + r;")
        text.add(f"const i8 at_ = j + {place} * V;")
        together = fits_lanes([out.value for out in outs])
        if together:
            text.add(f"const v{t} acc = sums[r][{place}];")
            scope = Scope(text, [*self.batch, "row", "at_"], Lanes(count, self.lanes))
        else:
            text.begin(f"for (int lane = 0; lane < {count}; ++lane)")
            text.add(f"const {t} acc = sums[r][{place}][lane];")
            text.add("const i8 own = at_ + lane;")
            scope = Scope(text, [*self.batch, "row", "own"], Lanes(0, self.lanes))
        scope.store(outs, "acc")
        if not together:
            text.end()
        text.end()


def _even(rows: int, most: int) -> int:
    """How many rows a block has, so that blocks are few and much alike.

    >>> _even(32, 8), _even(10, 8), _even(3, 8)
    (8, 5, 3)
    """
    return -(-rows // -(-rows // most))
