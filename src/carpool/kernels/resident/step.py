"""The program of a step: loops put together, turned as products want them, and printed."""

from __future__ import annotations

from math import prod

from carpool.kernels.resident.c import Printer, memory
from carpool.kernels.resident.launching import ROW, TENSORS, member, plain
from carpool.kernels.resident.loops import Array, Product, Statement, reads, writes
from carpool.kernels.resident.merge import merged
from carpool.kernels.resident.parts import PARTS, Batch, Counter, Home, Number, Output, Step
from carpool.kernels.resident.prelude import prelude
from carpool.kernels.resident.twins import turn, turned

TRAINS = ("order", "first", "active", "alive", "steps", "seeds", "batch", "taken", "sums", "due", "updates")
EVALUATES = ("order", "first", "active", "steps", "seeds", "batch", "taken", "sums")


def program(step: Step) -> tuple[str, list[str], int]:
    """The C of a step, the tensors that it wants by name, and the bytes of memory that a thread needs."""
    _prepare(step)
    fixed = TRAINS if step.trains else EVALUATES
    names = list(dict.fromkeys([
        *fixed, *(h.tensor for h in step.homes), *(b.tensor for b in step.batches),
        *(n.tensor for n in step.numbers), *(c.tensor for c in step.counters),
        *(o.tensor for o in step.outputs),
    ]))  # fmt: skip
    parts = {"body": step.body, "commit": step.commit, "due": step.when_due, "not_due": step.when_not}
    arrays = _arrays(step)
    places, size = memory(arrays, step.lanes)
    printer = Printer(step.real, step.vector_bytes)
    lines = [TENSORS, ROW]
    lines += [f"#define P_{a.name} (({a.type} *)(A + {places[a.name]}))" for a in arrays]
    lines.append("enum {\n" + "".join(f"    T_{plain(name)},\n" for name in names) + "};")
    calls: dict[str, list[str]] = {}
    for kind, statements in parts.items():
        calls[kind] = []
        for number, statement in enumerate(statements):
            name = f"{kind}_{number}"
            lines.append(printer.function(name, statement))
            calls[kind].append(f"{name}(A, &bad);")
    lines.append(member(step, calls))
    text = "\n".join([*lines, ""])
    return prelude(step.real, step.vector_bytes, text) + text, names, size


def _arrays(step: Step) -> list[Array]:
    found: dict[Array, None] = {}
    for home in step.homes:
        found[home.array] = None
    for holder in (*step.batches, *step.numbers, *step.counters):
        found[holder.array] = None
    for statement in (*step.body, *step.commit, *step.when_due, *step.when_not):
        for array in (*sorted(reads(statement), key=_name), *sorted(writes(statement), key=_name)):
            found[array] = None
    for array in sorted(step.told, key=_name):
        found[array] = None
    return list(found)


def _name(array: Array) -> str:
    return array.name


def _prepare(step: Step) -> None:
    """Puts loops together, and turns what products want turned."""
    marked: list[Statement] = [*step.body]
    cut = len(marked)
    rest = (*step.commit, *step.when_due, *step.when_not)
    needed = {array for statement in (*step.when_due, *step.when_not) for array in reads(statement)}
    everything = merged([*marked[:cut], *step.commit], needed | step.told)
    kept = {array for statement in rest for array in writes(statement) if array.kept}
    ends = [n for n, statement in enumerate(everything) if not writes(statement).isdisjoint(kept)]
    first = min(ends, default=len(everything))
    step.body, step.commit = everything[:first], everything[first:]
    if step.shown is not None:
        late = [s for s in step.commit if not any(a.kept for a in writes(s))]
        if late:  # what the step shows is known before anything is kept
            step.body, step.commit = _settled(step.body, step.commit)
    step.when_due, step.when_not = merged(step.when_due, set()), merged(step.when_not, set())
    turn(step)


def _settled(body: list[Statement], commit: list[Statement]) -> tuple[list[Statement], list[Statement]]:
    """Statements that keep nothing, but stand between those that do, run before all of these."""
    early = [s for s in commit if not any(a.kept for a in writes(s))]
    return [*body, *early], [s for s in commit if any(a.kept for a in writes(s))]


def flops(step: Step) -> int:
    """The floating-point operations of its products."""
    products = (
        statement for part in PARTS for statement in getattr(step, part) if isinstance(statement, Product)
    )
    return sum(2 * prod(one.batch) * one.rows * one.columns * one.depth for one in products)


__all__ = ["Batch", "Counter", "Home", "Number", "Output", "Step", "flops", "program", "turned"]
