"""The C around a step's statements: many steps of a member, and many members, spread over threads."""

from __future__ import annotations

from math import prod

from carpool.kernels.resident.loops import SIZES
from carpool.kernels.resident.parts import Home, Step

TENSORS = """\
typedef struct { char *base; i8 stride; } Tensor;  /* bytes from row to row */
typedef struct {
    Tensor *tensors;
    const u1 *active; /* for each row: whether it takes part */
    i8 *faults;       /* for each row: after how many steps a place was out of bounds, or -1 */
    i8 begin, steps, dry; /* dry: everything is computed and nothing kept */
} Run;
#define ROW(t, name) ((t *)(R->tensors[T_##name].base + row * R->tensors[T_##name].stride))
"""

LAUNCH = """\
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
        say(f"                   R->tensors[T_{plain(batch.tensor)}].base + order[b] * (i8){batch.bytes},")
        say(f"                   {batch.bytes});")
    for number in step.numbers:
        at = f"{number.offset} + k * {number.per_step}"
        say(f"        memcpy(P_{number.array.name}, ROW({number.array.type}, {plain(number.tensor)}) + {at},")
        say(f"               {number.array.size * SIZES[number.array.type]});")
    for counter in step.counters:
        say(f"        *P_{counter.array.name} = *ROW(i8, {plain(counter.tensor)}) + {counter.adds};")
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
