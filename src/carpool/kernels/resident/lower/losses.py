"""Losses that look up the target's score."""

from __future__ import annotations

from carpool.kernels.resident.builder import Refused, Value
from carpool.kernels.resident.loops import Along, Const, Expr, Gather, Iota, Place
from carpool.kernels.resident.lower.pointwise import number, pointwise
from carpool.kernels.resident.lower.table import Call, lowers
from carpool.kernels.resident.operations import op


@lowers("aten.nll_loss_forward.default")
def nll_loss(
    call: Call, scores: Value, target: Value, weight: Value | None, reduction: int, ignored: int
) -> tuple[Value, Value]:
    builder, kind = call.builder, scores.type
    picked, share = _picked(call, scores, target, weight, ignored)
    losses = Value(picked.shape, op("neg", op("mul", picked.expr, share.expr)))
    total = builder.reduced("sum", share, list(range(len(share.shape))))
    if reduction == 0:
        return losses, builder.constant((), 0.0, kind)
    summed = builder.reduced("sum", losses, list(range(len(losses.shape))))
    if reduction == 1:
        summed = Value((), op("div", summed.expr, total.expr))
    return summed, total


def _picked(
    call: Call, scores: Value, target: Value, weight: Value | None, ignored: int
) -> tuple[Value, Value]:
    """Each sample's score at its target, and what the sample counts."""
    builder, kind = call.builder, scores.type
    place = builder.place(scores)
    dim = len(scores.shape) - 1 if len(scores.shape) < 2 else 1
    if len(scores.shape) > 2:
        raise Refused("targets for each place of an image")
    own = number(target, "i8")
    is_ignored = op("eq", own.expr, Const("i8", ignored))
    safe = op("where", is_ignored, Const("i8", 0), own.expr)
    strides = place.strides[:dim]
    along = Along(safe, place.strides[dim], scores.shape[dim])
    found = Gather(kind, Place(place.array, place.offset, strides), (along,))
    counts: Expr = Const(kind, 1.0)
    if weight is not None:
        at = builder.place(weight)
        lead = (0,) * len(target.shape)
        counts = Gather(
            kind, Place(at.array, at.offset, lead), (Along(safe, at.strides[0], weight.shape[0]),)
        )
    share = op("where", is_ignored, Const(kind, 0.0), counts)
    return builder.stored(Value(target.shape, found)), builder.stored(Value(target.shape, share))


@lowers("aten.nll_loss_backward.default")
def nll_loss_backward(
    call: Call, grad: Value, scores: Value, target: Value, weight: Value | None, reduction: int, ignored: int,
    total: Value,
) -> Value:  # fmt: skip
    builder, kind = call.builder, call.type
    own = builder.stored(number(target, "i8"))
    is_ignored = op("eq", own.expr, Const("i8", ignored))
    safe = op("where", is_ignored, Const("i8", 0), own.expr)
    counts: Expr = Const(kind, 1.0)
    if weight is not None:
        at = builder.place(weight)
        lead = (0,) * len(target.shape)
        counts = Gather(
            kind, Place(at.array, at.offset, lead), (Along(safe, at.strides[0], weight.shape[0]),)
        )
    share = Value(target.shape, op("where", is_ignored, Const(kind, 0.0), counts))
    scale = builder.expanded(grad, target.shape)
    each = Value(target.shape, op("neg", op("mul", scale.expr, share.expr)))
    if reduction == 1:
        each = pointwise(builder, target.shape, lambda e, t: op("div", e, t), each, total)
    builder.stored(each)
    if not target.shape:
        wide, hit_at = builder.expanded(each, call.shape), builder.expanded(own, call.shape)
        counted = Iota("i8", 0, (1,))
    else:
        wide = builder.expanded(builder.unsqueezed(each, 1), call.shape)
        hit_at = builder.expanded(builder.unsqueezed(own, 1), call.shape)
        counted = Iota("i8", 0, (0, 1))
    hit = op("eq", hit_at.expr, counted)
    return Value(call.shape, op("where", hit, wide.expr, Const(kind, 0.0)))
