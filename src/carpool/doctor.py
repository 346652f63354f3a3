"""What a machine has for carpool and what stands in the way: pure checks over an `Environment`.

Reading the environment lives in `environment.py`; nothing here asks the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from carpool.environment import Environment
from carpool.memory.device import DeviceMemory
from carpool.memory.enforce import too_late, visible_changed_late
from carpool.memory.policy import TORCH_NAMES, Policy

OK, NOTE, PROBLEM = "ok", "note", "problem"
_GIB = 1 << 30
_BUSY = 0.75  # of the cores: whoever comes beside that waits


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: `state` is "ok", "note" (worth knowing) or "problem"."""

    subject: str
    state: str
    text: str


def examine(environment: Environment) -> tuple[Finding, ...]:
    """Every finding about this environment, in the order to read them."""
    return tuple(finding for check in CHECKS for finding in check(environment))


def _versions(env: Environment) -> Iterator[Finding]:
    yield Finding("Python", OK, env.python)
    yield Finding("carpool", OK, env.carpool)
    yield Finding("CPU cores", OK, str(env.cores))


def _frameworks(env: Environment) -> Iterator[Finding]:
    for name, version in env.frameworks.items():
        yield Finding(name, OK if version else NOTE, version or "not installed")
    if not env.frameworks.get("torch"):
        yield Finding("frameworks", PROBLEM, "torch is the one carpool trains: pip install 'carpool[torch]'")


def _load(env: Environment) -> Iterator[Finding]:
    """The load counts this process too, so one core's worth says nothing."""
    if env.load is None:
        return
    text = f"{env.load:.1f} on {_cores(env.cores)}"
    if env.load > 1 and env.load >= _BUSY * env.cores:
        slow = "the machine is busy: what is timed now misleads, and runs take longer"
        yield Finding("CPU load", NOTE, f"{text}: {slow}")
    else:
        yield Finding("CPU load", OK, text)


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def _gpu_neighbours(env: Environment) -> Iterator[Finding]:
    for index, others in enumerate(env.gpu_processes):
        if others:
            word = "another process computes" if others == 1 else f"{others} other processes compute"
            yield Finding(
                f"GPU {index} load", NOTE, f"{word} on it: what is timed now misleads, and runs take longer"
            )


def _gpus(env: Environment) -> Iterator[Finding]:
    if not env.gpus:
        yield Finding("GPU", NOTE, "none seen; jobs run on the CPU")
    for index, gpu in enumerate(env.gpus):
        yield Finding(f"GPU {index}", *_gpu_memory(gpu))


def _gpu_memory(gpu: DeviceMemory) -> tuple[str, str]:
    text = f"{gpu.name}, {gpu.free_bytes / _GIB:.1f} of {gpu.total_bytes / _GIB:.1f} GiB free"
    if gpu.free_bytes < gpu.total_bytes / 2:
        return NOTE, text + "; another process holds the rest"
    return OK, text


def _cuda(env: Environment) -> Iterator[Finding]:
    """Whether each framework's CUDA is one that the driver can run. Without CUDA, only torch is a problem: we train it."""
    if not env.gpus:
        return
    if env.frameworks.get("torch"):
        absent = "torch was built without CUDA: install a CUDA build to use the GPU"
        yield _beside_driver("torch CUDA", env.torch_cuda, env.driver_cuda, (PROBLEM, absent))
    if env.frameworks.get("jax"):
        absent = "JAX has no plugin for CUDA, so it runs on the CPU: pip install 'jax[cuda13]' to use the GPU"
        yield _beside_driver("JAX CUDA", env.jax_cuda, env.driver_cuda, (NOTE, absent))
    if env.frameworks.get("tensorflow"):
        absent = "TensorFlow was built without CUDA: pip install 'tensorflow[and-cuda]' to use the GPU"
        yield _beside_driver("TensorFlow CUDA", env.tensorflow_cuda, env.driver_cuda, (NOTE, absent))


def _beside_driver(subject: str, build: str | None, driver: str | None, absent: tuple[str, str]) -> Finding:
    """Within a major version, drivers run newer minor ones too."""
    if build is None:
        return Finding(subject, *absent)
    if driver is None:
        return Finding(subject, NOTE, f"built for {build}; the driver does not say what it supports")
    if _major(build) > _major(driver):
        text = f"built for {build}, the driver supports up to {driver}: update the driver or install an older build"
        return Finding(subject, PROBLEM, text)
    return Finding(subject, OK, f"built for {build}, the driver supports up to {driver}")


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _compiler(env: Environment) -> Iterator[Finding]:
    if env.compiler:
        yield Finding("C++ compiler", OK, env.compiler)
    else:
        state = NOTE if env.gpus else PROBLEM
        yield Finding(
            "C++ compiler", state, "none found (g++, clang++): fused steps on the CPU cannot be compiled"
        )


def _machine_code(env: Environment) -> Iterator[Finding]:
    if env.machine_code:
        kept = "1 program" if env.programs == 1 else f"{env.programs} programs"
        yield Finding("machine code", OK, f"{env.machine_code}, {kept} kept")
    elif env.no_machine_code:
        yield Finding("machine code", NOTE, f"none: {env.no_machine_code}")


def _mps(env: Environment) -> Iterator[Finding]:
    if not env.gpus:
        return
    if env.mps_control is None:
        yield Finding(
            "CUDA MPS",
            NOTE,
            "nvidia-cuda-mps-control not found: processes of carpool exec take turns on the GPU",
        )
    else:
        yield Finding("CUDA MPS", OK, f"{env.mps_control}, {'running' if env.mps_running else 'not running'}")


def _visible_devices(env: Environment) -> Iterator[Finding]:
    value = env.variables.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return
    subject = "CUDA_VISIBLE_DEVICES"
    if not value.strip():
        state = PROBLEM if env.gpus else NOTE
        yield Finding(subject, state, "is set to nothing, which hides every GPU: unset it to see them")
    elif fault := _odd_devices(value, len(env.gpus)):
        yield Finding(subject, PROBLEM if env.gpus else NOTE, f"is {value!r}: {fault}")
    else:
        yield Finding(subject, OK, value)


def _odd_devices(value: str, gpus: int) -> str | None:
    parts = [part.strip() for part in value.split(",")]
    for part in parts:
        if part.startswith(("GPU-", "MIG-")):
            continue
        if not part.isdigit():
            return f"{part!r} is neither an index nor an identifier, so it and all after it are hidden"
        if int(part) >= gpus:
            return f"there is no GPU {part}, so it and all after it are hidden"
    if len(set(parts)) < len(parts):
        return "a GPU is named twice, which CUDA refuses"
    return None


def _threads(env: Environment) -> Iterator[Finding]:
    value = env.variables.get("OMP_NUM_THREADS")
    if value is None:
        return
    if not value.strip().isdigit():
        yield Finding("OMP_NUM_THREADS", NOTE, f"is {value!r}, which is not a number")
    elif int(value) > env.cores:
        yield Finding(
            "OMP_NUM_THREADS", PROBLEM, f"is {value} on {env.cores} cores: the threads wait for each other"
        )
    else:
        yield Finding("OMP_NUM_THREADS", OK, value)


def _preallocation(env: Environment) -> Iterator[Finding]:
    if not env.gpus:
        return
    kept = env.variables.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in ("true", "1")
    if env.frameworks.get("jax") and kept and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in env.variables:
        text = "JAX takes 75 % of the GPU when it starts: set XLA_PYTHON_CLIENT_PREALLOCATE=false to share it, or call carpool.limit_memory first"
        yield Finding("JAX memory", NOTE, text)
    grows = env.variables.get("TF_FORCE_GPU_ALLOW_GROWTH", "").lower() in ("true", "1")
    if env.frameworks.get("tensorflow") and not grows:
        text = "TensorFlow takes the whole GPU when it starts: set TF_FORCE_GPU_ALLOW_GROWTH=true to share it, or call carpool.limit_memory first"
        yield Finding("TensorFlow memory", NOTE, text)


def _policy_names(env: Environment) -> Iterator[Finding]:
    """Settings that have two names, where the two disagree."""
    newer, older = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    if env.frameworks.get("jax") and env.variables.get(newer) and env.variables.get(older):
        yield Finding(
            newer, PROBLEM, f"is set together with {older}, its older name, which JAX refuses: unset one"
        )
    said = [env.variables[name] for name in TORCH_NAMES if env.variables.get(name)]
    if env.frameworks.get("torch") and len(set(said)) > 1:
        text = f"is {said[0]!r} and {TORCH_NAMES[1]}, its older name, is {said[1]!r}: torch mixes the two; unset one"
        yield Finding(TORCH_NAMES[0], PROBLEM, text)


def _begun(env: Environment) -> Iterator[Finding]:
    """What of a memory policy, or of CUDA_VISIBLE_DEVICES, would come too late in this process."""
    if not env.gpus:
        return
    visible = env.variables.get("CUDA_VISIBLE_DEVICES")
    if changed := visible_changed_late(env.begun, visible, len(env.gpus)):
        yield Finding("visible GPUs", PROBLEM, changed)
    elif late := too_late(env.begun, Policy(), None, visible, len(env.gpus)):
        yield Finding("memory policy", NOTE, f"would come too late in this process. {late}")
    elif env.begun.torch_gpus is not None:
        text = "torch has initialised CUDA: carpool.limit_memory now limits its current device only, call it before import torch"
        yield Finding("memory policy", NOTE, text)


def _torch_settings(env: Environment) -> Iterator[Finding]:
    if not env.frameworks.get("torch"):
        return
    if env.gpus and not any(env.variables.get(name) for name in TORCH_NAMES):
        text = (
            "unset; expandable_segments:True wastes less memory when groups of unlike sizes follow each other"
        )
        yield Finding("PYTORCH_ALLOC_CONF", NOTE, text)
    for name, effect in _SLOWING.items():
        if env.variables.get(name, "0").lower() not in ("", "0", "false"):
            yield Finding(name, PROBLEM, f"is {env.variables[name]!r}, which {effect}: unset it")


_SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "makes every launch wait for the one before",
    "TORCH_COMPILE_DISABLE": "keeps fused steps from being compiled",
    "TORCHDYNAMO_DISABLE": "keeps fused steps from being compiled",
}

Examine = Callable[[Environment], Iterator[Finding]]
CHECKS: tuple[Examine, ...] = (
    _versions,
    _load,
    _frameworks,
    _gpus,
    _gpu_neighbours,
    _cuda,
    _compiler,
    _machine_code,
    _mps,
    _visible_devices,
    _threads,
    _preallocation,
    _policy_names,
    _begun,
    _torch_settings,
)


def table(findings: Sequence[Finding]) -> str:
    """The findings as aligned text.

    >>> print(table([Finding("Python", OK, "3.12.1"), Finding("GPU", NOTE, "none seen")]))
    ok    Python  3.12.1
    note  GPU     none seen
    """
    width = max(len(finding.subject) for finding in findings)
    state = max(len(finding.state) for finding in findings)
    return "\n".join(f"{f.state.ljust(state)}  {f.subject.ljust(width)}  {f.text}" for f in findings)
