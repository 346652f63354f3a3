"""What programs may use of a processor: what compilers are told of it, and how wide its vectors are.

All of it follows from the `Processor` alone: one machine has the same programs, and the same bits, for ever.
"""

from __future__ import annotations

from carpool.processor import Processor

# What x86-64-v3 has beyond the oldest x86-64, in Linux' words and in the compilers'. GCC knows that name
# since version 11; these flags are older, and give the same code.
_V3 = {
    "avx": "avx",
    "avx2": "avx2",
    "bmi1": "bmi",
    "bmi2": "bmi2",
    "f16c": "f16c",
    "fma": "fma",
    "abm": "lzcnt",
    "movbe": "movbe",
}
_V4 = {name: name for name in ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")}
"""What x86-64-v4 has beyond x86-64-v3."""
_WIDE = frozenset({("AuthenticAMD", 26)})
"""Families for which vectors of 64 bytes were timed to be faster: Zen 5."""
_NARROW_BYTES, _WIDE_BYTES = 32, 64


def has_v3(target: Processor) -> bool:
    """Whether programs for x86-64-v3 run there: what the processor lacks would end the process."""
    return target.kind == "x86_64" and target.flags >= _V3.keys()


def is_wide(target: Processor) -> bool:
    """Whether programs have vectors of 64 bytes there: where they run, and were timed to be faster."""
    return has_v3(target) and target.flags >= _V4.keys() and (target.vendor, target.family) in _WIDE


def vector_bytes(target: Processor) -> int:
    """Of the vectors of programs that run there. Compilers make several of one that a processor lacks."""
    return _WIDE_BYTES if is_wide(target) else _NARROW_BYTES


def told(target: Processor) -> tuple[str, ...]:
    """What GCC and clang are told of it."""
    if target.kind == "x86_64":
        return ("-march=x86-64", *(f"-m{name}" for name in _beyond(target)))
    return ("-march=armv8-a",) if target.kind == "arm64" else ()


def told_zig(target: Processor) -> tuple[str, ...]:
    """What Zig is told of it: without, it compiles for the very processor."""
    if target.kind == "x86_64":
        level = "x86_64_v3" if has_v3(target) else "x86_64"
        return ("-mcpu=" + "+".join([level, *(_V4.values() if is_wide(target) else ())]),)
    return ("-mcpu=generic",) if target.kind == "arm64" else ()


def _beyond(target: Processor) -> tuple[str, ...]:
    narrow = tuple(_V3.values()) if has_v3(target) else ()
    return (*narrow, *_V4.values()) if is_wide(target) else narrow
