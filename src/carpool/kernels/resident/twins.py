"""Matrices that products read the other way round: they lie so, or have a twin, or are copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from carpool.kernels.resident.builder import Builder, Refused
from carpool.kernels.resident.loops import (
    Array,
    Load,
    Map,
    Out,
    Place,
    Product,
    Reduce,
    Shape,
    Statement,
    whole,
)
from carpool.kernels.resident.merge import exchanged, merged, oriented
from carpool.kernels.resident.parts import PARTS, Home, Step


def turn(step: Step) -> None:
    """Every product finds its right operand side by side: in a twin, or in a copy made for it."""
    builder = Builder()
    twins: dict[Array, Array] = {}
    count = 0
    for part in PARTS:
        made: list[Statement] = []
        for statement in getattr(step, part):
            if isinstance(statement, Product) and oriented(statement, step.lanes) is None:
                array = statement.right.array
                shape = (statement.depth, statement.columns)
                home = _home(step, array) if _is_matrix(statement) else None
                if home is not None and _has_twin(home, shape, twins):
                    if array not in twins:
                        twins[array] = replace(array, name=f"{array.name}_twin", shape=shape)
                        step.homes.append(
                            replace(home, array=twins[array], is_stored=False, is_turned=not home.is_turned)
                        )
                    strides = (*[0] * len(statement.batch), statement.columns, 1)
                    statement = replace(statement, right=Place(twins[array], 0, strides))
                else:
                    if statement.rows < statement.columns:
                        statement = exchanged(statement)  # the smaller operand is the one to be copied
                        array = statement.right.array
                    count += 1
                    space = (*statement.batch, statement.depth, statement.columns)
                    copy = builder.array(array.type, space, f"turned{count}")
                    made.append(Map(space, (Out(whole(copy), Load(copy.type, statement.right)),)))
                    statement = replace(statement, right=whole(copy))
            made.append(statement)
        setattr(step, part, made)
    for part in PARTS:
        setattr(step, part, [_final(statement, twins, step.lanes) for statement in getattr(step, part)])


def _final(statement: Statement, twins: Mapping[Array, Array], lanes: int) -> Statement:
    """With twins written beside what they are twins of, and products the way round that suits them."""
    if isinstance(statement, Map | Product | Reduce):
        space = statement.space[: statement.kept] if isinstance(statement, Reduce) else statement.space
        copies = [
            Out(_in_twin(space, out.place, twins[out.place.array]), out.value)
            for out in statement.outs
            if out.place.array in twins
        ]
        statement = replace(statement, outs=(*statement.outs, *copies))
    if isinstance(statement, Product):
        way = oriented(statement, lanes)
        assert way is not None
        return way
    return statement


def _has_twin(home: Home, shape: Shape, twins: Mapping[Array, Array]) -> bool:
    """Whether there is a transposed matrix of this shape, or can be."""
    if home.array in twins:
        return twins[home.array].shape == shape
    return not home.is_turned or shape[0] == home.array.shape[-1]


def _in_twin(space: Shape, place: Place, twin: Array) -> Place:
    """The same elements in the transposed matrix."""
    columns, rows = twin.shape
    crosses = any(
        stride % columns and size * stride > columns
        for size, stride in zip(space, place.strides, strict=True)
        if size > 1
    )
    if crosses or place.offset:
        raise Refused("a matrix that is changed in parts")

    def turned(stride: int) -> int:
        return stride // columns + stride % columns * rows

    return Place(twin, 0, tuple(turned(stride) for stride in place.strides))


def _is_matrix(product: Product) -> bool:
    """Whether its right operand is all of a matrix, column after column."""
    right = product.right
    return (
        prod(product.batch) == 1
        and right.offset == 0
        and right.strides[-2:] == (1, product.depth)
        and right.array.size == product.depth * product.columns
        and right.array.kept
    )


def _home(step: Step, array: Array) -> Home | None:
    return next((home for home in step.homes if home.array == array), None)


def turned(step: Step) -> frozenset[str]:
    """The kept matrices that lie better the other way round: products read them so, or mostly do."""
    wants: dict[str, set[bool]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for statement in merged([*step.body, *step.commit, *step.when_due, *step.when_not], step.told):
        if not isinstance(statement, Product):
            continue
        if _is_matrix(statement) and oriented(statement, step.lanes) is None:
            if statement.columns != statement.right.array.shape[0]:
                continue
            wants.setdefault(statement.right.array.name, set()).add(True)
            sizes[statement.right.array.name] = (statement.columns, statement.depth)
        elif (way := oriented(statement, step.lanes)) is not None and way.right.array.kept:
            wants.setdefault(way.right.array.name, set()).add(False)
    return frozenset(
        name
        for name, ways in wants.items()
        if True in ways and (len(ways) == 1 or _waste(sizes[name][0], step) < _waste(sizes[name][1], step))
    )


def _waste(size: int, step: Step) -> float:
    """How many lanes a row of this size takes, beside how many it needs."""
    return -(-size // step.lanes) * step.lanes / size
