"""The doctor: each check over an environment made up for it, and the real one read without a framework."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from carpool import environment
from carpool.doctor import NOTE, OK, PROBLEM, Finding, examine
from carpool.environment import Environment, cuda_of, mps_runs, read, tensorflow_cuda_of
from carpool.memory import device
from carpool.memory.device import DeviceMemory
from carpool.memory.enforce import Begun

GIB = 1 << 30
NO_FRAMEWORK = {"torch": None, "jax": None, "keras": None, "tensorflow": None}
CPU_ONLY = Environment("3.12.1", "0.1", 8, NO_FRAMEWORK | {"torch": "2.13.0"}, compiler="/usr/bin/g++")
WITH_GPU = replace(
    CPU_ONLY,
    gpus=(DeviceMemory("H200", 140 * GIB, 139 * GIB),),
    torch_cuda="13.0",
    driver_cuda="13.1",
    variables={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
)


def found(environment: Environment, subject: str) -> Finding | None:
    return next((finding for finding in examine(environment) if finding.subject == subject), None)


def state(environment: Environment, subject: str) -> str | None:
    finding = found(environment, subject)
    return None if finding is None else finding.state


def with_variables(environment: Environment, **variables: str) -> Environment:
    return replace(environment, variables={**environment.variables, **variables})


@pytest.mark.parametrize("environment", [CPU_ONLY, WITH_GPU], ids=["cpu", "gpu"])
def test_a_sound_machine_has_no_problem(environment: Environment) -> None:
    assert [finding for finding in examine(environment) if finding.state == PROBLEM] == []


def test_frameworks_are_listed_and_torch_is_needed() -> None:
    assert found(CPU_ONLY, "torch") == Finding("torch", OK, "2.13.0")
    assert found(CPU_ONLY, "jax") == Finding("jax", NOTE, "not installed")
    assert state(replace(CPU_ONLY, frameworks=NO_FRAMEWORK), "frameworks") == PROBLEM


def test_a_gpu_that_others_fill_is_noted() -> None:
    full = replace(WITH_GPU, gpus=(DeviceMemory("H200", 140 * GIB, 10 * GIB),))
    assert found(full, "GPU 0") == Finding(
        "GPU 0", NOTE, "H200, 10.0 of 140.0 GiB free; another process holds the rest"
    )
    assert state(WITH_GPU, "GPU 0") == OK
    assert state(CPU_ONLY, "GPU") == NOTE


@pytest.mark.parametrize(
    ("build", "driver", "expected"),
    [
        ("13.0", "13.1", OK),
        ("13.2", "13.0", OK),
        ("13.0", "12.8", PROBLEM),
        (None, "13.0", PROBLEM),
        ("13.0", None, NOTE),
    ],
)
def test_torch_and_driver_must_agree(build: str | None, driver: str | None, expected: str) -> None:
    assert state(replace(WITH_GPU, torch_cuda=build, driver_cuda=driver), "torch CUDA") == expected


@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
@pytest.mark.parametrize(
    ("build", "driver", "expected"),
    [
        ("12.5.1", "13.1", OK),
        ("13", "13.1", OK),
        ("13", "12.8", PROBLEM),
        (None, "13.0", NOTE),
        ("13", None, NOTE),
    ],
)
def test_the_other_frameworks_and_the_driver_must_agree_too(
    framework: str, build: str | None, driver: str | None, expected: str
) -> None:
    installed = replace(
        WITH_GPU,
        frameworks={**WITH_GPU.frameworks, framework: "1.0"},
        driver_cuda=driver,
        jax_cuda=build,
        tensorflow_cuda=build,
    )
    subject = {"jax": "JAX CUDA", "tensorflow": "TensorFlow CUDA"}[framework]
    assert state(installed, subject) == expected
    assert state(replace(installed, gpus=()), subject) is None
    assert state(WITH_GPU, subject) is None


def test_no_compiler_is_a_problem_on_the_cpu_only() -> None:
    assert state(replace(CPU_ONLY, compiler=None), "C++ compiler") == PROBLEM
    assert state(replace(WITH_GPU, compiler=None), "C++ compiler") == NOTE


def test_what_makes_machine_code_is_told_in_one_line() -> None:
    here = replace(CPU_ONLY, machine_code="cc (Debian 12.2.0) 12.2.0", programs=37)
    assert found(here, "machine code") == Finding(
        "machine code", OK, "cc (Debian 12.2.0) 12.2.0, 37 programs kept"
    )
    one = found(replace(here, programs=1), "machine code")
    assert one is not None
    assert one.text.endswith("1 program kept")
    without = replace(CPU_ONLY, no_machine_code="there is no C compiler (cc): install gcc")
    assert found(without, "machine code") == Finding(
        "machine code", NOTE, "none: there is no C compiler (cc): install gcc"
    )


def test_mps_is_told_where_there_is_a_gpu() -> None:
    assert found(CPU_ONLY, "CUDA MPS") is None
    assert state(WITH_GPU, "CUDA MPS") == NOTE
    ready = replace(WITH_GPU, mps_control="/usr/bin/nvidia-cuda-mps-control", mps_running=True)
    assert found(ready, "CUDA MPS") == Finding("CUDA MPS", OK, "/usr/bin/nvidia-cuda-mps-control, running")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", PROBLEM),
        ("0", OK),
        ("GPU-8a2f", OK),
        ("-1", PROBLEM),
        ("1", PROBLEM),
        ("0,0", PROBLEM),
        ("zero", PROBLEM),
    ],
)
def test_odd_visible_devices_are_said(value: str, expected: str) -> None:
    assert state(with_variables(WITH_GPU, CUDA_VISIBLE_DEVICES=value), "CUDA_VISIBLE_DEVICES") == expected


def test_visible_devices_matter_less_without_a_gpu() -> None:
    assert state(with_variables(CPU_ONLY, CUDA_VISIBLE_DEVICES=""), "CUDA_VISIBLE_DEVICES") == NOTE
    assert state(CPU_ONLY, "CUDA_VISIBLE_DEVICES") is None


@pytest.mark.parametrize(("value", "expected"), [("4", OK), ("8", OK), ("9", PROBLEM), ("many", NOTE)])
def test_more_threads_than_cores_are_said(value: str, expected: str) -> None:
    assert state(with_variables(CPU_ONLY, OMP_NUM_THREADS=value), "OMP_NUM_THREADS") == expected


def test_frameworks_that_take_the_whole_gpu_are_noted() -> None:
    both = replace(WITH_GPU, frameworks={**WITH_GPU.frameworks, "jax": "0.10", "tensorflow": "2.20"})
    assert state(both, "JAX memory") == state(both, "TensorFlow memory") == NOTE
    tamed = with_variables(both, XLA_PYTHON_CLIENT_PREALLOCATE="false", TF_FORCE_GPU_ALLOW_GROWTH="true")
    assert state(tamed, "JAX memory") is None
    assert state(tamed, "TensorFlow memory") is None
    assert state(replace(both, gpus=()), "JAX memory") is None


def test_settings_with_two_names_must_agree() -> None:
    jax = replace(WITH_GPU, frameworks={**WITH_GPU.frameworks, "jax": "0.10"})
    both = with_variables(jax, XLA_CLIENT_MEM_FRACTION="0.5", XLA_PYTHON_CLIENT_MEM_FRACTION="0.5")
    assert state(both, "XLA_CLIENT_MEM_FRACTION") == PROBLEM
    assert state(with_variables(jax, XLA_CLIENT_MEM_FRACTION="0.5"), "XLA_CLIENT_MEM_FRACTION") is None
    same = with_variables(WITH_GPU, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert state(same, "PYTORCH_ALLOC_CONF") is None
    assert state(with_variables(WITH_GPU, PYTORCH_CUDA_ALLOC_CONF="x:1"), "PYTORCH_ALLOC_CONF") == PROBLEM


@pytest.mark.parametrize(
    ("begun", "subject", "expected", "said"),
    [
        (Begun(), "memory policy", None, ""),
        (Begun(jax=("cuda",)), "memory policy", NOTE, "before the first use of jax"),
        (Begun(tensorflow=True), "memory policy", NOTE, "before import tensorflow"),
        (Begun(torch_gpus=1), "memory policy", NOTE, "current device only"),
        (Begun(torch_gpus=4, is_visible_changed=True), "visible GPUs", PROBLEM, "torch has initialised 4"),
        (Begun(torch_gpus=4), "visible GPUs", None, ""),
    ],
)
def test_what_comes_too_late_in_this_process_is_said(
    begun: Begun, subject: str, expected: str | None, said: str
) -> None:
    environment = replace(WITH_GPU, begun=begun)
    assert state(environment, subject) == expected
    assert said in getattr(found(environment, subject), "text", "")
    assert state(replace(environment, gpus=()), subject) is None


def test_torch_settings_that_cost_are_said() -> None:
    assert state(replace(WITH_GPU, variables={}), "PYTORCH_ALLOC_CONF") == NOTE
    assert state(WITH_GPU, "PYTORCH_ALLOC_CONF") is None
    assert state(replace(WITH_GPU, variables={"PYTORCH_CUDA_ALLOC_CONF": "x"}), "PYTORCH_ALLOC_CONF") is None
    assert state(with_variables(WITH_GPU, CUDA_LAUNCH_BLOCKING="1"), "CUDA_LAUNCH_BLOCKING") == PROBLEM
    assert state(with_variables(WITH_GPU, CUDA_LAUNCH_BLOCKING="0"), "CUDA_LAUNCH_BLOCKING") is None
    assert state(with_variables(CPU_ONLY, TORCHDYNAMO_DISABLE="1"), "TORCHDYNAMO_DISABLE") == PROBLEM


def test_cuda_is_read_from_torchs_version_file() -> None:
    assert (
        cuda_of("__all__ = ['cuda']\n__version__ = '2.13.0'\ncuda: Optional[str] = '12.8'\nhip = None\n")
        == "12.8"
    )
    assert cuda_of("cuda: Optional[str] = None\n") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "build_info = collections.OrderedDict([('cuda_version', '12.5.1'), ('is_cuda_build', True)])",
            "12.5.1",
        ),
        ('build_info = {"cuda_version": "12.5"}', "12.5"),
        ("build_info = {'is_cuda_build': False}", None),
    ],
)
def test_cuda_is_read_from_tensorflows_build_file(text: str, expected: str | None) -> None:
    assert tensorflow_cuda_of(text) == expected


def test_mps_runs_while_its_daemon_lives(tmp_path: Path) -> None:
    assert not mps_runs(tmp_path)
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text(f"{os.getpid()}\n")
    assert mps_runs(tmp_path)


def test_this_machine_is_read_without_importing_a_framework() -> None:
    code = (
        "import sys, carpool.environment as e, carpool.doctor as d\n"
        "env = e.read(); assert d.examine(env)\n"
        "assert not set(e.FRAMEWORKS) & set(sys.modules), set(e.FRAMEWORKS) & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert read().cores >= 1


# Busy machines, and packages of other names


@pytest.mark.parametrize(
    ("load", "cores", "expected"),
    [(0.2, 2, OK), (1.0, 1, OK), (1.6, 2, NOTE), (7.0, 2, NOTE), (5.0, 8, OK), (6.0, 8, NOTE)],
)
def test_a_busy_machine_is_noted(load: float, cores: int, expected: str) -> None:
    """The doctor says when a machine is busy: its load against its cores."""
    made = found(replace(CPU_ONLY, load=load, cores=cores), "CPU load")
    assert made is not None
    assert made.state == expected
    assert ("the machine is busy" in made.text) == (expected == NOTE)
    assert found(replace(CPU_ONLY, load=None), "CPU load") is None


@pytest.mark.parametrize(
    ("others", "text"), [(1, "another process computes on it"), (3, "3 other processes compute on it")]
)
def test_a_gpu_on_which_others_compute_is_noted(others: int, text: str) -> None:
    made = found(replace(WITH_GPU, gpu_processes=(others,)), "GPU 0 load")
    assert made is not None
    assert (made.state, made.text.startswith(text)) == (NOTE, True)
    assert found(replace(WITH_GPU, gpu_processes=(0,)), "GPU 0 load") is None
    assert found(replace(WITH_GPU, gpu_processes=(None,)), "GPU 0 load") is None


def test_other_processes_are_those_that_the_driver_lists_beside_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVML as a driver with one GPU would answer."""
    listed = [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=1)]
    for name, answer in {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetComputeRunningProcesses": listed,
    }.items():
        monkeypatch.setattr(device.pynvml, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(device, "_open", [])
    assert device.other_processes() == (1,)


def test_a_framework_is_known_by_whatever_package_provides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow for CPUs alone is a package named tensorflow-cpu."""

    def version(package: str) -> str:
        if package == "tensorflow":
            raise environment.metadata.PackageNotFoundError
        return "2.21.0"

    monkeypatch.setattr(environment.metadata, "version", version)
    monkeypatch.setattr(
        environment.metadata, "packages_distributions", lambda: {"tensorflow": ["tensorflow-cpu"]}
    )
    assert read().frameworks["tensorflow"] == "2.21.0 (tensorflow-cpu)"
    monkeypatch.setattr(environment.metadata, "packages_distributions", dict)
    assert read().frameworks["tensorflow"] == "of unknown version"
