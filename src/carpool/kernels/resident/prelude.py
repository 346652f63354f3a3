"""The C that every program begins with: vectors of a member's numbers, and what is computed of their elements.

Vectors are the compiler's own (GCC and clang), 32 bytes of the weights' type. Functions of float32 are polynomials that err
by about one unit in the last place; of float64 they are the C library's, lane by lane.
"""

from __future__ import annotations

from string import Template

from carpool.kernels.resident.loops import Type
from carpool.random import MULTIPLIERS, WEYL

_TYPES = Template("""\
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float f4;
typedef double f8;
typedef int64_t i8;
typedef int32_t i4;
typedef uint8_t u1;
enum { V = $lanes };  /* elements of a vector */
#define INLINE static inline __attribute__((always_inline, unused))
/* GCC 12 takes calls away whose memcpy of a part of a vector the next call reads, if it may look into both. */
#ifdef __clang__
#define APART __attribute__((noinline))
#else
#define APART __attribute__((noipa))
#endif
#define VECTOR(t) __attribute__((vector_size(V * sizeof(t))))
#define LOOSE(t) __attribute__((aligned(sizeof(t)), may_alias))
typedef f4 vf4 VECTOR(f4);
typedef f8 vf8 VECTOR(f8);
typedef i8 vi8 VECTOR(i8);
typedef i4 vi4 VECTOR(i4);
typedef u1 vbytes VECTOR(u1);
typedef $lane vu1 VECTOR($lane);  /* truth, all bits of a lane */
typedef uint32_t vw VECTOR(uint32_t);
typedef vf4 lf4 LOOSE(f4);
typedef vf8 lf8 LOOSE(f8);
typedef vi8 li8 LOOSE(i8);
typedef vi4 li4 LOOSE(i4);
typedef vbytes lbytes LOOSE(u1);
#define AS(x, t) __builtin_convertvector(x, t)

""")

_MEMORY = Template("""\
INLINE v$t bc_$t($t x) { return (v$t){$copies}; }
INLINE v$t ld_$t(const $t *p) { return *(const l$t *)p; }
INLINE void st_$t($t *p, v$t x) { *(l$t *)p = x; }
INLINE v$t lds_$t(const $t *p, i8 s, int n) { v$t r = {}; for (int i = 0; i < n; ++i) r[i] = p[i * s]; return r; }
INLINE void sts_$t($t *p, i8 s, v$t x, int n) { for (int i = 0; i < n; ++i) p[i * s] = x[i]; }
INLINE void stp_$t($t *p, v$t x, int n) { memcpy(p, &x, n * sizeof($t)); }
INLINE v$t sel_v$t(vu1 c, v$t a, v$t b) { v$m m = AS(c, v$m); return (v$t)((m & (v$m)a) | (~m & (v$m)b)); }
""")

_TRUTH = """\
INLINE vu1 bc_u1(int x) { return (vu1){} - (x != 0); }
INLINE vu1 ld_u1(const u1 *p) { return AS(*(const lbytes *)p, vu1) != 0; }
INLINE vbytes bytes_of(vu1 x) { return AS(x, vbytes) & 1; }
INLINE void st_u1(u1 *p, vu1 x) { *(lbytes *)p = bytes_of(x); }
INLINE vu1 lds_u1(const u1 *p, i8 s, int n) { vu1 r = {}; for (int i = 0; i < n; ++i) r[i] = -(p[i * s] != 0); return r; }
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
INLINE $t hsum_$t(v$t x) { for (int h = V / 2; h; h /= 2) for (int i = 0; i < h; ++i) x[i] = x[i] + x[i + h]; return x[0]; }
INLINE $t hprod_$t(v$t x) { for (int h = V / 2; h; h /= 2) for (int i = 0; i < h; ++i) x[i] = x[i] * x[i + h]; return x[0]; }
INLINE $t hmax_$t(v$t x) { for (int h = V / 2; h; h /= 2) for (int i = 0; i < h; ++i) x[i] = max_$t(x[i], x[i + h]); return x[0]; }
INLINE $t hmin_$t(v$t x) { for (int h = V / 2; h; h /= 2) for (int i = 0; i < h; ++i) x[i] = min_$t(x[i], x[i + h]); return x[0]; }
""")

_WHOLE = """\
INLINE i8 floordiv_i8(i8 a, i8 b) { i8 q = b ? a / b : 0; return q - (b && a % b && (a < 0) != (b < 0)); }
INLINE vi8 floordiv_vi8(vi8 a, vi8 b) { for (int i = 0; i < V; ++i) a[i] = floordiv_i8(a[i], b[i]); return a; }
INLINE i8 rem_i8(i8 a, i8 b) { return a - floordiv_i8(a, b) * b; }
INLINE vi8 rem_vi8(vi8 a, vi8 b) { return a - floordiv_vi8(a, b) * b; }
INLINE i8 abs_i8(i8 a) { return a < 0 ? -a : a; }
INLINE vi8 abs_vi8(vi8 a) { return sel_vi8(AS(a < 0, vu1), -a, a); }
INLINE i8 at(i8 index, i8 bound, int *bad) { *bad |= index < 0 || index >= bound; return *bad ? 0 : index; }
"""

# name: the C function of a float64; of a float32 it has an f behind it
_LIBRARY = {
    "exp": "exp", "expm1": "expm1", "log": "log", "log1p": "log1p", "log2": "log2", "sqrt": "sqrt",
    "tanh": "tanh", "erf": "erf", "erfc": "erfc", "sin": "sin", "cos": "cos", "atan": "atan", "tan": "tan", "asin": "asin", "acos": "acos", "asinh": "asinh", "acosh": "acosh",
    "atanh": "atanh", "exp2": "exp2", "log10": "log10", "sinh": "sinh",
    "cosh": "cosh", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "rint", "abs": "fabs",
}  # fmt: skip
_OWN = ("exp", "log", "log1p", "expm1", "tanh")  # of float32 vectors, below

_FLOAT32 = """\
INLINE vf4 abs_vf4(vf4 x) { return (vf4)((vw)x & 0x7fffffffu); }
INLINE vf4 round_vf4(vf4 x) { vf4 big = bc_f4(12582912.0f); return (x + big) - big; }
INLINE vf4 exp_vf4(vf4 x) {
    x = sel_vf4(AS(x > 89.0f, vu1), bc_f4(89.0f), x);
    x = sel_vf4(AS(x < -104.0f, vu1), bc_f4(-104.0f), x);
    vf4 n = round_vf4(x * 1.44269504f), r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf4 p = bc_f4(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vi4 whole = AS(sel_vf4(AS(n != n, vu1), bc_f4(0.0f), n), vi4), half = whole >> 1;
    return p * (vf4)((vw)(half + 127) << 23) * (vf4)((vw)(whole - half + 127) << 23);
}
INLINE vf4 log_vf4(vf4 x) {
    vu1 tiny = AS(x < 1.17549435e-38f, vu1);
    vf4 y = sel_vf4(tiny, x * 8388608.0f, x);
    vi4 bits = (vi4)y, e = ((bits >> 23) & 255) - 126;
    vf4 m = (vf4)((vw)(bits & 0x807fffff) | 0x3f000000u), k = AS(e, vf4) - sel_vf4(tiny, bc_f4(23.0f), bc_f4(0.0f));
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
    vf4 u = x + 1.0f, d = u - 1.0f;
    vf4 r = log_vf4(u) * (x / sel_vf4(AS(d == 0.0f, vu1), bc_f4(1.0f), d));
    r = sel_vf4(AS(d == 0.0f, vu1), x, r);
    return sel_vf4(AS(x == INFINITY, vu1), x, r);
}
INLINE vf4 expm1_vf4(vf4 x) {
    vf4 z = x * x, p = bc_f4(1.9875691500e-4f);
    p = p * x + 1.3981999507e-3f;
    p = p * x + 8.3334519073e-3f;
    p = p * x + 4.1665795894e-2f;
    p = p * x + 1.6666665459e-1f;
    p = p * x + 5.0000001201e-1f;
    return sel_vf4(AS(abs_vf4(x) < 0.34657359f, vu1), p * z + x, exp_vf4(x) - 1.0f);
}
INLINE vf4 tanh_vf4(vf4 x) {
    vf4 a = abs_vf4(x), z = x * x, p = bc_f4(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    vf4 far = 1.0f - 2.0f / (exp_vf4(a + a) + 1.0f);
    far = sel_vf4(AS(x < 0.0f, vu1), -far, far);
    return sel_vf4(AS(a < 0.625f, vu1), p * z * x + x, sel_vf4(AS(x != x, vu1), x, far));
}
"""

_ROOT = Template("""\
#if defined(__AVX__) && !defined(__clang__)
INLINE v$t sqrt_v$t(v$t x) { return __builtin_ia32_sqrt$instruction(x); }
#else
INLINE v$t sqrt_v$t(v$t x) { for (int i = 0; i < V; ++i) x[i] = __builtin_sqrt$f(x[i]); return x; }
#endif
""")
_ROOTS = {
    ("f4", "f4"): "ps256",
    ("f8", "f4"): "ps",
    ("f8", "f8"): "pd256",
}  # of the weights' type and the vector's

_DERIVED = Template("""\
INLINE $t sigmoid_$t($t x) { return 1 / (1 + exp_$t(-x)); }
INLINE v$t sigmoid_v$t(v$t x) { return 1 / (1 + exp_v$t(-x)); }
INLINE $t rsqrt_$t($t x) { return 1 / sqrt_$t(x); }
INLINE v$t rsqrt_v$t(v$t x) { return 1 / sqrt_v$t(x); }
INLINE $t pow_$t($t a, $t b) { return pow$f(a, b); }
INLINE v$t pow_v$t(v$t a, v$t b) { for (int i = 0; i < V; ++i) a[i] = pow$f(a[i], b[i]); return a; }
INLINE $t atan2_$t($t a, $t b) { return atan2$f(a, b); }
INLINE v$t atan2_v$t(v$t a, v$t b) { for (int i = 0; i < V; ++i) a[i] = atan2$f(a[i], b[i]); return a; }
INLINE $t hypot_$t($t a, $t b) { return hypot$f(a, b); }
INLINE v$t hypot_v$t(v$t a, v$t b) { for (int i = 0; i < V; ++i) a[i] = hypot$f(a[i], b[i]); return a; }
INLINE $t copysign_$t($t a, $t b) { return copysign$f(a, b); }
INLINE v$t copysign_v$t(v$t a, v$t b) { for (int i = 0; i < V; ++i) a[i] = copysign$f(a[i], b[i]); return a; }
INLINE $t fmod_$t($t a, $t b) { return fmod$f(a, b); }
INLINE v$t fmod_v$t(v$t a, v$t b) { for (int i = 0; i < V; ++i) a[i] = fmod$f(a[i], b[i]); return a; }
INLINE $t rem_$t($t a, $t b) { $t r = fmod$f(a, b); return r != 0 && (r < 0) != (b < 0) ? r + b : r; }
INLINE v$t rem_v$t(v$t a, v$t b) { for (int i = 0; i < V; ++i) a[i] = rem_$t(a[i], b[i]); return a; }
""")

_LANES = Template(
    "INLINE v$t ${name}_v$t(v$t x) { for (int i = 0; i < V; ++i) x[i] = $function(x[i]); return x; }\n"
)
_SCALAR = Template("INLINE $t ${name}_$t($t x) { return $function(x); }\n")

_DRAW = Template("""\
/* Philox4x32-10: numbers in [0, 1), 24 bits each, four to a counter. */
static __attribute__((unused)) void draw(f4 *out, i8 count, uint64_t seed, uint64_t step, uint64_t call) {
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


def prelude(real: Type) -> str:
    """The beginning of a program whose weights are of this type."""
    lanes, lane = ("8", "i4") if real == "f4" else ("4", "i8")
    masks = {"f4": "i4", "f8": "i8", "i8": "i8", "i4": "i4"}
    parts = [_TYPES.substitute(lanes=lanes, lane=lane), _TRUTH]
    copies = ", ".join("x" * int(lanes))
    parts += [_MEMORY.substitute(t=t, m=m, copies=copies) for t, m in masks.items()]
    parts += [_ORDER.substitute(t=t) for t in masks]
    parts += [_WHOLE, _FLOAT32]
    for t, suffix in (("f4", "f"), ("f8", "")):
        for name, function in _LIBRARY.items():
            own = (t == "f4" and name in (*_OWN, "abs", "round")) or (name == "sqrt" and (real, t) in _ROOTS)
            parts.append(_SCALAR.substitute(t=t, name=name, function=function + suffix))
            if not own:
                parts.append(_LANES.substitute(t=t, name=name, function=function + suffix))
        if (real, t) in _ROOTS:
            parts.append(_ROOT.substitute(t=t, f=suffix, instruction=_ROOTS[real, t]))
        parts.append(_DERIVED.substitute(t=t, f=suffix))
    parts.append(_DRAW.substitute(m0=MULTIPLIERS[0], m1=MULTIPLIERS[1], w0=WEYL[0], w1=WEYL[1]))
    return "".join(parts)
