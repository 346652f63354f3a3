"""Max pooling of stacks on a CPU: what torch's own gives, in both forms, ties and ragged edges included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

from carpool.kernels import pool
from carpool.kernels.table import stacked

POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
SHAPES = {1: (3, 4, 9), 2: (3, 4, 8, 7), 3: (2, 3, 5, 4, 6)}
WINDOWS = [2, 3, (2,), [1], 4]
MEMBERS = 3

cases = pytest.mark.parametrize("window", WINDOWS, ids=str)
dimensions = pytest.mark.parametrize("dims", POOLS)


def members(dims: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Of small whole numbers, so that many windows hold their largest twice."""
    made = torch.randint(0, 4, (MEMBERS, *SHAPES[dims]), generator=torch.Generator().manual_seed(dims))
    return made.to(dtype)


def weighed(dims: int, window: Any) -> Callable[[Tensor], Tensor]:
    """A number that every place of the result has its own part in."""

    def value(x: Tensor) -> Tensor:
        made = POOLS[dims](x, window)
        return (made * torch.arange(1.0, made.numel() + 1, dtype=made.dtype).view_as(made)).sum()

    return value


def in_stack(function: Callable[..., Any]) -> Callable[..., Any]:
    """As members of a stack run it."""

    def run(*given: Any) -> Any:
        with stacked(torch.tensor(0), torch.tensor(0)):
            return function(*given)

    return run


@pytest.fixture(params=["uncompiled", "compiled"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators as they run, or in what the compiler is given for them."""
    if request.param == "compiled":
        largest, gradient = pool.compiled_forms().values()
        monkeypatch.setattr(pool, "max_pool", largest)
        monkeypatch.setattr(pool, "max_pool_gradient", gradient)


@pytest.mark.usefixtures("form")
@cases
@dimensions
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_stack_gives_what_each_member_gives_alone(dims: int, window: Any, dtype: torch.dtype):
    x = members(dims, dtype)
    alone = [POOLS[dims](one, window) for one in x]
    together = vmap(in_stack(lambda one: POOLS[dims](one, window)))(x)
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.usefixtures("form")
@cases
@dimensions
def test_gradients_go_to_the_first_place_that_holds_the_largest(dims: int, window: Any):
    x, value = members(dims), weighed(dims, window)
    alone = torch.stack([grad(value)(one) for one in x])
    assert torch.equal(vmap(grad(in_stack(value)))(x), alone)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (1, 0, 3, 4, 2), (2, 1, 0, 4, 3)], ids=str)
def test_tensors_may_lie_in_memory_in_any_order(order: tuple[int, ...]):
    """As a convolution leaves them, say: the batch outermost, channels innermost."""
    contiguous, value = members(2), weighed(2, 2)
    back = [order.index(dim) for dim in range(5)]
    x = contiguous.permute(order).contiguous().permute(back)
    assert torch.equal(x, contiguous)
    assert torch.equal(vmap(grad(in_stack(value)))(x), vmap(grad(value))(contiguous))


@pytest.mark.usefixtures("form")
def test_an_image_without_a_batch_is_pooled_too():
    x = members(2)[:, 0]
    assert torch.equal(
        vmap(in_stack(lambda one: F.max_pool2d(one, 2)))(x), torch.stack([F.max_pool2d(one, 2) for one in x])
    )


@pytest.mark.usefixtures("form")
def test_a_gradient_of_a_gradient_goes_back_to_where_it_came_from():
    x = members(2)

    def penalty(one: Tensor) -> Tensor:
        return grad(lambda inner: (F.max_pool2d(inner, 2) ** 3).sum())(one).square().sum()

    assert torch.equal(vmap(grad(in_stack(penalty)))(x), torch.stack([grad(penalty)(one) for one in x]))


@pytest.mark.usefixtures("form")
def test_derivatives_can_be_taken_forward_too():
    x, along = members(2), torch.randn(MEMBERS, *SHAPES[2], dtype=torch.float64)

    def value(one: Tensor) -> Tensor:
        return (F.max_pool2d(one, 2) ** 3).sum()

    def changes(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        return lambda one, tangent: jvp(function, (one,), (tangent,))[1]

    torch.testing.assert_close(
        vmap(changes(in_stack(value)))(x, along), vmap(changes(value))(x, along), rtol=0, atol=0
    )
    small = x[:, :1, :1, :4, :4]
    torch.testing.assert_close(vmap(hessian(in_stack(value)))(small), vmap(hessian(value))(small))


def test_a_window_that_holds_nan_gives_nan_and_the_others_do_not():
    """Its value is NaN, as torch's is: the member's loss is not finite, and its row keeps what it had."""
    x = members(2)
    x[1, 0, 0, 0, 0] = torch.nan
    made = vmap(in_stack(lambda one: F.max_pool2d(one, 2)))(x)
    assert made[1, 0, 0, 0, 0].isnan()
    assert made.isnan().sum() == 1


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "stride": 2},
        {"kernel_size": 2, "padding": 1},
        {"kernel_size": 2, "dilation": 2},
        {"kernel_size": 2, "ceil_mode": True},
        {"kernel_size": 5, "stride": 5},
        {"kernel_size": (2, 2), "stride": (2, 1)},
    ],
    ids=str,
)
def test_other_windows_are_torchs_own(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "max_pool", lambda *_: pytest.fail("not torch's"))
    x = members(2)
    made = vmap(in_stack(lambda one: F.max_pool2d(one, **options)))(x)
    assert torch.equal(made, torch.stack([F.max_pool2d(one, **options) for one in x]))


def test_places_are_told_when_they_are_asked_for():
    x = members(2)
    made = vmap(in_stack(lambda one: F.max_pool2d(one, 2, return_indices=True)))(x)
    for one, places in zip(x, made[1], strict=True):
        assert torch.equal(F.max_pool2d(one, 2, return_indices=True)[1], places)


def test_the_operators_keep_what_torch_asks_of_operators():
    x = members(2).permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    largest, places = pool.max_pool(x, [2, 2])
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(pool.max_pool, (x, [2, 2]), test_utils=checks)
    torch.library.opcheck(
        pool.max_pool_gradient, (torch.ones_like(largest), x, places, [2, 2]), test_utils=checks
    )


@pytest.mark.parametrize("window", [(2, 2, 2), 0, 9])
def test_windows_that_make_no_sense_are_told_by_torch(window: Any):
    x = members(2)
    with pytest.raises(RuntimeError) as told:
        F.max_pool2d(x[0], window)
    with pytest.raises(RuntimeError) as in_a_stack:
        vmap(in_stack(lambda one: F.max_pool2d(one, window)))(x)
    assert str(in_a_stack.value)[:40] == str(told.value)[:40]
