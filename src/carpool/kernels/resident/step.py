"""A whole step of one member, and the program that takes many steps of many members, one member after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from carpool.kernels.resident.builder import Builder, Refused
from carpool.kernels.resident.c import Printer, memory
from carpool.kernels.resident.loops import (
    SIZES,
    Array,
    Load,
    Map,
    Out,
    Place,
    Product,
    Reduce,
    Shape,
    Statement,
    Type,
    contiguous,
    reads,
    whole,
    writes,
)
from carpool.kernels.resident.merge import exchanged, merged, oriented
from carpool.kernels.resident.prelude import prelude


@dataclass(frozen=True)
class Home:
    """Where a kept array comes from at a launch's beginning, and where it goes at its end: a row of a tensor."""

    array: Array
    tensor: str
    offset: int = 0
    """In elements, from where the member's row begins."""
    is_stored: bool = True
    is_turned: bool = False
    """Whether the array is a matrix that lies the other way round there."""


@dataclass(frozen=True)
class Batch:
    """Samples that are gathered before a step: where to, and from which tensor."""

    array: Array
    tensor: str
    bytes: int
    """Of a sample."""


@dataclass(frozen=True)
class Number:
    """A number of the step, read from a tensor before it: [rows, steps, ...] at (row, step), or [rows] where `per_step` is 0."""

    array: Array
    tensor: str
    offset: int = 0
    per_step: int = 0
    """How many numbers further the next step's lies."""


@dataclass(frozen=True)
class Counter:
    """A whole number of the step: a member's own, plus the steps that it took in this launch, or that the launch took."""

    array: Array
    tensor: str
    adds: str = "k"


@dataclass
class Step:
    """What one member's step does. `commit` changes what is kept; it runs where the loss is finite, and `due` says so."""

    real: Type
    size: int
    homes: list[Home] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    numbers: list[Number] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)
    body: list[Statement] = field(default_factory=list)
    commit: list[Statement] = field(default_factory=list)
    when_due: list[Statement] = field(default_factory=list)
    when_not: list[Statement] = field(default_factory=list)
    shown: Array | None = None
    trains: bool = True
    spans: int = 0
    tensors: list[str] = field(default_factory=list)


TRAINS = ("order", "first", "active", "alive", "steps", "seeds", "batch", "taken", "sums", "due", "updates")
EVALUATES = ("order", "first", "active", "steps", "seeds", "batch", "taken", "sums")


def program(step: Step) -> tuple[str, list[str], int]:
    """The C of a step, the tensors that it wants by name, and the bytes of memory that a thread needs."""
    _prepare(step)
    fixed = TRAINS if step.trains else EVALUATES
    names = list(dict.fromkeys([
        *fixed, *(h.tensor for h in step.homes), *(b.tensor for b in step.batches),
        *(n.tensor for n in step.numbers), *(c.tensor for c in step.counters),
    ]))  # fmt: skip
    parts = {"body": step.body, "commit": step.commit, "due": step.when_due, "not_due": step.when_not}
    arrays = _arrays(step)
    places, size = memory(arrays)
    printer = Printer(step.real)
    lines = [_TENSORS]
    lines += [f"#define P_{a.name} (({a.type} *)(A + {places[a.name]}))" for a in arrays]
    lines.append("enum { " + ", ".join(f"T_{_plain(name)}" for name in names) + " };")
    calls: dict[str, list[str]] = {}
    for kind, statements in parts.items():
        calls[kind] = []
        for number, statement in enumerate(statements):
            name = f"{kind}_{number}"
            lines.append(printer.function(name, statement))
            calls[kind].append(f"{name}(A, &bad);")
    lines.append(_member(step, calls))
    lines.append(_LAUNCH)
    text = "\n".join(lines)
    return prelude(step.real, text) + text, names, size


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _arrays(step: Step) -> list[Array]:
    found: dict[Array, None] = {}
    for home in step.homes:
        found[home.array] = None
    for holder in (*step.batches, *step.numbers, *step.counters):
        found[holder.array] = None
    for statement in (*step.body, *step.commit, *step.when_due, *step.when_not):
        for array in (*sorted(reads(statement), key=_name), *sorted(writes(statement), key=_name)):
            found[array] = None
    if step.shown is not None:
        found[step.shown] = None
    return list(found)


def _name(array: Array) -> str:
    return array.name


def _prepare(step: Step) -> None:
    """Puts loops together, and turns what products want turned."""
    marked: list[Statement] = [*step.body]
    cut = len(marked)
    rest = (*step.commit, *step.when_due, *step.when_not)
    needed = {array for statement in (*step.when_due, *step.when_not) for array in reads(statement)}
    if step.shown is not None:
        needed.add(step.shown)
    everything = merged([*marked[:cut], *step.commit], needed)
    kept = {array for statement in rest for array in writes(statement) if array.kept}
    ends = [n for n, statement in enumerate(everything) if not writes(statement).isdisjoint(kept)]
    first = min(ends, default=len(everything))
    step.body, step.commit = everything[:first], everything[first:]
    if step.shown is not None:
        late = [s for s in step.commit if not any(a.kept for a in writes(s))]
        if late:  # what the step shows is known before anything is kept
            step.body, step.commit = _settled(step.body, step.commit)
    step.when_due, step.when_not = merged(step.when_due, set()), merged(step.when_not, set())
    _turn(step)


def _settled(body: list[Statement], commit: list[Statement]) -> tuple[list[Statement], list[Statement]]:
    """Statements that keep nothing, but stand between those that do, run before all of these."""
    early = [s for s in commit if not any(a.kept for a in writes(s))]
    return [*body, *early], [s for s in commit if any(a.kept for a in writes(s))]


def _turn(step: Step) -> None:
    """Every product finds its right operand side by side: in a twin of a kept matrix, or in a copy made for it."""
    builder = Builder()
    twins: dict[Array, Array] = {}
    count = 0
    for part in _PARTS:
        made: list[Statement] = []
        for statement in getattr(step, part):
            if isinstance(statement, Product) and oriented(statement) is None:
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
    for part in _PARTS:
        setattr(step, part, [_final(statement, twins) for statement in getattr(step, part)])


_PARTS = ("body", "commit", "when_due", "when_not")


def _final(statement: Statement, twins: Mapping[Array, Array]) -> Statement:
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
        way = oriented(statement)
        assert way is not None
        return way
    return statement


def _has_twin(home: Home, shape: Shape, twins: Mapping[Array, Array]) -> bool:
    """Whether there is a transposed matrix of this shape, or can be: of one that is turned already, the original."""
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


def flops(step: Step) -> int:
    """The floating-point operations of its products."""
    products = (
        statement for part in _PARTS for statement in getattr(step, part) if isinstance(statement, Product)
    )
    return sum(2 * prod(one.batch) * one.rows * one.columns * one.depth for one in products)


def turned(step: Step) -> frozenset[str]:
    """The kept matrices that lie better the other way round: products read them so, or mostly do."""
    wants: dict[str, set[bool]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for statement in merged([*step.body, *step.commit, *step.when_due, *step.when_not], _shown(step)):
        if not isinstance(statement, Product):
            continue
        if _is_matrix(statement) and oriented(statement) is None:
            if statement.columns != statement.right.array.shape[0]:
                continue
            wants.setdefault(statement.right.array.name, set()).add(True)
            sizes[statement.right.array.name] = (statement.columns, statement.depth)
        elif (way := oriented(statement)) is not None and way.right.array.kept:
            wants.setdefault(way.right.array.name, set()).add(False)
    return frozenset(
        name
        for name, ways in wants.items()
        if True in ways and (len(ways) == 1 or _waste(sizes[name][0], step) < _waste(sizes[name][1], step))
    )


def _waste(size: int, step: Step) -> float:
    """How many lanes a row of this size takes, beside how many it needs."""
    lanes = 32 // SIZES[step.real]
    return -(-size // lanes) * lanes / size


def _shown(step: Step) -> set[Array]:
    return set() if step.shown is None else {step.shown}


_TENSORS = """\
typedef struct { char *base; i8 stride; } Tensor;  /* bytes from row to row */
typedef struct {
    Tensor *tensors;
    const u1 *active; /* for each row: whether it takes part */
    i8 *faults;       /* for each row: after how many steps a place was out of bounds, or -1 */
    i8 begin, steps, dry; /* dry: everything is computed and nothing kept */
} Run;
#define ROW(t, name) ((t *)(R->tensors[T_##name].base + row * R->tensors[T_##name].stride))
"""

_LAUNCH = """\
typedef struct { void (*member)(Run *, i8, char *); Run run; } Segment;
typedef struct {
    Segment *segments;
    i8 count;
    const i8 *rows;
    i8 num_rows;
    u1 *halted;       /* for each row: whether it went out of bounds */
    char *memory;     /* for each thread */
    i8 memory_bytes, threads, next;
} Launch;
typedef struct { Launch *launch; char *memory; } Worker;

static void *work(void *given) {
    Worker *own = given;
    Launch *L = own->launch;
    for (;;) {
        const i8 next = __atomic_fetch_add(&L->next, 1, __ATOMIC_RELAXED);
        if (next >= L->num_rows) return 0;
        const i8 row = L->rows[next];
        for (i8 s = 0; s < L->count && !L->halted[row]; ++s) {
            Run *run = &L->segments[s].run;
            if (!run->active[row]) continue;
            L->segments[s].member(run, row, own->memory);
            if (run->faults[row] >= 0) L->halted[row] = 1;
        }
    }
}

/* All segments of a member, one after another, then those of the next: returns when all are through. */
void launch(Launch *L) {
    enum { MOST = 64 };
    pthread_t threads[MOST];
    Worker own[MOST];
    const i8 wanted = L->threads < MOST ? L->threads : MOST;
    int started = 1;
    L->next = 0;
    for (i8 i = 0; i < wanted; ++i) own[i] = (Worker){L, L->memory + i * L->memory_bytes};
    while (started < wanted && !pthread_create(&threads[started], 0, work, &own[started])) ++started;
    work(&own[0]);
    for (int i = 1; i < started; ++i) pthread_join(threads[i], 0);
}
"""


def _member(step: Step, calls: dict[str, list[str]]) -> str:
    out = ["void member(Run *R, i8 row, char *A) {", "    int bad = 0;"]
    say = out.append
    trains = step.trains
    if trains:
        say("    u1 alive = *ROW(u1, alive);")
        say("    if (!alive) return;")
    for home in step.homes:
        say(f"    {_copied(home, is_in=True)}")
    values = step.shown.size if step.shown is not None else 0
    say(f"    f8 sums[{max(1, values)}];")
    say(f"    memcpy(sums, ROW(f8, sums), {8 * values});")
    say("    i8 taken = 0, updated = 0;")
    say("    const i8 end = R->begin + R->steps;")
    say("    for (i8 k = R->begin; k < end; ++k) {")
    say(
        f"        const i4 *order = (const i4 *)R->tensors[T_order].base + *ROW(i8, first) + k * {step.size};"
    )
    for batch in step.batches:
        say(f"        for (i8 b = 0; b < {step.size}; ++b)")
        say(f"            memcpy((char *)P_{batch.array.name} + b * {batch.bytes},")
        say(
            f"                   R->tensors[T_{_plain(batch.tensor)}].base + order[b] * (i8){batch.bytes}, {batch.bytes});"
        )
    for number in step.numbers:
        at = f"{number.offset} + k * {number.per_step}"
        say(
            f"        memcpy(P_{number.array.name}, ROW({number.array.type}, {_plain(number.tensor)}) + {at},"
        )
        say(f"               {number.array.size * SIZES[number.array.type]});")
    for counter in step.counters:
        say(f"        *P_{counter.array.name} = *ROW(i8, {_plain(counter.tensor)}) + {counter.adds};")
    for call in calls["body"]:
        say(f"        {call}")
    say("        if (bad) { R->faults[row] = k - R->begin; break; }")
    if trains:
        say(f"        if (!isfinite(P_{step.shown.name}[0])) {{ alive = 0; break; }}" if step.shown else "")
        for call in calls["commit"]:
            say(f"        {call}")
        say("        if (ROW(u1, due)[k]) {")
        for call in calls["due"]:
            say(f"            {call}")
        say("            ++updated;")
        say("        }")
        if calls["not_due"]:
            say("        else {")
            for call in calls["not_due"]:
                say(f"            {call}")
            say("        }")
    for value in range(values):
        say(f"        sums[{value}] += P_{step.shown.name}[{value}] * {step.size};" if step.shown else "")
    say("        ++taken;")
    say("    }")
    say("    if (R->dry) return;")
    for home in step.homes:
        if home.is_stored:
            say(f"    {_copied(home, is_in=False)}")
    say(f"    memcpy(ROW(f8, sums), sums, {8 * values});")
    say("    *ROW(i8, taken) += taken;")
    if trains:
        say("    *ROW(i8, steps) += taken;")
        say("    *ROW(u1, alive) = alive;")
        say(f"    for (int s = 0; s < {step.spans}; ++s) ROW(i8, updates)[s] += updated;")
    say("}")
    return "\n".join(line for line in out if line)


def _copied(home: Home, is_in: bool) -> str:
    """The text that copies an array from its home, or back."""
    array = home.array
    type, here = array.type, f"P_{array.name}"
    there = f"ROW({type}, {_plain(home.tensor)}) + {home.offset}"
    if home.is_turned:
        rows, columns = prod(array.shape[:-1]), array.shape[-1]
        away, back = f"({there})[c * {rows} + r]", f"{here}[r * {columns} + c]"
        to, source = (back, away) if is_in else (away, back)
        return f"for (i8 c = 0; c < {columns}; ++c) for (i8 r = 0; r < {rows}; ++r) {to} = {source};"
    to, source = (here, there) if is_in else (there, here)
    return f"memcpy({to}, {source}, {array.size * SIZES[type]});"


__all__ = ["Batch", "Counter", "Home", "Number", "Step", "contiguous", "program"]
