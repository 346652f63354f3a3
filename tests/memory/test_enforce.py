"""A policy set in this process, with frameworks that have begun, and those that have not."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import carpool
from carpool.errors import OptionError, TooLateError
from carpool.memory import device, enforce
from carpool.memory.device import DeviceMemory
from carpool.memory.enforce import Begun, too_late
from carpool.memory.policy import Policy
from carpool.memory.size import Limit
from patience import PATIENCE_S

GIB = 1 << 30
QUARTER = Policy(Limit(share=0.25))
SHAPE = r"^Expected .+\. Received: .+\. Remedy: .+\.$"


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment of the test's own, without the variables in question."""
    prefixes = ("XLA_", "TF_", "PYTORCH_", "CUDA_")
    made = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    monkeypatch.setattr(os, "environ", made)
    return made


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> DeviceMemory:
    made = DeviceMemory("H200", 80 * GIB, 70 * GIB)
    monkeypatch.setattr(device, "gpus", lambda: (made,))
    monkeypatch.setattr(device, "read", lambda name: made)
    return made


def put(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> ModuleType:
    """A module of this name, as if it had been imported."""
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class Calls:
    """torch.cuda or tf.config, noting what is called."""

    def __init__(self, **answers: Any) -> None:
        self.made: list[tuple[Any, ...]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if name not in self._answers:
                self.made.append((name, *arguments, *options.values()))
            return self._answers.get(name)

        return call


def begin_torch(
    monkeypatch: pytest.MonkeyPatch, reserved: int, initialised: bool = True, gpus: int = 1
) -> Calls:
    cuda = Calls(
        is_initialized=initialised,
        is_available=True,
        device_count=gpus,
        memory_reserved=reserved,
        current_device=0,
        get_device_properties=SimpleNamespace(total_memory=80 * GIB),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    return cuda


def tensorflow(monkeypatch: pytest.MonkeyPatch, handle: object) -> Calls:
    config = Calls(list_physical_devices=["gpu"], LogicalDeviceConfiguration="a logical device")
    put(monkeypatch, "tensorflow", config=config)
    put(monkeypatch, "tensorflow.python.eager.context", _context=SimpleNamespace(_context_handle=handle))
    return config


def test_variables_are_set_for_this_process(environ: dict[str, str], gpu: DeviceMemory):
    carpool.limit_memory("20GiB")
    assert environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.250000"
    assert environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"


def test_without_growth_frameworks_take_theirs_at_the_start(environ: dict[str, str]):
    carpool.limit_memory(growth=False)
    assert environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    assert "PYTORCH_ALLOC_CONF" not in environ


def test_what_is_no_size_is_refused(environ: dict[str, str]):
    with pytest.raises(OptionError, match="12 bananas"):
        carpool.limit_memory("12 bananas")
    assert "TF_FORCE_GPU_ALLOW_GROWTH" not in environ


def test_nothing_is_imported_to_ask():
    code = (
        "import sys, carpool; carpool.limit_memory('25%')\n"
        "sys.exit(', '.join({'torch', 'jax', 'tensorflow'} & set(sys.modules)) or None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


# In the process


def test_an_imported_torch_is_limited_by_a_call(monkeypatch: pytest.MonkeyPatch, gpu: DeviceMemory):
    cuda = begin_torch(monkeypatch, reserved=0, initialised=False)
    carpool.limit_memory("20GiB")
    assert cuda.made == [("set_per_process_memory_fraction", 0.25, 0)]


def test_a_torch_that_holds_less_than_the_limit_can_still_be_limited(
    monkeypatch: pytest.MonkeyPatch, gpu: DeviceMemory
):
    cuda = begin_torch(monkeypatch, reserved=19 * GIB)
    carpool.limit_memory("25%")
    assert cuda.made == [("set_per_process_memory_fraction", 0.25, 0)]


def test_growth_alone_does_not_initialise_torch(monkeypatch: pytest.MonkeyPatch, gpu: DeviceMemory):
    cuda = begin_torch(monkeypatch, reserved=0, initialised=False)
    carpool.limit_memory()
    assert cuda.made == []


def test_an_imported_tensorflow_is_given_logical_devices(monkeypatch: pytest.MonkeyPatch, gpu: DeviceMemory):
    config = tensorflow(monkeypatch, handle=None)
    carpool.limit_memory("20GiB")
    assert config.made == [("set_logical_device_configuration", "gpu", ["a logical device"])]


@pytest.mark.parametrize("growth", [True, False])
def test_an_imported_tensorflow_grows_or_does_not(
    monkeypatch: pytest.MonkeyPatch, gpu: DeviceMemory, growth: bool
):
    config = tensorflow(monkeypatch, handle=None)
    carpool.limit_memory(growth=growth)
    assert config.made == [("set_memory_growth", "gpu", growth)]


# Too late


def test_too_late_for_jax(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], gpu: DeviceMemory):
    put(monkeypatch, "jax._src.xla_bridge", _backends={"cpu": 1, "cuda": 2})
    with pytest.raises(TooLateError, match=SHAPE) as caught:
        carpool.limit_memory("25%")
    assert "JAX has started cuda" in str(caught.value)
    assert "before the first use of jax" in str(caught.value)
    assert "TF_FORCE_GPU_ALLOW_GROWTH" not in environ, "nothing is set"


@pytest.mark.parametrize("backends", [{}, {"cpu": 1}])
def test_a_jax_without_a_gpu_is_never_too_late(monkeypatch: pytest.MonkeyPatch, backends: dict[str, int]):
    put(monkeypatch, "jax._src.xla_bridge", _backends=backends)
    carpool.limit_memory("25%")


def test_the_real_jax_is_looked_into():
    """Its table of backends is where we look: empty before the first use, filled after it."""
    pytest.importorskip("jax")
    code = (
        "import sys, jax; from jax._src import xla_bridge; from carpool.memory import enforce\n"
        "assert xla_bridge._backends == {}; jax.devices(); assert set(xla_bridge._backends) == {'cpu'}\n"
        "xla_bridge._backends['cuda'] = xla_bridge._backends['cpu']; print(enforce.begun().jax)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.stdout.strip() == "('cuda',)", ran.stderr


def test_too_late_for_tensorflow(monkeypatch: pytest.MonkeyPatch, gpu: DeviceMemory):
    config = tensorflow(monkeypatch, handle=object())
    with pytest.raises(TooLateError, match=r"TensorFlow has initialised.+before import tensorflow"):
        carpool.limit_memory("25%")
    assert config.made == []


def test_too_late_for_a_torch_that_holds_more(monkeypatch: pytest.MonkeyPatch, gpu: DeviceMemory):
    cuda = begin_torch(monkeypatch, reserved=21 * GIB)
    with pytest.raises(TooLateError, match=SHAPE) as caught:
        carpool.limit_memory("20GiB")
    assert "limit of 20.0 GiB" in str(caught.value)
    assert "21.0 GiB reserved" in str(caught.value)
    assert cuda.made == []


def test_visible_devices_changed_after_cuda_began(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]):
    monkeypatch.setattr(enforce, "_is_visible_changed", lambda: "CUDA_VISIBLE_DEVICES" in environ)
    monkeypatch.setattr(device, "gpus", lambda: (DeviceMemory("a", GIB, GIB),) * 4)
    monkeypatch.setattr(device, "read", lambda name: DeviceMemory("a", GIB, GIB))
    begin_torch(monkeypatch, reserved=0, gpus=4)
    carpool.limit_memory()
    environ["CUDA_VISIBLE_DEVICES"] = "1"
    with pytest.raises(
        TooLateError, match=r"'1', which shows 1 .+ torch has initialised 4.+before import torch"
    ):
        carpool.limit_memory()


def test_partitioned_gpus_that_cuda_counts_otherwise_are_not_a_change(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "gpus", lambda: (DeviceMemory("a", GIB, GIB),) * 4)
    monkeypatch.setattr(device, "read", lambda name: DeviceMemory("a", GIB, GIB))
    monkeypatch.setattr(enforce, "_is_visible_changed", lambda: False)
    begin_torch(monkeypatch, reserved=0, gpus=1)
    carpool.limit_memory()


@pytest.mark.parametrize(
    ("began", "now", "changed"), [(None, None, False), ("0", "0", False), ("0", "1", True)]
)
def test_a_change_is_seen_against_what_the_process_began_with(
    began: str | None, now: str | None, changed: bool
):
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    code = (
        f"import os; os.environ.update({{'CUDA_VISIBLE_DEVICES': {now!r}}} if {now!r} else {{}})\n"
        "from carpool.memory import enforce; print(enforce.begun().is_visible_changed)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | ({"CUDA_VISIBLE_DEVICES": began} if began else {}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.stdout.strip() == str(changed), ran.stderr


def test_what_has_not_begun_is_not_too_late():
    assert too_late(Begun(), QUARTER, 80 * GIB, None, 1) is None
    assert too_late(Begun(torch_bytes=20 * GIB, torch_gpus=1), QUARTER, 80 * GIB, "0", 1) is None
    assert too_late(Begun(torch_bytes=21 * GIB, torch_gpus=1), Policy(), 80 * GIB, "0", 1) is None


def test_this_process_has_begun_nothing():
    if torch.cuda.is_initialized():
        pytest.skip("another test has initialised CUDA")
    assert enforce.begun() == Begun()
