"""The C that a program begins with: types, vectors, and those functions of elements that it uses.

Vectors are the compiler's own (GCC and clang), so many bytes of the weights' type.
"""

from __future__ import annotations

import re
from string import Template

from carpool.kernels.resident.arithmetic import definitions
from carpool.kernels.resident.builder import Refused
from carpool.kernels.resident.loops import SIZES, Type

_TYPES = Template("""\
#include <math.h>
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
/* GCC 12, if it looks into both, takes a call away whose memcpy of part of a vector the next call reads. */
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
#ifdef __clang__
#define LANES(x, t, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
#define LANES(x, t, ...) __builtin_shuffle(x, (t){__VA_ARGS__})
#endif

""")

_WORD = re.compile(r"[A-Za-z_]\w*")
_CALL = re.compile(r"\b([a-z]\w*?)_v?(f4|f8|i8|i4|u1)(?=\()")


def prelude(real: Type, vector_bytes: int, program: str) -> str:
    """The beginning of a program of weights of this type. Raises Refused where a function is not there."""
    lanes = vector_bytes // SIZES[real]
    known = definitions(lanes)
    for call in _CALL.finditer(program):
        if call[0] not in known:
            raise Refused(f"no {call[1]} of {call[2]}")
    used, todo = set[str](), set(_WORD.findall(program)) & known.keys()
    while todo:
        name = todo.pop()
        used.add(name)
        todo |= set(_WORD.findall(known[name])) & known.keys() - used
    types = _TYPES.substitute(lanes=lanes, lane="i4" if real == "f4" else "i8")
    return types + "".join(text for name, text in known.items() if name in used)
