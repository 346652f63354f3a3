"""The C around a step's statements: many steps of a member, and many members and epochs, spread over threads.

A program is the step of one member (`member`). `LAUNCHER` is a program of its own, the same for all: it takes
members through the segments of a launch, whatever programs these are of.
"""

from __future__ import annotations

from math import prod

from carpool.kernels.resident.loops import SIZES
from carpool.kernels.resident.parts import Home, Step
from carpool.order import SHUFFLE

TENSORS = """\
typedef struct { char *base; i8 stride, epoch; } Tensor;  /* bytes from row to row, and from epoch to epoch */
typedef struct {
    Tensor *tensors;
    const u1 *active; /* for each row: whether it takes part */
    i8 *faults;       /* for each epoch and row: after how many steps a place was out of bounds, or -1 */
    i8 begin;         /* where the tables of numbers begin */
    i8 from;          /* how many batches after the first one */
    i8 steps;
    i8 dry;           /* everything is computed and nothing kept */
    i8 epoch, width;  /* which of a launch's, and how many rows the stack has */
} Run;
"""
"""What a launcher and the programs that it calls have in common."""

ROW = """\
#define ROW(t, name) \\
    ((t *)(R->tensors[T_##name].base + row * R->tensors[T_##name].stride + R->epoch * R->tensors[T_##name].epoch))
"""

_TYPES = """\
#include <stdint.h>

typedef int64_t i8;
typedef int32_t i4;
typedef uint8_t u1;
"""

_LAUNCH = """
typedef struct {
    void (*member)(Run *, i8, char *);
    Run run;
    const i8 *lays; /* for each row: the epoch whose order is laid out before its steps, or -1 */
} Segment;
typedef struct {
    Segment *segments;
    i8 count, epochs; /* all segments, so many times */
    i8 steps;         /* of training in an epoch */
} Block;
typedef struct {
    i4 *order;        /* a row each, as long as the longest */
    const i4 *places;
    const i8 *seeds, *lengths, *bits;
    const u1 *shuffles;
    i8 longest;
} Orders;
typedef struct {
    Block *blocks;
    i8 count;
    const Orders *orders;
    const i8 *rows;
    i8 num_rows;
    u1 *halted;       /* for each row: whether it went out of bounds */
    char *memory;     /* for each thread */
    i8 memory_bytes, threads, next;
} Launch;
typedef struct { Launch *launch; char *memory; } Worker;

/* The samples of a row in the order of an epoch. */
static void lay(const Orders *O, i8 row, i8 epoch, char *memory) {
    const i8 length = O->lengths[row];
    const i4 *places = O->places + row * O->longest;
    i4 *order = O->order + row * O->longest;
    if (!O->shuffles[row]) {
        memcpy(order, places, length * sizeof *order);
        return;
    }
    uint64_t *key = (uint64_t *)memory;
    uint32_t *end = (uint32_t *)(key + (length + 7) / 8 * 8);
    shuffle(O->seeds[row], epoch, length, O->bits[row], order, key, end);
    for (i8 i = 0; i < length; ++i) order[i] = places[order[i]];
}

static void take(Launch *L, const Block *block, i8 row, i8 epoch, char *memory) {
    for (i8 s = 0; s < block->count && !L->halted[row]; ++s) {
        const Segment *segment = &block->segments[s];
        if (!segment->run.active[row]) continue;
        if (segment->lays && segment->lays[row] >= 0) lay(L->orders, row, segment->lays[row] + epoch, memory);
        Run run = segment->run;
        run.epoch = epoch;
        run.begin += epoch * block->steps;
        run.faults += epoch * run.width;
        segment->member(&run, row, memory);
        if (run.faults[row] >= 0) L->halted[row] = 1;
    }
}

static void *work(void *given) {
    Worker *own = given;
    Launch *L = own->launch;
    for (;;) {
        const i8 next = __atomic_fetch_add(&L->next, 1, __ATOMIC_RELAXED);
        if (next >= L->num_rows) return 0;
        for (i8 b = 0; b < L->count; ++b)
            for (i8 epoch = 0; epoch < L->blocks[b].epochs; ++epoch)
                take(L, &L->blocks[b], L->rows[next], epoch, own->memory);
    }
}

/* All blocks of a member, one after another, then those of the next: returns when all are through. */
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

LAUNCHES = f"#include <pthread.h>\n#define PLACE i4\n{SHUFFLE}{_LAUNCH}"
"""A launcher without the types, for a file in which a program stands before it."""
LAUNCHER = f"{_TYPES}{TENSORS}{LAUNCHES}"


def member(step: Step, calls: dict[str, list[str]]) -> str:
    out = ["void member(Run *R, i8 row, char *A) {", "    int bad = 0;"]
    say = out.append
    trains = step.trains
    if trains:
        say("    u1 alive = *ROW(u1, alive);")
        say("    if (!alive) return;")
    for home in step.homes:
        say(f"    {_copied(home, is_in=True)}")
    values = step.shown.size if step.shown is not None else 0
    if values:
        say(f"    f8 sums[{values}];")
        say(f"    memcpy(sums, ROW(f8, sums), {8 * values});")
    say("    i8 taken = 0, updated = 0;")
    say("    for (i8 k = 0; k < R->steps; ++k) {")
    say("        const i4 *order = (const i4 *)R->tensors[T_order].base;")
    say(f"        order += *ROW(i8, first) + (R->from + k) * {step.size};")
    for batch in step.batches:
        say(f"        for (i8 b = 0; b < {step.size}; ++b)")
        say(f"            memcpy((char *)P_{batch.array.name} + b * {batch.bytes},")
        say(f"                   R->tensors[T_{plain(batch.tensor)}].base + order[b] * (i8){batch.bytes},")
        say(f"                   {batch.bytes});")
    for number in step.numbers:
        at = f"{number.offset} + (R->begin + k) * {number.per_step}"
        say(f"        memcpy(P_{number.array.name}, ROW({number.array.type}, {plain(number.tensor)}) + {at},")
        say(f"               {number.array.size * SIZES[number.array.type]});")
    for counter in step.counters:
        say(f"        *P_{counter.array.name} = *ROW(i8, {plain(counter.tensor)}) + {counter.adds};")
    for call in calls["body"]:
        say(f"        {call}")
    say("        if (bad) { R->faults[row] = k; break; }")
    for output in step.outputs:
        array = output.array
        say(f"        memcpy(ROW({array.type}, {plain(output.tensor)}) + (R->from + k) * {array.size},")
        say(f"               P_{array.name}, {array.size * SIZES[array.type]});")
    if trains:
        say(f"        if (!isfinite(P_{step.shown.name}[0])) {{ alive = 0; break; }}" if step.shown else "")
        for call in calls["commit"]:
            say(f"        {call}")
        say("        if (ROW(u1, due)[R->begin + k]) {")
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
    if values:
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
    there = f"ROW({type}, {plain(home.tensor)}) + {home.offset}"
    if home.is_turned:
        rows, columns = prod(array.shape[:-1]), array.shape[-1]
        away, back = f"({there})[c * {rows} + r]", f"{here}[r * {columns} + c]"
        to, source = (back, away) if is_in else (away, back)
        loops = f"for (i8 c = 0; c < {columns}; ++c) for (i8 r = 0; r < {rows}; ++r)"
        return f"{loops}\n        {to} = {source};"
    to, source = (here, there) if is_in else (there, here)
    return f"memcpy({to}, {source}, {array.size * SIZES[type]});"


def plain(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)
