"""What the machine says about itself, read once into a frozen value. Imports no framework."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pynvml

from carpool import machine
from carpool.machine import kept
from carpool.memory import device
from carpool.memory.enforce import Begun, begun
from carpool.processor import cores

FRAMEWORKS = ("torch", "jax", "keras", "tensorflow")
_PREFIXES = ("CUDA_", "OMP_", "XLA_", "TF_", "PYTORCH_", "TORCH")


@dataclass(frozen=True)
class Environment:
    """A machine and its settings at one moment; `variables` are the environment variables that matter here."""

    python: str
    carpool: str
    cores: int
    frameworks: Mapping[str, str | None]
    gpus: tuple[device.DeviceMemory, ...] = ()
    torch_cuda: str | None = None
    jax_cuda: str | None = None
    """Of JAX's plugin for GPUs, which is a package of its own."""
    tensorflow_cuda: str | None = None
    driver_cuda: str | None = None
    compiler: str | None = None
    machine_code: str | None = None
    """The compiler that makes machine code of C, as it calls itself."""
    no_machine_code: str | None = None
    """Why there is none, and what to do."""
    programs: int = 0
    """How many programs of machine code are kept on disk."""
    mps_control: str | None = None
    mps_running: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    begun: Begun = field(default_factory=Begun)
    """What the frameworks of this process have begun."""
    load: float | None = None
    """How many processes wanted a core on average over the last minute; None where the system does not tell."""
    gpu_processes: tuple[int | None, ...] = ()
    """How many other processes compute on each GPU; None where the driver does not tell."""


def read() -> Environment:
    """This machine, now."""
    maker = machine.compiler()
    return Environment(
        python=platform.python_version(),
        carpool=_version("carpool") or "not installed (run from its source)",
        cores=cores(),
        frameworks={name: _provided(name) for name in FRAMEWORKS},
        gpus=device.gpus(),
        torch_cuda=_cuda("torch", "version.py", cuda_of),
        jax_cuda=_jax_cuda(),
        tensorflow_cuda=_cuda("tensorflow", "python/platform/build_info.py", tensorflow_cuda_of),
        driver_cuda=_driver_cuda(),
        compiler=_compiler(),
        machine_code=maker and maker.name,
        no_machine_code=machine.unavailable(),
        programs=kept.count(),
        mps_control=shutil.which("nvidia-cuda-mps-control"),
        mps_running=mps_runs(Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")),
        variables={name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)},
        begun=begun(),
        load=load(),
        gpu_processes=device.other_processes(),
    )


def mps_runs(pipes: Path) -> bool:
    """Whether the MPS control daemon that owns this folder is alive."""
    try:
        process = int((pipes / "nvidia-cuda-mps-control.pid").read_text())
        os.kill(process, 0)
    except PermissionError:
        return True  # it lives, as another user
    except (OSError, ValueError):
        return False
    return True


def cuda_of(version_file: str) -> str | None:
    """The CUDA version in the text of torch's version.py.

    >>> cuda_of("cuda: Optional[str] = '13.0'"), cuda_of("cuda: Optional[str] = None")
    ('13.0', None)
    """
    found = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", version_file, re.MULTILINE)
    return found.group(1) if found else None


def tensorflow_cuda_of(build_file: str) -> str | None:
    """The CUDA version in the text of TensorFlow's build_info.py.

    >>> tensorflow_cuda_of("build_info = {'cuda_version': '12.5.1', 'is_cuda_build': True}")
    '12.5.1'
    """
    found = re.search(r"""['"]cuda_version['"]\s*[,:]\s*['"](\d[\d.]*)['"]""", build_file)
    return found.group(1) if found else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _provided(framework: str) -> str | None:
    """The version of a framework, whatever the package that provides it is called: TensorFlow for CPUs alone is tensorflow-cpu."""
    if (found := _version(framework)) is not None:
        return found
    if importlib.util.find_spec(framework) is None:
        return None
    packages = metadata.packages_distributions().get(framework, ())
    return next((f"{_version(name)} ({name})" for name in packages), "of unknown version")


def load() -> float | None:
    """The load average of the last minute."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def _compiler() -> str | None:
    wanted = (os.environ.get("CXX") or "g++", "g++", "clang++")
    return next((path for name in wanted if (path := shutil.which(name))), None)


def _cuda(package: str, file: str, reading: Callable[[str], str | None]) -> str | None:
    """The CUDA that a package was built for, from a file of it."""
    spec = importlib.util.find_spec(package)  # finds the package without running it
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / file
    return reading(path.read_text()) if path.exists() else None


def _jax_cuda() -> str | None:
    """The name of JAX's plugin says its CUDA."""
    return next((major for major in ("13", "12") if _version(f"jax-cuda{major}-plugin")), None)


def _driver_cuda() -> str | None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return f"{number // 1000}.{number % 1000 // 10}"
