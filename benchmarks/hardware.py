"""What the run ran on, in words that fit a table's caption; no names of machines."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import carpool

PACKAGES = ("torch", "triton", "jax", "jaxlib", "numpy", "tensorflow", "tensorflow-cpu")


def describe(device: str) -> dict[str, Any]:
    """CPU, cores and, when the device is one, the GPU."""
    found: dict[str, Any] = {"cpu": cpu_model(_cpuinfo()), "cores": _cores()}
    return found | (_gpu(device) if device.startswith("cuda") else {})


def versions() -> dict[str, str]:
    """Of Python, carpool and the packages that did the work."""
    found = {"python": platform.python_version(), "carpool": carpool.__version__, "source": source()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def source() -> str:
    """A word for the code of carpool and of the benchmarks that is here: what was measured by other code is another run."""
    digest = hashlib.sha256()
    for folder in (Path(carpool.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def cpu_model(cpuinfo: str) -> str:
    """The model name in the text of /proc/cpuinfo, or what Python knows.

    >>> cpu_model("processor : 0\\nmodel name : Fast CPU 3000\\n")
    'Fast CPU 3000'
    """
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def slug(hardware: dict[str, Any]) -> str:
    """A short word for file names.

    >>> slug({"cpu": "Fast", "gpu": "NVIDIA H200"}), slug({"cpu": "Fast"})
    ('h200', 'cpu')
    """
    name = str(hardware.get("gpu", "cpu")).lower().removeprefix("nvidia ")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpu(device: str) -> dict[str, Any]:
    import torch

    found = torch.cuda.get_device_properties(device)
    return {"gpu": found.name, "gpu_bytes": found.total_memory, "cuda": torch.version.cuda}
