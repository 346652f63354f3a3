"""The counterparts of the sources' programs do what docs/sources.md says. Those of TensorFlow run in one process, once a test run."""

import fcntl
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "sources"
STEMS = sorted(path.stem for path in FOLDER.glob("*.py"))
ON_TENSORFLOW = sorted(
    (stem for stem in STEMS if not stem.startswith("src003")),
    key=lambda stem: stem != "src000_3_mirrored",  # first: it makes logical devices before TensorFlow starts
)
PROGRAMS = {"000": 3, "001": 3, "002": 5, "003": 3, "004": 3}
"""How many examples each source has; the third of 000 is described there without code."""
MOST_LINES = 52
ROW = re.compile(r"^\| (\d{3}) \| (\d) \|.*\[\w+\.py\]\(\.\./examples/sources/(\w+)\.py\) \|$", re.MULTILINE)

Returned = Callable[[str], Any]


@pytest.fixture(scope="session")
def returned(tmp_path_factory: pytest.TempPathFactory) -> Returned:
    """What a counterpart's main() returned in the one process of this run, whichever test process asks first."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"alone-{os.getpid()}")
    kept = tmp_path_factory.getbasetemp().parent / f"sources-{run}.json"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = "" if kept.exists() else run_all(kept, tmp_path_factory.mktemp("cache"))
    outcomes = json.loads(kept.read_text()) if kept.exists() else {}

    def value(name: str) -> Any:
        assert name in outcomes, said[-4000:]
        assert "raised" not in outcomes[name], outcomes[name]["raised"]
        return outcomes[name]["value"]

    return value


def run_all(into: Path, cache: Path) -> str:
    inherited = {
        name: text for name, text in os.environ.items() if not name.startswith(("PYTEST_", "JAX_", "XLA_"))
    }
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    told = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    env = {**inherited, **told, "CARPOOL_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(Path(__file__).with_name("counterparts.py")), str(into), *ON_TENSORFLOW]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT
    ).stderr


def falls(losses: list[float]) -> bool:
    return len(losses) > 1 and all(later < earlier for earlier, later in pairwise(losses))


def on_torch(name: str) -> Any:
    return runpy.run_path(str(FOLDER / f"{name}.py"))["main"]()


@pytest.mark.slow
def test_graphs_run_in_processes_of_their_own(returned: Returned):
    made = returned("src000_1_processes")
    assert made["strategies"] == ["isolated", "isolated"]
    assert made["scores"] == {"narrow": [3, 12, 21, 30], "wide": [21, 70, 119, 168]}


@pytest.mark.slow
def test_models_of_one_graph_run_in_threads_of_one_session(returned: Returned):
    made = returned("src000_2_threads")
    assert (made["mean"], made["norm"]) == ([3, 3], [6, 6])
    assert "did you mean short" in made["misspelt"]


@pytest.mark.slow
def test_one_model_over_two_devices_ends_where_one_device_ends(returned: Returned):
    made = returned("src000_3_mirrored")
    assert made["devices"] == 2
    assert made["apart"] < 1e-6
    assert falls(made["loss"])


@pytest.mark.slow
def test_sessions_work_at_once_under_caps_and_compute_what_each_computes_alone(returned: Returned):
    made = returned("src001_1_sessions")
    assert made["together"] == made["alone"]
    assert made["together"]["first"] != made["together"]["second"]
    assert made["caps"] == "first: 2.0 GiB, second: 1.0 GiB"


@pytest.mark.slow
def test_queues_end_and_leave_no_thread(returned: Returned):
    made = returned("src001_2_queues")
    assert made["heard"] == [5.0 * step for step in range(12)]
    assert made["seen"] == [6.0] * 12
    assert (made["five"], made["threads left"]) == (5, 0)


@pytest.mark.slow
def test_a_model_in_parts_trains_as_it_does_whole(returned: Returned):
    made = returned("src001_3_parts")
    assert made["parts"] == ["lower/w", "upper/w"]
    assert made["same"]
    assert made["loss"][-1] < made["loss"][0] / 2


@pytest.mark.slow
def test_graphs_have_sessions_of_their_own_and_share_no_state(returned: Returned):
    assert returned("src002_1_graphs") == {"area": 10.0, "count": 5.0, "count again": 1.0}


@pytest.mark.slow
def test_every_cap_is_listed(returned: Returned):
    made = returned("src002_2_memory")
    assert made["process"] == "0.400000"
    assert made["sessions"] == "a: 2.0 GiB, b: 25%"
    assert made["values"] == [2.0, 2.0]
    assert "its session is told to take 1.0 GiB of a GPU" in made["plan"]
    assert "in a process of its own at most 3.0 GiB" in made["plan"]


@pytest.mark.slow
def test_keras_models_train_at_once_and_end_as_alone(returned: Returned):
    made = returned("src002_3_keras")
    assert made["same"]
    for name in ("narrow", "broad"):
        assert falls(made["losses"][name])
        assert made["evaluated"][name] < made["losses"][name][-1]


@pytest.mark.slow
def test_keras_models_come_back_from_their_processes_trained(returned: Returned):
    made = returned("src002_4_keras_processes")
    assert made["strategies"] == ["isolated"] * 3
    assert made["epochs"] == {"small": 2, "medium": 4, "large": 6}
    assert all(made["after"][name] < made["before"][name] for name in made["before"])


@pytest.mark.slow
def test_each_process_has_a_gpu_and_a_result_of_its_own(returned: Returned):
    first, second = returned("src002_5_devices")
    assert (first["gpu"], second["gpu"]) == ("0", "1")
    assert first["process"] != second["process"]
    for made, rate in ((first, 0.1), (second, 0.3)):
        assert made["at"] == pytest.approx(1 + 4 * (1 - 2 * rate) ** 10, rel=1e-5)
        assert falls(made["loss"])


def test_stacked_models_say_what_each_says_alone():
    made = on_torch("src003_1_weights")
    assert made["names"] == [f"seed {seed}" for seed in range(4)]
    assert made["shape"] == [5, 2]
    assert made["differ"]
    assert made["apart"] < 1e-5


def test_models_on_halves_of_the_data_are_fused():
    made = on_torch("src003_2_halves")
    assert made["strategies"] == ["fused", "fused"]
    assert made["apart"] < 1e-6
    assert all(falls(losses) for losses in made["losses"].values())


def test_a_loop_of_ones_own_advances_both_models():
    made = on_torch("src003_3_own_loop")
    assert made["apart"] < 1e-5
    assert all(last < first for first, last in zip(made["first"], made["last"], strict=True))


@pytest.mark.slow
def test_pipelines_are_read_whole_in_every_epoch(returned: Returned):
    made = returned("src004_1_datasets")
    assert {name: one["steps"] for name, one in made.items()} == {"a": 4 * 7, "b": 4 * 5, "c": 4 * 8}
    assert all(falls(one["loss"]) for one in made.values())


@pytest.mark.slow
def test_keras_models_of_different_shape_are_planned_and_fitted(returned: Returned):
    made = returned("src004_2_models")
    assert made["rates"] == pytest.approx({"a": 1e-2, "b": 5e-3, "c": 2e-2})
    assert "no other job has its structure" in made["plan"]
    assert all(falls(losses) for losses in made["losses"].values())


@pytest.mark.slow
def test_one_tf_function_serves_three_models(returned: Returned):
    made = returned("src004_3_one_step")
    assert made["same"]
    assert list(made["losses"]) == ["a", "b", "c"]
    assert all(falls(losses) for losses in made["losses"].values())


def test_the_table_has_every_program_and_every_file():
    rows = ROW.findall((ROOT / "docs" / "sources.md").read_text())
    assert [row[:2] for row in rows] == [
        (source, str(number)) for source, count in PROGRAMS.items() for number in range(1, count + 1)
    ]
    assert {file for *_, file in rows} == set(STEMS)
    assert all(file.startswith(f"src{source}_{number}_") for source, number, file in rows)


@pytest.mark.parametrize("stem", STEMS)
def test_a_counterpart_is_tested_and_short(stem: str):
    assert f'("{stem}")' in Path(__file__).read_text()
    assert len((FOLDER / f"{stem}.py").read_text().splitlines()) <= MOST_LINES
