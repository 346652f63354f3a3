"""CUDA C compiled where it runs, by the compiler that comes with torch (NVRTC): it needs no toolkit."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch


def compiled(source: str, names: Sequence[str]) -> dict[str, Any]:
    """The kernels of these names for the current device, and for no other; RuntimeError where there is no such compiler.

    A kernel is launched on the current stream: `kernel(grid=, block=, args=, shared_mem=)`.
    """
    try:
        from torch.cuda._utils import _cuda_load_module, _get_gpu_rtc_library

        compiler = _get_gpu_rtc_library()
    except (ImportError, AttributeError, OSError) as error:  # another torch than those this was written for
        raise RuntimeError("this torch has no compiler for CUDA C") from error
    torch.zeros(
        1, device="cuda"
    )  # a thread has the device's context, which loading needs, from its first launch on
    return _cuda_load_module(_machine_code(compiler, source), list(names))  # type: ignore[return-value]


def _machine_code(compiler: ctypes.CDLL, source: str) -> bytes:
    """`torch.cuda._compile_kernel` would look for a toolkit's headers, which few machines have."""
    major, minor = torch.cuda.get_device_capability()
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture=sm_{major}{minor}".encode())
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _sound(compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"carpool.cu", 0, None, None))
    try:
        _sound(compiler.nvrtcCompileProgram(program, 1, options))
        _sound(compiler.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _sound(compiler.nvrtcGetCUBIN(program, code))
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def _sound(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC answered {status}")
