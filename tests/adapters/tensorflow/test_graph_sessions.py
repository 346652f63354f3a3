"""Sessions in a loop of the user's own, and several models of one graph in one session."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import tensorflow as tf
from graph_zoo import DATA, builder, job, v1

import carpool
from carpool.adapters.graph.config import config, fraction_of, told
from carpool.errors import CarpoolError, ModelError
from carpool.memory import device
from carpool.memory.device import DeviceMemory
from carpool.tensorflow import Graph, run, sessions


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("carpool")}


def test_sessions_side_by_side_give_futures_and_train_as_alone():
    data = DATA["float32"]
    feed = {"x": data["x"], "y": data["y"]}

    def losses(names: str) -> dict[str, list[float]]:
        with sessions({name: builder("wide") for name in names}) as opened:
            asked: dict[str, list[Future[Any]]] = {name: [] for name in names}
            for _ in range(20):
                for name in names:
                    asked[name].append(opened[name].run_async(["train", "loss"], feed))
            return {name: [float(one.result()[1]) for one in each] for name, each in asked.items()}

    together, alone = losses("abc"), losses("a")
    assert together == dict.fromkeys("abc", alone["a"])
    assert alone["a"][-1] < alone["a"][0]
    assert not threads()


def test_a_run_takes_what_a_session_takes_and_names_too():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None], name="x")
        double, square = x * 2.0, x * x
    with sessions({"a": graph}) as opened:
        assert opened["a"].run(double, {x: [1.0]}).tolist() == [2.0]
        made = opened["a"].run({"both": (double, [square])}, {"x": [3.0]})
        assert (made["both"][0].tolist(), made["both"][1][0].tolist()) == ([6.0], [9.0])


def test_one_graph_under_two_names_is_copied():
    with tf.Graph().as_default() as graph:
        total = v1.get_variable("total", [], initializer=v1.zeros_initializer())
        more = v1.assign_add(total, 1.0)
    with sessions({"a": graph, "b": graph}) as opened:
        opened["a"].run(more)
        assert opened["a"].tf.graph is graph
        assert opened["b"].tf.graph is not graph
        assert opened["b"].run(more) == 1.0
        assert opened["a"].variables() == {"total": 1.0}


def test_a_trained_graph_is_opened_with_its_values():
    model = carpool.train([job("a")], device="cpu", reporters=[])[0].model
    with sessions({"a": model}) as opened:
        found = opened["a"].variables()
    assert all((found[name] == value).all() for name, value in model.variables.items())


def test_everything_closes_though_the_loop_raises_and_a_run_waits():
    def waiting() -> dict[str, Any]:
        return {"taken": v1.FIFOQueue(4, [tf.float32], shapes=[[]]).dequeue()}

    asked: list[Future[Any]] = []

    def loop() -> None:
        with sessions({"a": waiting, "b": builder()}) as opened:
            asked.extend(opened["a"].run_async("taken") for _ in range(3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert isinstance(asked[0].exception(), tf.errors.CancelledError)
    assert all(one.done() for one in asked)
    assert not threads()


def test_a_queue_is_filled_from_one_thread_and_read_from_another():
    def build() -> dict[str, Any]:
        queue = v1.FIFOQueue(1, [tf.float32], shapes=[[]])
        value = v1.placeholder(tf.float32, [], name="value")
        return {"put": queue.enqueue(value), "taken": queue.dequeue()}

    with sessions({"a": build}, threads=2) as opened:
        taken = opened["a"].run_async("taken")
        opened["a"].run_async("put", {"value": 4.0})
        assert taken.result() == 4.0


def test_one_that_cannot_be_opened_closes_the_others():
    with pytest.raises(tf.errors.InvalidArgumentError):
        sessions({"a": builder(), "b": _broken})
    assert not threads()


def _broken() -> dict[str, Any]:
    v1.get_variable("w", initializer=v1.placeholder(tf.float32, [], name="never"))
    return {}


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (({},), {}, "graphs by name"),
        (({"a": builder()},), {"memory": {"b": "1GiB"}}, "memory for one of a"),
        (({"a": builder()},), {"memory": {"a": "lots"}}, "a size such as"),
        (({"a": builder()},), {"threads": 0}, "threads of at least 1"),
        (({"a": 3},), {}, "a tf.Graph, or a function"),
    ],
)
def test_sessions_that_make_no_sense(arguments: Any, options: Any, said: str):
    with pytest.raises(CarpoolError, match=said):
        sessions(*arguments, **options)


# One graph, several models


def two_models() -> dict[str, Any]:
    x = v1.placeholder(tf.float32, [None, 6], name="x")
    y = v1.placeholder(tf.float32, [None, 1], name="y")
    made: dict[str, Any] = {}
    for name, rate in (("slow", 0.01), ("fast", 0.1)):
        with v1.variable_scope(name):
            weight = v1.get_variable("weight", [6, 1], initializer=v1.zeros_initializer())
            loss = tf.reduce_mean((x @ weight - y) ** 2)
            made[name] = loss
            made[f"{name} step"] = v1.train.GradientDescentOptimizer(rate).minimize(loss)
    return made


def test_several_models_of_one_graph_by_name():
    data = DATA["float32"]
    found = run(two_models, {"a": "slow", "b": ["fast", "slow"]}, feeds={"x": data["x"], "y": data["y"]})
    assert found["a"] == found["b"][0] == found["b"][1] > 0
    assert not threads()


def test_several_models_with_feeds_of_their_own_in_a_session_of_the_users():
    data = DATA["float32"]
    graph = tf.Graph()
    with graph.as_default():
        made = two_models()
    first, second = ({"x:0": data["x"][:n], "y:0": data["y"][:n]} for n in (10, 20))
    with v1.Session(graph=graph) as session:
        with graph.as_default():
            session.run(v1.global_variables_initializer())
        found = run(
            graph,
            {"a": [made["slow step"], made["slow"]], "b": made["fast"]},
            feeds={"a": first, "b": second},
            session=session,
        )
        assert found["b"] == session.run(made["fast"], second)
        assert session.run(made["slow"], first) < found["a"][1]


def test_who_raised_is_said():
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        run(two_models, {"a": "slow", "b": "fast"}, feeds={"a": {"x": DATA["float32"]["x"]}, "b": {}})
    assert "raised by 'a'" in caught.value.__notes__[0]
    with pytest.raises(ModelError, match="fetches by name"):
        run(two_models, {})


# Memory and threads


def test_caps_are_shares_of_the_pool_that_a_process_has(monkeypatch: pytest.MonkeyPatch):
    gpu = DeviceMemory("a GPU", 16 << 30, 16 << 30)
    monkeypatch.setattr(device, "gpus", lambda: (gpu,))
    monkeypatch.setattr(device, "read", lambda name: gpu)
    assert fraction_of(["2GiB", "25%"]) == pytest.approx(0.125 + 0.25)
    assert fraction_of(["2GiB", None]) is None
    made = config(fraction=fraction_of(["2GiB"]))
    assert made.gpu_options.per_process_gpu_memory_fraction == 0.125
    assert made.gpu_options.allow_growth
    assert told({"a": "2GiB", "b": "25%", "c": None}) == "a: 2.0 GiB, b: 25%, c: as needed"


def test_caps_are_told_and_harmless_without_a_gpu():
    with sessions({"a": builder(), "b": builder()}, memory={"a": "2GiB"}) as opened:
        assert opened.caps == "a: 2.0 GiB, b: as needed"


def test_a_config_of_the_users_own_stays():
    own = v1.ConfigProto(inter_op_parallelism_threads=3, gpu_options=v1.GPUOptions(allow_growth=False))
    made = config(own, in_caller=True)
    assert made.inter_op_parallelism_threads == 3
    assert not made.gpu_options.allow_growth
    assert config(None, in_caller=True).inter_op_parallelism_threads == -1
    assert config(None, in_caller=False).inter_op_parallelism_threads == 0


def test_a_budget_is_in_the_plan():
    one = Graph(builder(), ["loss"], train_op="train").job(DATA["float32"], budget="1GiB")
    assert "its session is told to take 1.0 GiB of a GPU" in carpool.plan([one], device="cpu").explain()
