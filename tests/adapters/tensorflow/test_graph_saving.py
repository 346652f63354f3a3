"""What outlives a job: checkpoints, summaries, frozen graphs, SavedModels, and a graph's own values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from graph_zoo import DATA, builder, job, plain_loop, v1
from safetensors.numpy import load_file

import carpool
from carpool.errors import FileError, ModelError
from carpool.job import Job
from carpool.tensorflow import Graph


def trained(*jobs: Job) -> carpool.Results:
    return carpool.train(jobs, device="cpu", reporters=[], on_error="raise")


def values_in(path: str | Path) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(path))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert set(one) == set(other)
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name])


@pytest.mark.parametrize("is_given", [True, False])
def test_a_saver_writes_a_checkpoint_after_every_epoch(tmp_path: Path, is_given: bool):
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(0)
        made = builder()()
        saver = v1.train.Saver(max_to_keep=2) if is_given else None
    path = tmp_path / "run" / "model.ckpt"
    one = Graph(graph, {"loss": made["loss"]}, train_op=made["train"], saver=saver, checkpoints=path)
    trained(Job(one, DATA["float32"], epochs=3, batch_size=8))
    assert_same(values_in(f"{path}-15"), one.variables)
    assert_same(values_in(f"{path}-10"), dict(plain_loop(job(epochs=2)).weights))
    assert (tmp_path / "run" / "model.ckpt-5.index").exists() is not is_given


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_job_begins_from_a_checkpoint(tmp_path: Path, as_folder: bool):
    saved = Graph(builder(), ["loss"], train_op="train", checkpoints=tmp_path / "model")
    trained(Job(saved, DATA["float32"], epochs=2, batch_size=8))
    source = tmp_path if as_folder else tmp_path / "model-10"
    again = Graph(builder(), ["loss"], train_op="train", restore=source)
    trained(Job(again, DATA["float32"], epochs=2, batch_size=8, seed=0, name="again"))
    assert_same(again.variables, dict(plain_loop(job(epochs=2), passes=2).weights))


def test_a_graph_saves_its_values_itself_and_opens_a_session_with_them(tmp_path: Path):
    model = trained(job("a"))[0].model
    assert_same(values_in(model.save(tmp_path / "model")), model.variables)
    with model.session() as session:
        assert_same(session.run({one.op.name: one for one in _variables(session)}), model.variables)


def _variables(session: Any) -> list[Any]:
    return session.graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES)


def test_results_save_the_values_as_safetensors(tmp_path: Path):
    results = trained(job("a"))
    results.save(tmp_path)
    assert_same(load_file(tmp_path / "save-1" / "weights" / "a.safetensors"), results[0].model.variables)


def test_a_states_values_load_into_another_session():
    from carpool.adapters.graph.train import GraphAdapter

    adapter = GraphAdapter()
    one, other = job("a", seed=1), job("b", seed=2)
    for each in (one, other):
        adapter.describe(each)
    first, second = adapter.open(one, "cpu"), adapter.open(other, "cpu")
    try:
        second.load(0, first.state([0])[0])
        assert_same(dict(second.state([0])[0].model), dict(first.state([0])[0].model))
    finally:
        first.close()
        second.close()


def test_summaries_are_written(tmp_path: Path):
    def build() -> dict[str, Any]:
        made = builder()()
        v1.summary.scalar("loss", made["loss"])
        return {**made, "merged": v1.summary.merge_all()}

    one = Graph(build, ["loss"], train_op="train", summaries=("merged", tmp_path), every=2)
    result = trained(Job(one, DATA["float32"], epochs=2, batch_size=8))[0]
    (file,) = tmp_path.glob("events*")
    events = [event for event in v1.train.summary_iterator(str(file)) if event.summary.value]
    assert [event.step for event in events] == [0, 2, 4, 6, 8]
    assert set(result.model.values) == {"loss"}
    without = trained(job("a"))[0].model
    assert_same(one.variables, without.variables)


# Graphs to be run


def frozen_of(model: Graph) -> Any:
    with model.session() as session:
        return v1.graph_util.convert_variables_to_constants(session, session.graph.as_graph_def(), ["made"])


def named() -> dict[str, Any]:
    made = builder()()
    return {**made, "made": tf.identity(made["made"], name="made")}


@pytest.fixture
def model() -> Graph:
    graph = Graph(named, ["loss"], train_op="train")
    trained(Job(graph, DATA["float32"], name="a", batch_size=8))
    return graph


def predicted(model: Graph) -> np.ndarray:
    """In batches of 16, as the jobs below have it: other shapes may round otherwise."""
    x = DATA["float32"]["x"]
    with model.session() as session:
        return np.concatenate([session.run("made:0", {"x:0": x[at : at + 16]}) for at in (0, 16, 32)])


@pytest.mark.parametrize("kind", ["definition", "bytes", "file"])
def test_a_frozen_graph_is_run_and_its_results_are_in_order(model: Graph, tmp_path: Path, kind: str):
    source: Any = frozen_of(model)
    if kind != "definition":
        source = source.SerializeToString()
    if kind == "file":
        (tmp_path / "frozen.pb").write_bytes(source)
        source = tmp_path / "frozen.pb"
    one = Graph.frozen(source, {"made": "made"})
    result = trained(Job(one, {"x": DATA["float32"]["x"]}, batch_size=16, seed=5))[0]
    np.testing.assert_array_equal(result.value["made"], predicted(model))


def test_a_frozen_graph_may_be_fed_a_value_and_run_once(model: Graph):
    x = DATA["float32"]["x"][:16]
    result = trained(Graph.frozen(frozen_of(model), ["made"], feeds={"x": x}, steps=1).job())[0]
    np.testing.assert_array_equal(result.value["made"], predicted(model)[:16])


def test_a_saved_model_of_tensorflow_1_is_run_by_its_signature(model: Graph, tmp_path: Path):
    path = str(tmp_path / "saved")
    with model.session() as session:
        v1.saved_model.simple_save(
            session,
            path,
            {"features": session.graph.get_tensor_by_name("x:0")},
            {"answer": session.graph.get_tensor_by_name("made:0")},
        )
    jobs = [
        Job(Graph.saved_model(path), {"features": DATA["float32"]["x"]}, batch_size=16, name=name)
        for name in "ab"
    ]
    for result in trained(*jobs):
        np.testing.assert_array_equal(result.value["answer"], predicted(model))


def test_a_saved_model_has_its_table_and_its_asset(tmp_path: Path):
    words = tmp_path / "words.txt"
    words.write_text("ten and more")
    path = str(tmp_path / "saved")
    with tf.Graph().as_default(), v1.Session() as session:
        file = tf.constant(str(words), name="file")
        text = v1.get_variable("text", initializer="", dtype=tf.string)
        pairs = tf.lookup.KeyValueTensorInitializer(["one", "two"], np.array([1, 2]))
        number = tf.lookup.StaticHashTable(pairs, -1)
        x = v1.placeholder(tf.string, [None], name="x")
        main = tf.group(v1.assign(text, tf.io.read_file(file)), v1.tables_initializer())
        outputs = {"number": number.lookup(x), "text": tf.identity(text)}
        signature = v1.saved_model.predict_signature_def({"word": x}, outputs)
        session.run(v1.global_variables_initializer())
        builder = v1.saved_model.Builder(path)
        builder.add_meta_graph_and_variables(
            session, ["serve"], {"serving_default": signature}, assets_collection=[file], main_op=main
        )
        builder.save()
    words.unlink()
    one = Job(Graph.saved_model(path), {"word": np.array(["two", "none", "one"], object)})
    value = trained(one)[0].value
    assert (value["number"].tolist(), value["text"].item()) == ([2, -1, 1], b"ten and more")


def test_a_saved_model_of_tensorflow_2_is_run_too(tmp_path: Path):
    module = tf.Module()
    module.weight = tf.Variable([[2.0], [3.0]])  # type: ignore[attr-defined]

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
    def call(x: Any) -> dict[str, Any]:
        return {"y": x @ module.weight}  # type: ignore[attr-defined]

    tf.saved_model.save(module, str(tmp_path / "two"), signatures=call)
    one = Job(Graph.saved_model(tmp_path / "two"), {"x": np.eye(2, dtype="float32")})
    assert trained(one)[0].value["y"].tolist() == [[2.0], [3.0]]


def test_what_is_not_there_is_said(tmp_path: Path, model: Graph):
    with pytest.raises(FileError, match="a file with a GraphDef"):
        Graph.frozen(tmp_path / "none.pb", ["made"])
    with pytest.raises(FileError, match=r"a folder with saved_model\.pb"):
        Graph.saved_model(tmp_path)
    path = str(tmp_path / "saved")
    with model.session() as session:
        made = session.graph.get_tensor_by_name("made:0")
        v1.saved_model.simple_save(
            session, path, {"x": session.graph.get_tensor_by_name("x:0")}, {"made": made}
        )
    with pytest.raises(ModelError, match="use serving_default"):
        Graph.saved_model(path, "classify")
