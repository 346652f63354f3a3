"""Which kernel computes a product is a rule of its shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from carpool.adapters.torch import products
from carpool.adapters.torch.products import Product, form

LAST_LAYER = Product(rows=128, columns=10, terms=256, along_terms=True, exact=False)


def test_a_thin_product_has_tiles_that_it_fills():
    assert form(LAST_LAYER) == {
        "BLOCK_M": 64,
        "BLOCK_N": 16,
        "BLOCK_K": 64,
        "EVEN_K": True,
        "num_stages": 3,
        "num_warps": 4,
    }


def test_its_gradients_are_thin_too():
    weights, inputs = (
        replace(LAST_LAYER, rows=10, columns=256, terms=128),
        replace(LAST_LAYER, columns=256, terms=10),
    )
    assert form(weights) == {**(form(LAST_LAYER) or {}), "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 32}
    made = form(inputs)
    assert made is not None
    assert (made["BLOCK_K"], made["EVEN_K"]) == (16, False), "ten terms do not fill a tile"


def test_a_large_product_is_the_librarys():
    assert form(Product(128, 256, 784, along_terms=True, exact=False)) is None


def test_one_of_middle_size_is_the_templates_where_that_is_as_fast():
    middle = Product(128, 256, 256, along_terms=True, exact=False)
    assert form(middle) is not None
    assert form(replace(middle, along_terms=False)) is None
    assert form(Product(64, 64, 32, along_terms=True, exact=False)) is None, "attention's"


def test_in_full_precision_all_are_the_librarys():
    assert form(replace(LAST_LAYER, exact=True)) is None


def test_a_product_with_a_vector_is_a_sum():
    assert form(replace(LAST_LAYER, columns=1)) is None


class Choice:
    """As Inductor's: a template's form, or the library's kernel, which has none."""

    def __init__(self, **params: Any) -> None:
        self.params = Params(params)
        self.extra_kwargs = {"ALLOW_TF32": False}


class Params:
    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.to_kwargs = lambda: dict(kwargs)


class Base:
    """As much of Inductor's choices as is overridden."""

    found: tuple[Choice, ...] = ()

    def get_template_configs(self, kernel_inputs: Any, templates: Any) -> Any:
        from torch._inductor import config

        self.tuned = config.max_autotune_gemm
        return self._finalize_template_configs(templates, kernel_inputs)

    def _finalize_template_configs(self, template_choices: Any, kernel_inputs: Any) -> Any:
        return list(template_choices)


class Inputs:
    def __init__(self, left: torch.Tensor, right: torch.Tensor, device_type: str = "cuda") -> None:
        self.device_type = device_type
        self._pair = left, right

    def device(self) -> None:
        return None

    def mat1mat2(self) -> Any:
        class Node:
            def __init__(self, of: torch.Tensor) -> None:
                self.get_stride, self.get_size = of.stride, of.size

        return tuple(map(Node, self._pair))

    def mnk_hinted(self) -> tuple[int, int, int]:
        left, right = self._pair
        return left.shape[-2], right.shape[-1], left.shape[-1]

    def dtype(self) -> torch.dtype:
        return self._pair[0].dtype


def chosen(*inputs: Any, choices: tuple[Choice, ...]) -> tuple[list[Choice], bool]:
    handler = products._handler(Base)()
    return handler.get_template_configs(Inputs(*inputs), choices), handler.tuned


@pytest.fixture
def with_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("with_tensor_cores")
def test_of_a_small_product_the_template_in_the_rules_form_is_the_only_choice():
    library, template = Choice(), Choice(BLOCK_M=128, GROUP_M=8)
    found, tuned = chosen(torch.ones(4, 32, 8), torch.ones(4, 8, 64), choices=(library, template))
    assert tuned
    assert found == [template]
    assert template.params.to_kwargs() == {**(form(Product(32, 64, 8, False, False)) or {}), "GROUP_M": 8}
    assert template.extra_kwargs == {"ALLOW_TF32": True}


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.ones(4, 512, 512), torch.ones(4, 512, 512)),
        (torch.ones(32, 8), torch.ones(8, 64)),
        (torch.ones(4, 32, 8), torch.ones(4, 8, 64), "cpu"),
        (torch.ones(1, 1, 1).expand(70_000, 32, 8), torch.ones(1, 1, 1).expand(70_000, 8, 64)),
    ],
    ids=["large", "not batched", "on a CPU", "more than a launch has blocks for"],
)
@pytest.mark.usefixtures("with_tensor_cores")
def test_otherwise_the_choices_are_inductors(inputs: tuple):
    given = (Choice(), Choice(BLOCK_M=128))
    found, tuned = chosen(*inputs, choices=given)
    assert not tuned
    assert tuple(found) == given


def test_what_has_no_matrices_is_left_alone():
    class Image:
        device_type = "cuda"

    handler = products._handler(Base)()
    given = (Choice(), Choice(BLOCK_M=128))
    assert tuple(handler.get_template_configs(Image(), given)) == given


def test_on_a_gpu_without_tf32_they_are_inductors(monkeypatch: pytest.MonkeyPatch, with_tensor_cores: None):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    given = (Choice(), Choice(BLOCK_M=128))
    found, tuned = chosen(torch.ones(4, 32, 8), torch.ones(4, 8, 64), choices=given)
    assert not tuned
    assert tuple(found) == given


def test_torchs_own_classes_have_the_names_that_are_overridden_and_asked():
    from torch._inductor.choices import InductorChoices
    from torch._inductor.kernel_inputs import MMKernelInputs
    from torch._inductor.virtualized import V

    assert {"get_template_configs", "_finalize_template_configs"} <= set(dir(InductorChoices))
    assert {"device_type", "device", "dtype", "mat1mat2", "mnk_hinted"} <= set(dir(MMKernelInputs))
    before = V.choices
    with products.by_template():
        assert isinstance(V.choices, InductorChoices)
        assert V.choices is not before
        assert "carpool" in torch.compiler.config.cache_key_tag
    assert V.choices is before
    assert "carpool" not in torch.compiler.config.cache_key_tag


@pytest.mark.usefixtures("with_tensor_cores")
def test_in_full_precision_they_are_inductors():
    torch.set_float32_matmul_precision("highest")
    given = (Choice(), Choice(BLOCK_M=128))
    found, tuned = chosen(torch.ones(4, 32, 8), torch.ones(4, 8, 64), choices=given)
    assert not tuned
    assert tuple(found) == given


def test_without_a_template_for_the_type_the_library_stays():
    given = (Choice(),)
    found, _ = chosen(torch.ones(4, 32, 8).double(), torch.ones(4, 8, 64).double(), choices=given)
    assert tuple(found) == given


# On a GPU


def compiled_code(step: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Any, str]:
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    with products.by_template(), config.patch(force_disable_caches=True):
        made, (code, *_) = run_and_get_code(torch.compile(step), *inputs)
    return made, code


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 256, 10), (128, 10, 256), (10, 128, 256), (32, 32, 64), (5, 7, 3)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("with_tensor_cores")
def test_a_small_product_is_computed_by_the_template(shape: tuple[int, int, int], kind: torch.dtype):
    rows, terms, columns = shape
    left = torch.randn(9, rows, terms, device="cuda", dtype=kind)
    right = torch.randn(9, columns, terms, device="cuda", dtype=kind)
    bias = torch.randn(9, 1, columns, device="cuda", dtype=kind)

    def step(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.bmm(left, right.mT) + bias)

    made, code = compiled_code(step, left, right, bias)
    assert "triton_tem" in code
    assert "extern_kernels.bmm" not in code
    wanted = step(left.double(), right.double(), bias.double())
    near = 3e-3 if kind is torch.float32 else 3e-2
    torch.testing.assert_close(made.double(), wanted, rtol=near, atol=near * terms**0.5)


@pytest.mark.gpu
@pytest.mark.usefixtures("with_tensor_cores")
def test_a_large_product_and_one_of_doubles_are_the_librarys():
    for left, right in [
        (torch.randn(2, 512, 512, device="cuda"), torch.randn(2, 512, 512, device="cuda")),
        (torch.randn(2, 8, 8, device="cuda").double(), torch.randn(2, 8, 8, device="cuda").double()),
    ]:
        made, code = compiled_code(torch.bmm, left, right)
        assert "triton_tem" not in code
        torch.testing.assert_close(made, torch.bmm(left, right))
