"""Runs nets under the sanitisers of the compiler, in a process that test_resident_sanitised.py begins.

Behind every array, and what may be computed for nothing behind that, lies memory that nobody may touch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from resident_beside import Beside, faults_of
from resident_nets import net

from carpool.adapters.torch import launch, resident
from carpool.kernels.resident import step
from carpool.kernels.resident.loops import LARGEST, SIZES, Array

_POISON = 256
_fences: list[tuple[int, int]] = []


def fenced(arrays: Sequence[Array], lanes: int) -> tuple[Mapping[str, int], int]:
    """Where arrays lie, as in programs, but with a fence behind each."""
    places: dict[str, int] = {}
    _fences.clear()
    end = 0
    for array in arrays:
        places[array.name] = end
        end += -(-(array.size * SIZES[array.type]) // 64) * 64 + lanes * LARGEST
        _fences.append((end, _POISON))
        end += _POISON
    return places, end


def with_fences(code: resident.Code) -> resident.Code:
    """The same program, which forbids itself its fences."""
    text = "void __asan_poison_memory_region(void const volatile *, unsigned long);\n" + code.source
    forbid = "".join(f"    __asan_poison_memory_region(A + {at}, {size});\n" for at, size in _fences)
    text, count = re.subn(r"^void member\(.*\{\n", lambda found: found[0] + forbid, text, flags=re.MULTILINE)
    assert count == 1
    return replace(code, source=text)


def main(numbers: Sequence[int]) -> None:
    step.memory = fenced
    for number in numbers:
        drawn = net(number)
        beside = Beside(drawn.jobs)
        codes: dict[int, resident.Code] = {}
        for chunk in beside.chunks():
            beside.take_traced(chunk)
            if chunk.size not in codes:
                codes[chunk.size] = with_fences(beside.code(chunk.size))
            assert launch.bound(codes[chunk.size], beside.made).run(chunk.steps, threads=2) == {}
        assert faults_of(beside, drawn.double) == [], str(drawn)
        beside.close()
        print("clean", number, flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
