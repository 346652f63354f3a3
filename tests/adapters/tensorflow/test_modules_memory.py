"""TensorFlow's memory: what is set before it starts, what is told, and what comes too late. On a GPU none of this was tried."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from subprocesses import run
from test_modules_train import job

import carpool
from carpool.adapters.tensorflow import memory
from carpool.adapters.tensorflow.memory import LIMIT, Cap
from carpool.adapters.tensorflow.train import TensorFlowAdapter
from carpool.errors import TooLateError
from carpool.memory.enforce import Begun, visible_changed_late

GIB = 1 << 30


class Gpus:
    """TensorFlow's own settings of two GPUs that are not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.set: dict[str, Any] = {}
        monkeypatch.setattr(memory, "gpus", lambda: ["first", "second"])
        monkeypatch.setattr(tf.config, "set_logical_device_configuration", self.set.__setitem__)
        monkeypatch.setattr(tf.config, "get_logical_device_configuration", self.set.get)
        monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: False)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


@pytest.fixture
def unstarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "is_started", lambda: False)
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)


def test_a_limit_is_a_logical_device_on_each_gpu(two_gpus, unstarted, monkeypatch):
    monkeypatch.setenv(LIMIT, str(3 * GIB))
    memory.begin()
    assert {gpu: made[0].memory_limit for gpu, made in two_gpus.set.items()} == {
        "first": 3072,
        "second": 3072,
    }
    assert memory.caps() == (Cap("GPU:0", 3 * GIB, False), Cap("GPU:1", 3 * GIB, False))


def test_without_a_word_memory_is_taken_as_it_is_needed(two_gpus, unstarted, monkeypatch):
    memory.begin()
    assert two_gpus.set == {}
    assert [str(cap) for cap in memory.caps()] == ["GPU:0 as it is needed", "GPU:1 as it is needed"]
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    memory.begin()  # who has said it is obeyed
    assert str(memory.caps()[0]) == "GPU:0 all of it at once"


def test_a_limit_that_comes_too_late(two_gpus, monkeypatch):
    monkeypatch.setattr(memory, "is_started", lambda: True)
    with pytest.raises(TooLateError, match=r"(?s)not to be initialised.*before the first tensor"):
        memory.limit(GIB)
    monkeypatch.setenv(LIMIT, str(GIB))
    with pytest.raises(TooLateError, match=r"(?s)start with at most 1.0 GiB.*GPU:0"):
        memory.begin()
    two_gpus.set.update({gpu: [SimpleNamespace(memory_limit=512)] for gpu in ("first", "second")})
    memory.begin()  # it is kept already


def test_a_worker_is_told_what_its_jobs_may_take():
    adapter = TensorFlowAdapter()
    with_budget = [job(budget="4GiB"), job(budget="2GiB", name="b")]
    assert adapter.environment(with_budget) == {LIMIT: str(5 * GIB)}  # without what a CUDA context takes
    assert adapter.environment([*with_budget, job(name="c")]) == {}


def test_the_plan_lists_each_cap(two_gpus, unstarted, monkeypatch):
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    two_gpus.set["first"] = [SimpleNamespace(memory_limit=1024)]
    text = carpool.plan([job(budget="4GiB")], device="cpu").explain()
    assert "GPU:0 at most 1.0 GiB, GPU:1 all of it at once, in a process of its own at most 4.0 GiB" in text


def test_visible_gpus_changed_after_tensorflow_had_looked():
    had_four = Begun(tensorflow_gpus=4, is_visible_changed=True)
    told = visible_changed_late(had_four, "1", 4)
    assert told is not None
    assert "when tensorflow initialised CUDA" in told
    assert "'1', which shows 1 of the machine's GPUs, while tensorflow has initialised 4" in told
    assert "before import tensorflow" in told
    assert visible_changed_late(Begun(tensorflow_gpus=1, is_visible_changed=True), "1", 4) is None
    assert visible_changed_late(Begun(tensorflow_gpus=4), "1", 4) is None


def test_a_change_that_comes_too_late_stops_the_run(monkeypatch):
    monkeypatch.setattr(memory, "begun", lambda: Begun(tensorflow_gpus=4, is_visible_changed=True))
    with pytest.raises(TooLateError, match="before import tensorflow"):
        carpool.train([job()], device="cpu", reporters=[])


@pytest.mark.slow
def test_nothing_starts_to_ask():
    """In a fresh process: a limit is set while TensorFlow is imported and has not started, and kept when it has."""
    said = run(
        """
        import tensorflow as tf
        from carpool.adapters.tensorflow import memory
        from carpool.memory.enforce import begun
        assert not memory.is_started() and not begun().tensorflow
        memory.limit(1 << 30)
        memory.begin()
        assert not memory.is_started()
        [cpu] = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
        memory.begin()
        assert len(tf.config.list_logical_devices("CPU")) == 3 and memory.is_started()
        try:
            memory.limit(1 << 30)
        except Exception as error:
            print(type(error).__name__, error)
        """
    )
    assert said.startswith("TooLateError Expected TensorFlow's devices not to be initialised")


def test_a_capped_job_runs_in_a_worker_of_its_own():
    def show(model: Any, batch: Any) -> Any:
        import os

        from modules_zoo import loss

        return {"loss": loss(model(batch[0]), batch[1]), "limit": float(os.environ.get(LIMIT, "0"))}

    [result] = carpool.train(
        [job(budget="3GiB", loss=None, step=show, epochs=1, timeout_s=100)], device="cpu", reporters=[]
    )
    assert result.strategy == "isolated"
    assert result.history["limit"] == (2.0 * GIB,)
