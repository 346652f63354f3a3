"""The C of functions of elements, and of their vectors: definitions by name.

Functions of float32 vectors are polynomials that err by less than two units in the last place, also near
zero and for denormals (tests/kernels/test_resident_arithmetic.py). Those that are rare, and all of float64,
are the C library's, lane by lane.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from string import Template

from carpool.kernels.resident.loops import SIZES, Type
from carpool.random import MULTIPLIERS, WEYL

_MEMORY = Template("""\
INLINE v$t bc_$t($t x) { return (v$t){$copies}; }
INLINE v$t ld_$t(const $t *p) { return *(const l$t *)p; }
INLINE void st_$t($t *p, v$t x) { *(l$t *)p = x; }
INLINE v$t lds_$t(const $t *p, i8 s, int n) {
    v$t r = {};
    for (int i = 0; i < n; ++i) r[i] = p[i * s];
    return r;
}
INLINE void sts_$t($t *p, i8 s, v$t x, int n) { for (int i = 0; i < n; ++i) p[i * s] = x[i]; }
INLINE void stp_$t($t *p, v$t x, int n) { memcpy(p, &x, n * sizeof($t)); }
INLINE v$t sel_v$t(vu1 c, v$t a, v$t b) { v$m m = AS(c, v$m); return (v$t)((m & (v$m)a) | (~m & (v$m)b)); }
""")

_TRUTH = """\
INLINE vu1 bc_u1(int x) { return (vu1){} - (x != 0); }
INLINE vu1 ld_u1(const u1 *p) { return AS(*(const lbytes *)p, vu1) != 0; }
INLINE vbytes bytes_of(vu1 x) { return AS(x, vbytes) & 1; }
INLINE void st_u1(u1 *p, vu1 x) { *(lbytes *)p = bytes_of(x); }
INLINE vu1 lds_u1(const u1 *p, i8 s, int n) {
    vu1 r = {};
    for (int i = 0; i < n; ++i) r[i] = -(p[i * s] != 0);
    return r;
}
INLINE void sts_u1(u1 *p, i8 s, vu1 x, int n) { for (int i = 0; i < n; ++i) p[i * s] = x[i] != 0; }
INLINE void stp_u1(u1 *p, vu1 x, int n) { vbytes b = bytes_of(x); memcpy(p, &b, n); }
INLINE vu1 sel_vu1(vu1 c, vu1 a, vu1 b) { return (c & a) | (~c & b); }
INLINE vu1 below(int n) { vu1 r; for (int i = 0; i < V; ++i) r[i] = -(i < n); return r; }
"""

_ORDER = Template("""\
INLINE $t max_$t($t a, $t b) { return a > b || a != a ? a : b; }
INLINE $t min_$t($t a, $t b) { return a < b || a != a ? a : b; }
INLINE v$t max_v$t(v$t a, v$t b) { return sel_v$t(AS((a > b) | (a != a), vu1), a, b); }
INLINE v$t min_v$t(v$t a, v$t b) { return sel_v$t(AS((a < b) | (a != a), vu1), a, b); }
""")

_TOGETHER = Template("""\
INLINE $t h${kind}_$t(v$t x) {
$halves
    return x[0];
}
""")
_BOTH = {"sum": "x + $other", "prod": "x * $other", "max": "max_v$t(x, $other)", "min": "min_v$t(x, $other)"}
_LANE: dict[Type, Type] = {"f4": "i4", "f8": "i8", "i8": "i8", "i4": "i4"}
"""The integer as large as a number of a type."""

_WHOLE = """\
INLINE i8 floordiv_i8(i8 a, i8 b) { i8 q = b ? a / b : 0; return q - (b && a % b && (a < 0) != (b < 0)); }
INLINE i8 rem_i8(i8 a, i8 b) { return a - floordiv_i8(a, b) * b; }
INLINE i8 fmod_i8(i8 a, i8 b) { return b ? a % b : 0; }
INLINE i8 abs_i8(i8 a) { return a < 0 ? -a : a; }
/* Compilers compare vectors that are larger than a register number by number, but cut all else in pieces. */
INLINE vu1 eq_vi8(vi8 a, vi8 b) {
    const vi8 d = a ^ b;
    return AS((AS(d, vi4) | AS(d >> 32, vi4)) == 0, vu1);
}
INLINE vi8 abs_vi8(vi8 a) { return sel_vi8(AS(a < 0, vu1), -a, a); }
INLINE i8 at(i8 index, i8 bound, int *bad) {
    *bad |= index < 0 || index >= bound;
    return *bad ? 0 : index;
}
"""

_UNARY = {
    **{name: name for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "tanh", "erf", "erfc", "sin", "cos",
        "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "floor", "ceil", "trunc",
    )},
    "round": "rint",
    "abs": "fabs",
}  # fmt: skip
"""By our name, the C library's for float64; for float32 that has an f behind it."""
_BINARY = {name: name for name in ("pow", "atan2", "hypot", "copysign", "fmod")}
_OWN = ("exp", "log", "log1p", "expm1", "tanh", "erf", "abs")
"""Of float32 vectors, below."""

_SCALAR_UNARY = Template("INLINE $t ${name}_$t($t x) { return $function(x); }\n")
_SCALAR_BINARY = Template("INLINE $t ${name}_$t($t a, $t b) { return $function(a, b); }\n")
LANES_UNARY = Template("""\
INLINE v$t ${name}_v$t(v$t x) { for (int i = 0; i < V; ++i) x[i] = ${name}_$t(x[i]); return x; }
""")
LANES_BINARY = Template("""\
INLINE v$t ${name}_v$t(v$t a, v$t b) {
    for (int i = 0; i < V; ++i) a[i] = ${name}_$t(a[i], b[i]);
    return a;
}
""")

_ROOT = Template("""\
INLINE v$t sqrt_v$t(v$t x) {
#if defined($has) && !defined(__clang__)
    return __builtin_ia32_sqrt$call;
#else
    for (int i = 0; i < V; ++i) x[i] = __builtin_sqrt$f(x[i]);
    return x;
#endif
}
""")
_NOW = "_mask(x, x, -1, 4)"  # all lanes, rounded as everything else
_ROOTS: dict[tuple[Type, int], tuple[str, str]] = {
    ("f4", 16): ("ps(x)", "__AVX__"), ("f4", 32): ("ps256(x)", "__AVX__"), ("f8", 32): ("pd256(x)", "__AVX__"),
    ("f4", 64): ("ps512" + _NOW, "__AVX512F__"), ("f8", 64): ("pd512" + _NOW, "__AVX512F__"),
}  # fmt: skip
"""The instruction by the type and the bytes of a vector, and what has it."""

_FLOAT32 = """\
INLINE vf4 abs_vf4(vf4 x) { return (vf4)((vw)x & 0x7fffffffu); }
INLINE vf4 signed_vf4(vf4 x, vf4 sign) { return (vf4)(((vw)x & 0x7fffffffu) | ((vw)sign & 0x80000000u)); }
INLINE vf4 whole_vf4(vf4 x) { vf4 big = bc_f4(12582912.0f); return (x + big) - big; }
INLINE vf4 power_vf4(vi4 n) { return (vf4)((vw)(n + 127) << 23); }
INLINE vf4 bounded_vf4(vf4 x, f4 low, f4 high) {
    x = sel_vf4(AS(x > high, vu1), bc_f4(high), x);
    return sel_vf4(AS(x < low, vu1), bc_f4(low), x);
}
INLINE vi4 count_vf4(vf4 n) { return AS(sel_vf4(AS(n != n, vu1), bc_f4(0.0f), n), vi4); }
INLINE vf4 bend_vf4(vf4 r) {
    vf4 p = bc_f4(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * (r * r);
}
INLINE vf4 exp_vf4(vf4 x) {
    x = bounded_vf4(x, -104.0f, 89.0f);
    vf4 n = whole_vf4(x * 1.44269504f), r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf4 near = r + 1.0f, p = near + (bend_vf4(r) + (r - (near - 1.0f)));
    vi4 all = count_vf4(n), half = all >> 1;
    return p * power_vf4(half) * power_vf4(all - half);
}
INLINE vf4 expm1_vf4(vf4 x) {
    vf4 y = bounded_vf4(x, -20.0f, 89.0f);
    vf4 n = whole_vf4(y * 1.44269504f), r = y - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf4 s = power_vf4(count_vf4(n) - 1), p = bend_vf4(r) + r;
    return sel_vf4(AS(x == 0.0f, vu1), x, (p * s + (s - 0.5f)) * 2.0f);
}
INLINE vf4 log_vf4(vf4 x) {
    vu1 tiny = AS(x < 1.17549435e-38f, vu1);
    vf4 y = sel_vf4(tiny, x * 8388608.0f, x);
    vi4 bits = (vi4)y, e = ((bits >> 23) & 255) - 126;
    vf4 m = (vf4)((vw)(bits & 0x807fffff) | 0x3f000000u);
    vf4 k = AS(e, vf4) - sel_vf4(tiny, bc_f4(23.0f), bc_f4(0.0f));
    vu1 low = AS(m < 0.707106781f, vu1);
    k = k - sel_vf4(low, bc_f4(1.0f), bc_f4(0.0f));
    m = m + sel_vf4(low, m, bc_f4(0.0f)) - 1.0f;
    vf4 z = m * m, p = bc_f4(7.0376836292e-2f);
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    vf4 r = p * m * z - k * 2.12194440e-4f - z * 0.5f;
    r = m + r + k * 0.693359375f;
    r = sel_vf4(AS(x == INFINITY, vu1), x, r);
    r = sel_vf4(AS(x == 0.0f, vu1), bc_f4(-INFINITY), r);
    return sel_vf4(AS((x < 0.0f) | (x != x), vu1), bc_f4(NAN), r);
}
INLINE vf4 log1p_vf4(vf4 x) {
    vf4 u = x + 1.0f, left = x - (u - 1.0f);  /* what the sum lost */
    vf4 r = log_vf4(u) + sel_vf4(AS((u == 0.0f) | (u == INFINITY), vu1), bc_f4(0.0f), left / u);
    return sel_vf4(AS(x == 0.0f, vu1), x, r);
}
INLINE vf4 tanh_vf4(vf4 x) {
    vf4 a = abs_vf4(x), z = x * x, p = bc_f4(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    vf4 far = 1.0f - 2.0f / (exp_vf4(a + a) + 1.0f);
    return signed_vf4(sel_vf4(AS(a < 0.625f, vu1), p * z * a + a, far), x);
}
INLINE vf4 erf_vf4(vf4 x) {
    vf4 a = abs_vf4(x), z = x * x, p = bc_f4(-5.96761703e-4f);
    p = p * z + 4.99119423e-3f;
    p = p * z - 2.67681349e-2f;
    p = p * z + 1.12819925e-1f;
    p = p * z - 3.76125336e-1f;
    p = p * z + 1.28379166e-1f;
    vf4 t = bounded_vf4(a, 0.0f, 5.0f), s = t * t;
    vf4 q = (t * -1.72853470e-5f + 3.83197126e-4f) * s + (t * -3.88396438e-3f + 2.42546219e-2f);
    q = q * t - 1.06777877e-1f;
    q = q * t - 6.34846687e-1f;
    q = q * t - 1.28717512e-1f;
    vf4 far = 1.0f - exp_vf4(q * t - t);
    return signed_vf4(sel_vf4(AS(a > 0.927734375f, vu1), far, p * a + a), x);
}
"""

_DERIVED = Template("""\
INLINE $t sigmoid_$t($t x) {
    const $t e = exp_$t(-abs_$t(x)), y = e / (1 + e);
    return x < 0 ? e - e * y : 1 - y;
}
INLINE v$t sigmoid_v$t(v$t x) {
    const v$t e = exp_v$t(-abs_v$t(x)), y = e / (1 + e);
    return sel_v$t(AS(x < 0, vu1), e - e * y, 1 - y);
}
INLINE $t rsqrt_$t($t x) { return 1 / sqrt_$t(x); }
INLINE v$t rsqrt_v$t(v$t x) { return 1 / sqrt_v$t(x); }
INLINE $t rem_$t($t a, $t b) { $t r = fmod$f(a, b); return r != 0 && (r < 0) != (b < 0) ? r + b : r; }
""")

_DRAW = Template("""\
/* Philox4x32-10: numbers in [0, 1), 24 bits each, four to a counter. */
INLINE void draw(f4 *out, i8 count, uint64_t seed, uint64_t step, uint64_t call) {
    for (i8 quad = 0; quad * 4 < count; ++quad) {
        uint32_t c0 = quad, c1 = call, c2 = step, c3 = step >> 32, k0 = seed, k1 = seed >> 32;
        for (int round = 0; round < 10; ++round) {
            uint64_t p0 = ${m0}ull * c0, p1 = ${m1}ull * c2;
            c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
            c1 = (uint32_t)p1;
            c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
            c3 = (uint32_t)p0;
            k0 += ${w0}u;
            k1 += ${w1}u;
        }
        const uint32_t words[4] = {c0, c1, c2, c3};
        for (int i = 0; i < 4 && quad * 4 + i < count; ++i) out[quad * 4 + i] = (words[i] >> 8) * 0x1p-24f;
    }
}
""")


def _texts(lanes: int) -> Iterator[str]:
    """All definitions for programs of vectors of so many; each uses only those before it."""
    yield _TRUTH
    for t, mask in _LANE.items():
        yield _MEMORY.substitute(t=t, m=mask, copies=", ".join("x" * lanes)) + _ORDER.substitute(t=t)
        for kind, both in _BOTH.items():
            yield _TOGETHER.substitute(t=t, kind=kind, halves=_halves(t, both, lanes))
    yield _WHOLE
    for name in ("floordiv", "rem", "fmod"):
        yield LANES_BINARY.substitute(t="i8", name=name)
    yield _FLOAT32
    yield from _floats("f4", "f", lanes)
    yield from _floats("f8", "", lanes)
    yield _DRAW.substitute(m0=MULTIPLIERS[0], m1=MULTIPLIERS[1], w0=WEYL[0], w1=WEYL[1])


def _halves(t: Type, both: str, lanes: int) -> str:
    """The lanes of one half with those of the other, until one is left."""
    lines: list[str] = []
    while (half := lanes // 2 ** (len(lines) + 1)) > 0:
        places = ", ".join(str((lane + half) % lanes) for lane in range(lanes))
        other = f"LANES(x, v{_LANE[t]}, {places})"
        lines.append(f"    x = {Template(both).substitute(t=t, other=other)};")
    return "\n".join(lines)


def _floats(t: Type, suffix: str, lanes: int) -> Iterator[str]:
    root = _ROOTS.get((t, lanes * SIZES[t]))
    for name, function in _UNARY.items():
        yield _SCALAR_UNARY.substitute(t=t, name=name, function=function + suffix)
        if not (t == "f4" and name in _OWN) and not (name == "sqrt" and root):
            yield LANES_UNARY.substitute(t=t, name=name)
    if root:
        yield _ROOT.substitute(t=t, f=suffix, call=root[0], has=root[1])
    for name, function in _BINARY.items():
        yield _SCALAR_BINARY.substitute(t=t, name=name, function=function + suffix)
        yield LANES_BINARY.substitute(t=t, name=name)
    yield _DERIVED.substitute(t=t, f=suffix) + LANES_BINARY.substitute(t=t, name="rem")


@cache
def definitions(lanes: int) -> dict[str, str]:
    """The C of each function, by its name."""
    parts = re.split(r"^(?=INLINE|/\*)", "".join(_texts(lanes)), flags=re.MULTILINE)
    found: dict[str, str] = {}
    remark = ""
    for part in parts:
        name = re.match(r"INLINE \w+ (\w+)\(", part)
        if name is None:
            remark = part
            continue
        found[name[1]], remark = remark + part, ""
    return found
