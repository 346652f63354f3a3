"""A stack's step as machine code: each member takes many steps while its weights stay in a core's cache.

The third way to run a step, beside the traced and the compiled one: it changes the same tensors (`stack.py`) in the same way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from carpool import machine
from carpool.adapters.torch.layout import Leaf
from carpool.adapters.torch.member import Traced, evaluating_step, traced_update, training_step
from carpool.adapters.torch.precision import settings
from carpool.adapters.torch.stacked import Recipe
from carpool.errors import described
from carpool.kernels.resident import step as steps
from carpool.kernels.resident.builder import Builder, Refused, Value
from carpool.kernels.resident.loops import (
    Array,
    Const,
    Expr,
    Load,
    Map,
    Out,
    Type,
    arrays_in,
    moved,
    rebuilt,
    whole,
)
from carpool.kernels.resident.lower import TYPES, lowered
from carpool.kernels.resident.operations import cast, op
from carpool.kernels.updates import number_dtype

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Code:
    """A step's C, and what it wants to be given."""

    source: str
    tensors: tuple[str, ...]
    memory_bytes: int
    size: int
    """Of a batch."""
    flops: int
    """Of a step's products."""
    operators: int
    """Of the step as it was traced."""
    lowest: torch.dtype
    """The least precise type that it computes in."""
    held: Mapping[str, Tensor] = field(default_factory=dict)
    """Those that the step itself brings along."""


_REMEMBERED = 256
_codes: OrderedDict[Hashable, Code | str] = OrderedDict()


def code_of(kind: str, key: Hashable, recipe: Recipe, size: int, tensors: Tensors) -> Code:
    """A step's code; what it has baked in is `key` and the shapes. Raises Refused, which names what is in the way."""
    wide = machine.vector_bytes()
    full = (kind, key, size, wide, _shapes(tensors), torch.get_default_dtype(), settings())
    if full not in _codes:
        make = training_code if kind == "train" else evaluating_code
        try:
            _codes[full] = make(recipe, size, tensors, wide)
        except Refused as refused:
            _codes[full] = str(refused)
        except Exception as error:  # a step that cannot be traced by itself runs as a stack's is traced
            _codes[full] = described(error)
    _codes.move_to_end(full)
    while len(_codes) > _REMEMBERED:
        _codes.popitem(last=False)
    found = _codes[full]
    if isinstance(found, str):
        raise Refused(found)
    return found


def _shapes(tensors: Tensors) -> Hashable:
    """Of what belongs to one member, or to all."""
    return tuple(
        (name, tuple(tensor.shape[not name.startswith("shared:") :]), tensor.dtype)
        for name, tensor in tensors.items()
        if name != "order"
    )


def training_code(recipe: Recipe, size: int, tensors: Tensors, vector_bytes: int) -> Code:
    """Raises Refused, which names what has no loops."""
    _check(recipe, tensors)
    traced = training_step(recipe, size, tensors)
    return _code(_Assembly(recipe, size, tensors, traced, vector_bytes, trains=True))


def evaluating_code(recipe: Recipe, size: int, tensors: Tensors, vector_bytes: int) -> Code:
    """Of a validation step. Raises Refused."""
    _check(recipe, tensors)
    traced = evaluating_step(recipe, size, tensors)
    return _code(_Assembly(recipe, size, tensors, traced, vector_bytes, trains=False))


def _code(assembly: _Assembly) -> Code:
    step = assembly.step()
    turned = steps.turned(step)
    if turned:
        step = assembly.step(turned)
    source, names, size = steps.program(step)
    traced = assembly.traced
    about = steps.flops(step), traced.operators, traced.lowest
    return Code(source, tuple(names), size, step.size, *about, assembly.held)


def _check(recipe: Recipe, tensors: Tensors) -> None:
    if len(recipe.phases) > 1 or any(phase.every > 1 for phase in recipe.phases):
        raise Refused("several updates in a step")
    if recipe.precision not in ("inherit", "float32") or torch.is_autocast_enabled("cpu"):
        raise Refused("a step in 16 bits")
    if recipe.layout.dtype not in (torch.float32, torch.float64):
        raise Refused(f"weights of type {recipe.layout.dtype}")
    for name, tensor in tensors.items():
        if name.startswith("data:") and tensor.dtype not in TYPES:
            raise Refused(f"samples of type {tensor.dtype}")


class _Assembly:
    """A traced step and the update put together."""

    def __init__(
        self, recipe: Recipe, size: int, tensors: Tensors, traced: Traced, vector_bytes: int, *, trains: bool
    ) -> None:
        self._recipe, self._size, self._tensors = recipe, size, tensors
        self.traced, self._vector_bytes, self._trains = traced, vector_bytes, trains
        self._real: Type = TYPES[recipe.layout.dtype]

    def step(self, turned: frozenset[str] = frozenset()) -> steps.Step:
        self._builder = Builder()
        self._emptied: list[Map] = []  # what was gathered, once it is used
        self._turned = turned
        self._made = steps.Step(
            self._real, self._size, self._vector_bytes, trains=self._trains,
            spans=len(self._recipe.layout.spans),
        )  # fmt: skip
        values = {name: self._input(name) for name in self.traced.inputs}
        placeholders = [node.name for node in self.traced.graph.nodes if node.op == "placeholder"]
        given = dict(zip(placeholders, values.values(), strict=True))
        made = dict(zip(self.traced.outputs, lowered(self.traced.graph, self._builder, given), strict=True))
        shown = self._builder.array("f8", made["shown"].shape, "shown")
        self._builder.into(whole(shown), made["shown"])
        self._made.shown = shown
        if self._trains:
            self._train(values, made)
        self._made.body += self._builder.statements
        for name, (array, _) in self._builder.held.items():
            self._made.homes.append(steps.Home(array, f"held:{name}", 0, is_stored=False))
        return self._made

    @property
    def held(self) -> dict[str, Tensor]:
        return {f"held:{name}": tensor.contiguous() for name, (_, tensor) in self._builder.held.items()}

    # What comes in

    def _input(self, name: str) -> Value:
        kind, _, leaf = name.partition(":")
        builder, made = self._builder, self._made
        if kind in ("seed", "step", "place"):
            array = builder.array("i8", (), kind)
            tensor, adds = {
                "seed": ("seeds", "0"),
                "step": ("steps", "taken" if self._trains else "0"),
                "place": ("batch", "R->from + k"),
            }[kind]
            made.counters.append(steps.Counter(array, tensor, adds))
            return builder.lying(array)
        if kind == "data":
            tensor = self._tensors[name]
            array = builder.array(TYPES[tensor.dtype], (self._size, *tensor.shape[1:]), f"data{leaf}")
            made.batches.append(steps.Batch(array, name, tensor[:1].numel() * tensor.element_size()))
            return builder.lying(array)
        if kind == "leaf":
            found = next(one for one in self._recipe.layout.leaves if one.name == leaf)
            return self._leaf("weights", found, f"w{self._number(found)}")
        tensor = self._tensors[name]
        shape = tuple(tensor.shape if kind == "shared" else tensor.shape[1:])
        if tensor.dtype not in TYPES:
            raise Refused(f"a leaf of type {tensor.dtype}")
        array = builder.array(TYPES[tensor.dtype], shape, f"{kind}{len(made.homes)}", kept=True)
        made.homes.append(steps.Home(array, name, 0, is_stored=self._trains and kind == "buffer"))
        return builder.lying(array)

    def _number(self, leaf: Leaf) -> int:
        return self._recipe.layout.leaves.index(leaf)

    def _leaf(self, tensor: str, leaf: Leaf, name: str) -> Value:
        """A leaf's own part of a row of weights, slots or gathered gradients."""
        turned = f"w{self._number(leaf)}" in self._turned
        shape = (*leaf.shape[1:], leaf.shape[0]) if turned else leaf.shape
        array = self._builder.array(self._real, shape, name, kept=True)
        home = steps.Home(array, tensor, leaf.start, self._trains, is_turned=turned)
        self._made.homes.append(home)
        value = self._builder.lying(array)
        return self._builder.permuted(value, range(-1, len(shape) - 1)) if turned else value

    # The update

    def _train(self, values: Mapping[str, Value], made: Mapping[str, Value]) -> None:
        recipe, builder = self._recipe, self._builder
        leaves = recipe.layout.leaves
        grads = {leaf.name: made[f"grad:{leaf.name}"] for leaf in leaves}
        for name in self.traced.outputs:
            if name.startswith("buffer:"):
                self._keep(values[name], made[name])
        weights = {leaf.name: values[f"leaf:{leaf.name}"] for leaf in leaves}
        arrays = {value.place.array for value in weights.values() if value.place}
        for name, slope in grads.items():
            own = weights[name].place
            assert own is not None
            if any(array in arrays and array != own.array for array in arrays_in(slope.expr)):
                builder.stored(slope)  # it reads what another update changes
        self._made.body, builder.statements = builder.statements, []
        if recipe.accumulate > 1:
            grads = self._gathered(grads)
        if recipe.clips:
            grads = self._clipped(grads)
        start = len(builder.statements)
        self._update(weights, grads)
        if recipe.accumulate > 1:
            self._made.when_due = builder.statements[start:]
            self._made.commit += builder.statements[:start]
        else:
            self._made.commit += builder.statements
        builder.statements = []

    def _keep(self, buffer: Value, value: Value) -> None:
        """A buffer's new value, written once the loss is known."""
        place = buffer.place
        assert place is not None
        if value.place == place:
            return
        own = Value(value.shape, cast(value.expr, buffer.type))
        if place.array in arrays_in(own.expr) or not isinstance(own.expr, Load):
            self._builder.stored(own)
        self._made.commit.append(Map(own.shape, (Out(place, own.expr),)))

    def _gathered(self, grads: Mapping[str, Value]) -> dict[str, Value]:
        """The gradients since the last update; a step that does not update keeps them."""
        totals: dict[str, Value] = {}
        for leaf in self._recipe.layout.leaves:
            kept = self._leaf("gathered", leaf, f"gathered{self._number(leaf)}")
            both = op("add", kept.expr, grads[leaf.name].expr)
            total = self._builder.stored(Value(leaf.shape, both))
            totals[leaf.name] = total
            assert kept.place is not None
            self._made.when_not.append(Map(leaf.shape, (Out(kept.place, total.expr),)))
            zero = Const(self._real, 0.0)
            self._emptied.append(Map(leaf.shape, (Out(kept.place, zero),)))
        return totals

    def _clipped(self, grads: Mapping[str, Value]) -> dict[str, Value]:
        builder, real = self._builder, self._real
        limit = builder.array(real, (), "limit")
        self._made.numbers.append(steps.Number(limit, "clip"))
        total: Expr = Const(real, 0.0)
        for value in grads.values():
            builder.stored(value)
            squares = Value(value.shape, op("mul", value.expr, value.expr))
            total = op("add", total, builder.reduced("sum", squares, range(len(value.shape))).expr)
        norm = op("add", op("sqrt", total), Const(real, 1e-6))
        share = op("min", op("div", builder.lying(limit).expr, norm), Const(real, 1.0))
        by = builder.stored(Value((), share))
        return {
            name: Value(value.shape, op("mul", value.expr, builder.expanded(by, value.shape).expr))
            for name, value in grads.items()
        }

    def _update(self, weights: Mapping[str, Value], grads: Mapping[str, Value]) -> None:
        layout, builder = self._recipe.layout, self._builder
        columns = self._tensors["table"].shape[-1]
        spans = len(layout.spans)
        for number, span in enumerate(layout.spans):
            if not span.leaves:
                continue
            scalars = builder.array(self._real, (columns,), f"columns{number}")
            self._made.numbers.append(steps.Number(scalars, "table", number * columns, spans * columns))
            tally_type = TYPES[number_dtype()]
            tallies = []
            for tally, _ in span.update.tallies:
                array = builder.array(tally_type, (), f"tally{number}{tally}", kept=True)
                self._made.homes.append(steps.Home(array, f"tally:{tally}", number))
                tallies.append(builder.lying(array))
            traced = traced_update(
                span.update, span.options, len(span.slots), span.num_columns, layout.dtype,
                self._tensors["table"].dtype, number_dtype(),
            )  # fmt: skip
            given = [
                builder.selected(builder.lying(scalars), 0, column) for column in range(span.num_columns)
            ]
            after: list[Expr] = []
            for leaf in span.leaves:
                slots = [
                    self._leaf(f"slot:{slot}", leaf, f"slot{place}_{self._number(leaf)}")
                    for place, slot in enumerate(span.slots)
                ]
                old = [weights[leaf.name], grads[leaf.name], *slots, *tallies, *given]
                new = _elements(
                    traced.graph, [builder.expanded(value, leaf.shape).expr for value in old], leaf.shape
                )
                kept = [weights[leaf.name], *slots]
                outs = []
                for value, element in zip(kept, new, strict=False):
                    assert value.place is not None
                    outs.append(Out(value.place, element))
                builder.statements.append(Map(leaf.shape, tuple(outs)))
                after = new[len(kept) :]
            for tally, element in zip(tallies, after, strict=True):
                assert tally.place is not None
                one = moved(element, lambda offset, strides: (offset, ()))
                builder.statements.append(Map((), (Out(tally.place, one),)))
        builder.statements += self._emptied


def _elements(graph: torch.fx.Graph, given: Sequence[Expr], shape: tuple[int, ...]) -> list[Expr]:
    """An update's expressions, traced on one element, of the elements of a leaf."""
    builder = Builder()
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    arrays = [Array(f"given{place}", expr.type, (1,)) for place, expr in enumerate(given)]
    made = lowered(
        graph, builder, {name: builder.lying(array) for name, array in zip(names, arrays, strict=True)}
    )
    if builder.statements:
        inside = {
            out.place.array: out.value
            for statement in builder.statements
            if isinstance(statement, Map)
            for out in statement.outs
        }
        if len(inside) < len(builder.statements):
            raise Refused("an update that is not element by element")
    else:
        inside = {}
    known: dict[Array, Expr] = dict(zip(arrays, given, strict=True))
    memo: dict[int, Expr] = {}

    def leaf(expr: Expr) -> Expr:
        if not isinstance(expr, Load):
            return expr
        array = expr.place.array
        if array not in known:
            known[array] = rebuilt(inside[array], leaf, memo)
        return known[array]

    return [rebuilt(value.expr, leaf, memo) for value in made]
