"""Which kernel computes a stack's matrix products: the library's, or for small ones the compiler's own.

The library's kernels are made for large matrices. Ten classes at the end of a network are ten columns: too few for its tiles, and no
multiple of four, so it reads them number by number. The compiler's template masks what a tile has too much, and takes the bias and the
activation along. Which form of it is a rule, of shapes, layout and precision, and nothing is timed: a step has the same bits in every process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_THIN = 16  # a product with a side of no more rows, columns or terms is small,
_SMALL = 1 << 16  # and so is one of no more multiplications
_MIDDLE = range(
    128, 257
)  # with such sides, if it reads along its terms, the template is as fast as the library
_MOST = 65_535  # products in one launch of the template: it has a block in y for each
VERSION = 1  # of the rule: what was compiled by another one is compiled anew


@contextmanager
def by_template() -> Iterator[None]:
    """Inside, Inductor computes small batched products on a GPU by its template, and its cache knows that."""
    try:
        from torch._inductor.virtualized import V

        handler = _handler(type(V.choices))()
        tag = f"{torch.compiler.config.cache_key_tag}, carpool's products {VERSION}"
        tagged = torch.compiler.config.patch(cache_key_tag=tag)  # type: ignore[attr-defined]
    except (ImportError, AttributeError, TypeError):  # another torch than those this was written for
        yield
        return
    with V.set_choices_handler(handler), tagged:
        yield


@dataclass(frozen=True)
class Product:
    """A matrix product, many of which are computed at once."""

    rows: int
    columns: int
    terms: int
    along_terms: bool
    """Whether both matrices have the numbers that are multiplied one after another in memory."""
    exact: bool
    """Whether it is computed in full precision, without tensor cores."""

    @property
    def sides(self) -> tuple[int, int, int]:
        return self.rows, self.columns, self.terms


def form(product: Product) -> dict[str, Any] | None:
    """The template's tiles for a product; None where the library is to compute it.

    In full precision the template multiplies without tensor cores, every number of a tile written out: compiling that took over half a
    minute. With a side of one a product is a sum, which needs neither.
    """
    if product.exact or min(product.sides) <= 1:
        return None
    if min(product.sides) <= _THIN or math.prod(product.sides) <= _SMALL:
        high, wide = _tile(product.rows, 64), _tile(product.columns, 64)
        deep = _tile(product.terms, 64 if product.terms >= 256 else 32)
        return _tiles(product, high, wide, deep, warps=2 if high * wide <= 512 else 4)
    if all(side in _MIDDLE for side in product.sides) and product.along_terms:
        return _tiles(product, _tile(product.rows, 128), 64, 32, warps=4)
    return None


def _tiles(product: Product, high: int, wide: int, deep: int, warps: int) -> dict[str, Any]:
    return {
        "BLOCK_M": high,
        "BLOCK_N": wide,
        "BLOCK_K": deep,
        "EVEN_K": product.terms % deep == 0,
        "num_stages": 3 if product.terms > deep else 2,
        "num_warps": warps,
    }


def _tile(length: int, most: int) -> int:
    """No longer than it needs to be; the tensor cores take 16 at least."""
    return min(most, max(16, 1 << (length - 1).bit_length()))


def _handler(base: Any) -> Any:
    class Choices(base):
        def get_template_configs(self, kernel_inputs: Any, *args: Any, **options: Any) -> Any:
            from torch._inductor import config

            given = super().get_template_configs
            if _wanted(kernel_inputs) is None:
                return given(kernel_inputs, *args, **options)
            with config.patch(max_autotune_gemm=True):  # or the template is no choice at all
                return given(kernel_inputs, *args, **options)

        def _finalize_template_configs(
            self, template_choices: Any, kernel_inputs: Any, *args: Any, **options: Any
        ) -> Any:
            found = super()._finalize_template_configs(template_choices, kernel_inputs, *args, **options)
            wanted = _wanted(kernel_inputs)
            template = next((one for one in found if "BLOCK_M" in one.params.to_kwargs()), None)
            if wanted is None or template is None:  # it is not for every type of number
                return found
            template.params = type(template.params)(template.params.to_kwargs() | wanted)
            template.extra_kwargs = {**template.extra_kwargs, "ALLOW_TF32": True}
            return [template]

    return Choices


def _wanted(kernel_inputs: Any) -> dict[str, Any] | None:
    """The form for what Inductor is about to choose a kernel for, if that is a batched product on a GPU."""
    if kernel_inputs.device_type != "cuda":
        return None
    try:
        matrices = kernel_inputs.mat1mat2()
        rows, columns, terms = kernel_inputs.mnk_hinted()
    except AttributeError:  # no matrices, or another torch
        return None
    left, right = (matrix.get_stride() for matrix in matrices)
    if len(left) != 3 or matrices[0].get_size()[0] > _MOST:
        return None
    along = left[2] == 1 and right[1] == 1
    return form(Product(rows, columns, terms, along, _is_exact(kernel_inputs)))


def _is_exact(kernel_inputs: Any) -> bool:
    if kernel_inputs.dtype() != torch.float32:
        return False
    major, _ = torch.cuda.get_device_capability(kernel_inputs.device())
    return major < 8 or torch.backends.cuda.matmul.fp32_precision != "tf32"  # older ones have no TF32
