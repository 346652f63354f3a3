"""Images in other sizes: what each pixel is made of, and the gradients of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from carpool.kernels.resident.builder import Value
from carpool.kernels.resident.loops import Along, Const, Expr, Iota, Scatter
from carpool.kernels.resident.lower.table import Call, lowers
from carpool.kernels.resident.operations import cast, op


def _given_back(call: Call, grad: Value, dims: int, source: Callable[[int, Iota], Expr]) -> Value:
    """Each pixel's gradient to the pixel that it was a copy of."""
    builder, rank = call.builder, len(call.shape)
    made = builder.filled(call.type, call.shape, 0.0)
    place = builder.place(made)
    lead = rank - dims
    along = []
    for dim in range(dims):
        counted = Iota("i8", 0, tuple(int(d == lead + dim) for d in range(rank)))
        own = op("max", source(dim, counted), Const("i8", 0))
        own = op("min", own, Const("i8", call.shape[lead + dim] - 1))
        along.append(Along(own, place.strides[lead + dim], call.shape[lead + dim]))
    strides = (*place.strides[:lead], *[0] * dims)
    value = builder.stored(grad).expr
    builder.statements.append(Scatter(grad.shape, replace(place, strides=strides), tuple(along), value))
    return made


def _nearest(dims: int) -> None:
    @lowers(f"aten.upsample_nearest{dims}d_backward.default")
    def lower(call: Call, grad: Value, out: Sequence[int], size: Sequence[int], *scales: Any) -> Value:
        shares = [
            1 / scale if scale else own / wanted
            for own, wanted, scale in zip(size[-dims:], out, scales or [None] * dims, strict=True)
        ]

        def source(dim: int, counted: Iota) -> Expr:
            share = cast(Const("f8", shares[dim]), "f4")  # torch's own indices are float32
            return cast(op("mul", cast(counted, "f4"), share), "i8")

        return _given_back(call, grad, dims, source)


def _replicated(dims: int) -> None:
    @lowers(f"aten.replication_pad{dims}d_backward.default")
    def lower(call: Call, grad: Value, image: Value, pad: Sequence[int]) -> Value:
        return _given_back(
            call, grad, dims, lambda dim, counted: op("sub", counted, Const("i8", pad[2 * (dims - 1 - dim)]))
        )


for _dims in (1, 2, 3):
    _nearest(_dims)
    _replicated(_dims)
