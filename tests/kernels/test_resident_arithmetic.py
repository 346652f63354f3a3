"""Functions of float32 vectors, beside float64: how far they are, and what they do at the edges."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch

from carpool import machine
from carpool.kernels.resident.arithmetic import definitions
from carpool.kernels.resident.builder import Refused
from carpool.kernels.resident.prelude import prelude

needs_compiler = pytest.mark.skipif(machine.unavailable() is not None, reason="no compiler of C")
Function = Callable[[np.ndarray], np.ndarray]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return torch.sigmoid(torch.from_numpy(x)).numpy()


def _erf(x: np.ndarray) -> np.ndarray:
    return torch.erf(torch.from_numpy(x)).numpy()


FUNCTIONS: dict[str, Function] = {
    "exp": np.exp, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "tanh": np.tanh, "sigmoid": _sigmoid,
    "erf": _erf, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "abs": np.abs, "round": np.rint,
    "floor": np.floor, "sin": np.sin, "cos": np.cos,
}  # fmt: skip
LEAST = np.float32(2.0**-126)  # the smallest number that is not a denormal


def numbers(step: int) -> np.ndarray:
    """Numbers of all sizes, close ones near zero, and those at the edges of what there is; as many as fill vectors."""
    all_sizes = np.arange(0, 1 << 32, step, dtype=np.uint64).astype(np.uint32).view(np.float32)
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, LEAST, -LEAST, 3.4e38, -3.4e38, 1, -1]
    edges += [88.72283, 88.72284, -87.3, -103.97, -104, 89, -16.6, 8388608.5, 4194304.5, -1 + 2**-24]
    near = np.linspace(-20, 20, 1 << 18, dtype=np.float32)
    made = [all_sizes, near, np.array(edges, np.float32)]
    return np.concatenate([*made, np.zeros(-sum(map(len, made)) % 16, np.float32)])


def computed(name: str, x: np.ndarray, vector_bytes: int) -> np.ndarray:
    program = (
        f"void apply(const f4 *a, f4 *b, i8 n) "
        f"{{ for (i8 i = 0; i < n; i += V) st_f4(b + i, {name}_vf4(ld_f4(a + i))); }}\n"
    )
    made = np.empty_like(x)
    apply = machine.made(prelude("f4", vector_bytes, program) + program).library.apply
    apply(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(made.ctypes.data), ctypes.c_int64(len(x)))
    return made


@needs_compiler
@pytest.mark.parametrize("vector_bytes", [32, 64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_errs_by_less_than_two_units_in_the_last_place(name: str, vector_bytes: int):
    check(name, numbers(step=9973), vector_bytes)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_errs_so_little_everywhere(name: str):
    check(name, numbers(step=199), machine.vector_bytes())


def check(name: str, x: np.ndarray, vector_bytes: int) -> None:
    made = computed(name, x, vector_bytes)
    with np.errstate(all="ignore"):
        exact = FUNCTIONS[name](x.astype(np.float64))
        rounded = exact.astype(np.float32)
        unit = np.spacing(np.maximum(np.abs(rounded), LEAST)).astype(np.float64)
        finite = np.isfinite(rounded) & np.isfinite(made)
        errs = np.where(finite, np.abs(made - exact) / unit, 0.0)
    worst = int(np.argmax(errs))
    assert errs[worst] <= 2, (x[worst], made[worst], exact[worst])
    others = ~finite
    alike = (made == rounded) | (np.isnan(made) & np.isnan(rounded))
    assert alike[others].all(), x[others & ~alike][:5]
    zero = exact == 0
    assert (np.signbit(made) == np.signbit(rounded))[zero].all(), "the sign of zero"


def test_a_program_begins_with_what_it_uses_alone():
    text = prelude("f4", 32, "vf4 y = sigmoid_vf4(x);")
    assert "exp_vf4" in text
    assert "tanh_vf4" not in text


def test_a_function_that_is_not_there_is_refused():
    with pytest.raises(Refused, match="no lgamma of f4"):
        prelude("f4", 32, "vf4 y = lgamma_vf4(x);")


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_lines_are_short(lanes: int):
    for text in definitions(lanes).values():
        assert max(map(len, text.splitlines())) <= 110
