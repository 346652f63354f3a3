"""The operators of the table: each equals torch's own alone and, stacked, each member alone, gradients included."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from carpool.kernels import attention
from carpool.kernels.refusal import Unstackable
from carpool.kernels.table import STACKED, alone, batched_or_refused, stacked

MEMBERS = 3
SEEDS, STEPS = torch.tensor([0, 1, -7]), torch.tensor([0, 5, 2])


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def recurrent(kind: Any, layers: int = 1, dropout: float = 0.0, ways: int = 1, projection: int = 0) -> Any:
    """A call of torch's own function, its weights made from one long vector."""
    gates = {torch.lstm: 4, torch.gru: 3}.get(kind, 1)
    hidden, out, parts = 4, projection or 4, []
    for layer in range(layers):
        for _ in range(ways):
            wide = 3 if layer == 0 else ways * out
            parts += [(gates * hidden, wide), (gates * hidden, out), (gates * hidden,), (gates * hidden,)]
            parts += [(projection, hidden)] if projection else []

    def run(x: Tensor) -> Tensor:
        weights = [
            0.5 * torch.cos(torch.arange(1, 1 + torch.Size(p).numel()) * x.mean()).reshape(p) for p in parts
        ]
        start = torch.zeros(layers * ways, x.shape[1], out, dtype=x.dtype)
        cell = torch.zeros(layers * ways, x.shape[1], hidden, dtype=x.dtype)
        hx = [start, cell] if kind is torch.lstm else start
        made = kind(x[:, :, :3], hx, weights, True, layers, dropout, True, ways == 2, False)
        return sum((part.square().mean() * (1 + place) for place, part in enumerate(made)), x.sum() * 0)

    return run


def heads(x: Tensor, **options: Any) -> Tensor:
    q, k, v = x[:, None, :, :2], x[:, None, :, 1:3].sin(), x[:, None, :, 2:]
    mask = options.pop("mask", None)
    return F.scaled_dot_product_attention(q, k, v, mask() if mask else None, **options).square().mean()


def grouped(x: Tensor) -> Tensor:
    q, k = (
        x[:, None, :, :2].expand(-1, 4, -1, -1) * torch.arange(1, 5).view(4, 1, 1),
        x[:, None, :, 2:].expand(-1, 2, -1, -1),
    )
    return F.scaled_dot_product_attention(q, k, k.cos(), enable_gqa=True).square().mean()


def learned_bias(x: Tensor) -> Tensor:
    q = x[:, None]
    return F.scaled_dot_product_attention(q, q, q, x[:, None, :, :1] - x[:, None, :, :1].mT).square().mean()


def nothing_seen() -> Tensor:
    return torch.tensor(
        [[True] * 5, [False] * 5, [True, False] * 2 + [True], [False] * 4 + [True], [True] * 5]
    )


def normed(kind: Callable[..., nn.Module], **options: Any) -> Callable[[Tensor], Tensor]:
    layer = kind(nn.Linear(4, 3).double(), **options)

    def run(x: Tensor) -> Tensor:
        weights = {
            n: 1 + x.flatten()[: p.numel()].view_as(p) for n, p in layer.named_parameters() if n != "bias"
        }
        return torch.func.functional_call(layer, {**weights, "bias": x[0, 0, :3]}, (x,)).square().mean()

    return run


MULTIHEAD = nn.MultiheadAttention(4, 2, 0.4, dtype=torch.float64).requires_grad_(False)


def blocks(x: Tensor) -> Tensor:
    def block(t: Tensor) -> Tensor:
        return F.dropout(torch.tanh(F.dropout(t, 0.4)), 0.4)

    return (
        F.dropout(
            checkpoint(lambda t: block(t) + checkpoint(block, t, use_reentrant=False), x, use_reentrant=False)
        )
        .square()
        .mean()
    )


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "lstm": recurrent(torch.lstm, 2, ways=2),
    "lstm projected": recurrent(torch.lstm, 2, projection=2),
    "gru": recurrent(torch.gru, 2, ways=2),
    "rnn_tanh": recurrent(torch.rnn_tanh, 2),
    "rnn_relu": recurrent(torch.rnn_relu, ways=2),
    "attention": heads,
    "attention causal": partial(heads, is_causal=True, scale=0.7),
    "attention masked": partial(heads, mask=nothing_seen),
    "attention grouped": grouped,
    "attention with a learned bias": learned_bias,
    "attention of 3 dimensions": lambda x: F.scaled_dot_product_attention(x, x.sin(), x).square().mean(),
    "bilinear": lambda x: F.bilinear(x, x.sin(), x[:2, :4, :].mT @ x[:2, :4, :]).square().mean(),
    "embedding_bag": lambda x: F.embedding_bag(torch.tensor([[0, 1, 1], [2, 0, 1]]), x[0]).square().mean(),
    "embedding_bag weighted": lambda x: F.embedding_bag(
        torch.tensor([[0, 1, 1], [2, 0, 1]]), x[0], mode="sum", per_sample_weights=x[0, :2, :3]
    ).square().mean(),
    "householder_product": lambda x: torch.linalg.householder_product(
        x[0, :, :3].tril(-1), 2 / (1 + x[0, :, :3].tril(-1).square().sum(0))
    ).square().mul(torch.arange(5)[:, None]).sum(),
    "weight_norm": normed(parametrizations.weight_norm),
    "weight_norm of a column": normed(parametrizations.weight_norm, dim=1),
}  # fmt: skip
DRAWING: dict[str, Callable[[Tensor], Tensor]] = {
    "lstm": recurrent(torch.lstm, 3, 0.4, ways=2),
    "gru": recurrent(torch.gru, 2, 0.4),
    "attention": partial(heads, dropout_p=0.4, is_causal=True),
    "multihead": lambda x: MULTIHEAD(x, x, x)[0].square().mean(),
    "checkpoint": blocks,
}


def together(operator: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    def member(x: Tensor, seed: Tensor, step: Tensor) -> Tensor:
        with stacked(seed, step):
            return operator(x)

    with warnings.catch_warnings(), batched_or_refused():
        warnings.simplefilter("error")
        return vmap(grad_and_value(member))(x, SEEDS, STEPS)


def separately(operator: Callable[[Tensor], Tensor], x: Tensor, row: int) -> tuple[Tensor, Tensor]:
    own = x[row].clone().requires_grad_()
    with alone(int(SEEDS[row]), int(STEPS[row])):
        value = operator(own)
    value.backward()
    assert own.grad is not None
    return own.grad, value.detach()


@pytest.mark.parametrize("name", OPERATORS)
def test_stacked_equals_torchs_own(name):
    x = normal(MEMBERS, 2, 5, 4)
    grads, values = together(OPERATORS[name], x)
    for row in range(MEMBERS):
        own = x[row].clone().requires_grad_()
        value = OPERATORS[name](own)  # under no mode at all
        value.backward()
        torch.testing.assert_close(values[row], value.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grads[row], own.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", DRAWING)
def test_random_numbers_inside_are_equal_alone_and_stacked(name):
    x = normal(MEMBERS, 2, 5, 4)
    grads, values = together(DRAWING[name], x)
    for row in range(MEMBERS):
        grad, value = separately(DRAWING[name], x, row)
        torch.testing.assert_close(values[row], value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grads[row], grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", DRAWING)
def test_random_numbers_inside_depend_on_seed_and_step(name):
    x = normal(2, 5, 4)

    def draw(seed: int, step: int) -> Tensor:
        with alone(seed, step):
            return DRAWING[name](x)

    assert torch.equal(draw(1, 1), draw(1, 1))
    assert not torch.equal(draw(1, 1), draw(2, 1))
    assert not torch.equal(draw(1, 1), draw(1, 2))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_block_that_is_computed_again_draws_the_same(reentrant):
    """The gradient of a dropped element is nought exactly where its value was."""
    x = torch.ones(400, requires_grad=True)
    with alone(3, 1) as key:
        F.dropout(torch.ones(3))
        y = checkpoint(lambda t: F.dropout(t, 0.5), x, use_reentrant=reentrant)
        later = F.dropout(torch.ones(400), 0.5)
        calls = key.call
    assert isinstance(y, Tensor)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad == 0, y == 0)
    assert not torch.equal(later == 0, y == 0)
    assert key.call == calls == 3


def test_torch_is_left_as_it_was():
    from torch.nn.modules import transformer
    from torch.utils import checkpoint as module

    before = (
        module._checkpoint_without_reentrant_generator,
        module.CheckpointFunction,
        transformer._detect_is_causal_mask,
    )
    with pytest.raises(ZeroDivisionError), alone(0, 0), stacked(0, 0), batched_or_refused():
        _ = 1 / 0
    assert before == (
        module._checkpoint_without_reentrant_generator,
        module.CheckpointFunction,
        transformer._detect_is_causal_mask,
    )
    assert torch._C._functorch._is_vmap_fallback_enabled()  # type: ignore[attr-defined]


def test_torchs_own_kernels_run_alone_where_nothing_is_random():
    x = normal(2, 4, 5, 8)
    with alone(0, 0), torch.profiler.profile() as profile:
        F.scaled_dot_product_attention(x, x, x)
    assert any("flash_attention" in event.name for event in profile.events() or ())


def test_members_are_folded_into_one_kernel():
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(x: Tensor) -> Tensor:
        return together(lambda t: F.scaled_dot_product_attention(t, t, t, is_causal=True).sum(), x)[0]

    traced = make_fx(step)(normal(MEMBERS, 2, 4, 5, 8))
    names = [str(node.target) for node in traced.graph.nodes if "attention" in str(node.target)]
    assert len(names) == 2, "one forward, one backward"


def test_the_kernel_for_a_gpu_is_called_as_torch_declares_it():
    """On tensors without contents: shapes and arguments are all that can be checked without a GPU."""
    q = torch.empty(6, 4, 5, 8, device="meta")
    out, sums = attention._Cuda.forward(q, q, q, True, 0.3)
    assert out.shape == q.shape
    assert sums.shape[:2] == (6, 4)
    grads = attention._Cuda.backward(out, q, q, q, out, sums, True, 0.3)
    assert [grad.shape for grad in grads] == [q.shape] * 3


def test_what_has_no_form_in_a_stack_says_so():
    x = normal(MEMBERS, 2, 5, 4)

    def packed(t: Tensor) -> Tensor:
        return nn.utils.rnn.pack_padded_sequence(t, [5, 5], batch_first=True).data.sum()

    with pytest.raises(Unstackable, match="packed sequences"):
        together(packed, x)
    with pytest.raises(Unstackable, match="use_reentrant=True"):
        together(lambda t: checkpoint(torch.sin, t, use_reentrant=True).sum(), x)  # type: ignore[union-attr]
    with pytest.raises(Unstackable, match="embedding_bag"):
        together(lambda t: F.embedding_bag(torch.tensor([[0, 1]]), t[0], mode="max").sum(), x)


def test_the_table_names_functions_of_torch():
    assert all(callable(function) and callable(operator) for function, operator in STACKED.items())
