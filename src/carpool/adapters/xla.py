"""How XLA compiles our programs: on a GPU a loop of steps as one graph of kernels, launched once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_WHOLE_LOOPS: Mapping[str, str | int] = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION",
    "xla_gpu_graph_min_graph_size": 1,
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}
"""A step of small models is a dozen kernels of a few microseconds: left to the host, launching them takes as long as running them."""


def options(platform: str) -> Mapping[str, str | int]:
    """What programs for this platform are compiled with. Whoever says anything about command buffers in XLA_FLAGS is left alone."""
    spoken_for = "command_buffer" in os.environ.get("XLA_FLAGS", "")
    return _WHOLE_LOOPS if platform in ("gpu", "cuda") and not spoken_for else {}


def compiled(lowered: Any, platform: str) -> Any:
    """The program, compiled with our options where XLA knows them."""
    wanted = options(platform)
    if not wanted:
        return lowered.compile()
    try:
        return lowered.compile(compiler_options=dict(wanted))
    except Exception:  # another version may name them otherwise; whatever else is wrong, this shows it
        return lowered.compile()
