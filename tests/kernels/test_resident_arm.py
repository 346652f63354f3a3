"""The generated code for another processor: compiled for arm64, run by an emulator, with the same numbers within rounding."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from resident_beside import Beside, faults_of
from resident_nets import net

from carpool.adapters.torch.launch import table_of
from carpool.adapters.torch.resident import Code
from carpool.kernels.resident.launching import LAUNCHES
from carpool.machine import targets
from carpool.machine.compilers import OPTIMISE
from carpool.processor import Processor
from patience import PATIENCE_S

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
MISSING = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]

MAIN = """
#include <stdio.h>

static void *held(i8 bytes) { return aligned_alloc(4096, (bytes / 4096 + 2) * 4096); }

/* A file of numbers: tensors, rows, begin, steps, bytes of memory; then for each tensor its bytes, its stride and itself. */
int main(int count, char **given) {
    FILE *file = fopen(given[1], "r+b");
    i8 said[5], sizes[256];
    if (count < 2 || !file || fread(said, 8, 5, file) != 5) return 1;
    Tensor tensors[256];
    for (i8 t = 0; t < said[0]; ++t) {
        i8 about[2];
        if (fread(about, 8, 2, file) != 2) return 2;
        tensors[t] = (Tensor){held(about[0]), about[1], 0};
        sizes[t] = about[0];
        if ((i8)fread(tensors[t].base, 1, sizes[t], file) != sizes[t]) return 3;
    }
    i8 rows[64], faults[64];
    u1 active[64], halted[64] = {0};
    for (i8 row = 0; row < said[1]; ++row) rows[row] = row, faults[row] = -1, active[row] = 1;
    Segment segment = {member, {tensors, active, faults, said[2], said[2], said[3], 0, 0, said[1]}, 0};
    Block block = {&segment, 1, 1, 0};
    launch(&(Launch){&block, 1, 0, rows, said[1], halted, held(2 * said[4]), said[4], 2, 0});
    for (i8 row = 0; row < said[1]; ++row) if (faults[row] >= 0) return 4;
    rewind(file);
    for (i8 t = 0; t < said[0]; ++t) fwrite(tensors[t].base, 1, sizes[t], file);
    return fclose(file);
}
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.parametrize("number", [0, 5, 7, 13, 29, 31, 35, 58])
def test_nets_train_on_another_processor(number: int, tmp_path: Path):
    drawn = net(number)
    beside = Beside(drawn.jobs, targets.vector_bytes(Processor("arm64")))
    for chunk in beside.chunks():
        beside.take_traced(chunk)
        run_elsewhere(beside.code(chunk.size), beside.made, chunk.steps, tmp_path)
        beside.made["k"].add_(chunk.steps)
    assert faults_of(beside, drawn.double) == [], str(drawn)


def run_elsewhere(code: Code, tensors: dict[str, torch.Tensor], steps: int, folder: Path) -> None:
    """Takes the steps of all rows in the emulator, and brings back what it changed."""
    program = folder / f"program{code.size}"
    if not program.exists():
        source = program.with_suffix(".c")
        source.write_text(code.source + LAUNCHES + MAIN)
        command = [
            COMPILER,
            *OPTIMISE,
            "-march=armv8-a",
            "-static",
            "-pthread",
            str(source),
            "-o",
            str(program),
            "-lm",
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
    members = len(tensors["active"])
    room = -(-code.memory_bytes // 4096) * 4096
    given = [code.held.get(name, tensors.get(name)) for name in code.tensors]
    strides = table_of(code, tensors)["stride"]
    file = folder / "tensors"
    with file.open("wb") as out:
        out.write(struct.pack("5q", len(given), members, int(tensors["k"]), steps, room))
        for tensor, stride in zip(given, strides, strict=True):
            assert tensor is not None
            out.write(struct.pack("2q", tensor.nbytes, int(stride)) + tensor.contiguous().numpy().tobytes())
    subprocess.run([EMULATOR, str(program), str(file)], check=True, capture_output=True, timeout=PATIENCE_S)
    held, at = file.read_bytes(), 0
    for tensor in given:
        assert tensor is not None
        own = np.frombuffer(held, np.uint8, tensor.nbytes, at).copy()
        at += tensor.nbytes
        tensor.copy_(torch.from_numpy(own).view(tensor.dtype).view(tensor.shape))
