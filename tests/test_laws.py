"""The laws of the layout: who may import what, what importing does, and which names are public."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import carpool
import carpool.testing
from patience import PATIENCE_S

ROOT = Path(carpool.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FRAMEWORKS = {"torch", "jax", "jaxlib", "flax", "equinox", "optax", "keras", "tensorflow"}
DEMO = "demo.py"  # a program that trains networks of its own; `carpool demo` runs it, nothing else imports it
PROGRAMS = (DEMO, "peers.py")  # so is what `carpool bench` compares


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> set[str]:
    """Every module a file imports, wherever in it: at the top, in a function or for the types only."""
    found: set[str] = set()
    package = ("carpool", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            source = (base + (node.module or "")).rstrip(".")
            found |= {source} | {
                f"{source}.{alias.name}" for alias in node.names if _is_module(source, alias.name)
            }
    return found


def _is_module(package: str, name: str) -> bool:
    folder = ROOT.joinpath(*package.split(".")[1:]) if package.split(".")[0] == "carpool" else None
    return folder is not None and ((folder / f"{name}.py").exists() or (folder / name).is_dir())


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def file_of(module: str) -> Path | None:
    """The file of one of our own modules."""
    target = ROOT.joinpath(*module.split(".")[1:])
    return next((f for f in (target.with_suffix(".py"), target / "__init__.py") if f.exists()), None)


def closure(paths: list[Path]) -> Iterator[Path]:
    """The files and all of ours that they import, packages' own `__init__` aside."""
    seen: set[Path] = set()
    todo = list(paths)
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        yield path
        todo += [f for m in imported(path) if m.startswith("carpool.") and (f := file_of(m)) is not None]


# Who imports what


@pytest.mark.parametrize("path", FILES, ids=place)
def test_only_an_adapter_imports_its_framework(path: Path):
    where = place(path)
    allowed = {"torch"} if where.startswith(("adapters/torch/", "kernels/")) or where in PROGRAMS else set()
    if where.startswith("adapters/jax/"):  # a library of models in the one file that takes them apart
        allowed = {"jax", "optax"} | {
            "nnx.py": {"flax"},
            "linen.py": {"flax"},
            "equinox.py": {"equinox"},
        }.get(path.name, set())
    if where.startswith("adapters/keras/"):  # a file named after a backend imports it, the rest Keras alone
        allowed = {"keras", path.name.partition("_")[0]}
    if where.startswith(("adapters/tensorflow/", "adapters/graph/")):
        allowed = {"tensorflow"}
    assert tops(path) & FRAMEWORKS <= allowed


@pytest.mark.parametrize("path", FILES, ids=place)
def test_nothing_imports_the_command_line(path: Path):
    if place(path) != "__main__.py":
        assert not {name for name in imported(path) if name.split(".")[:2] == ["carpool", "cli"]}


@pytest.mark.parametrize("path", FILES, ids=place)
def test_only_the_command_line_imports_the_demo_and_the_benchmark(path: Path):
    if place(path) != "cli.py":
        assert imported(path).isdisjoint({"carpool.demo", "carpool.bench"})
    if place(path) != "bench.py":
        assert "carpool.peers" not in imported(path)


LOADERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "serialize_executable"}
MESSAGES = ("process/wire.py", "adapters/torch/compiler.py")


@pytest.mark.parametrize("path", FILES, ids=place)
def test_nothing_that_a_file_holds_is_unpickled(path: Path):
    """Who may run code: only messages between our own processes are unpickled, over descriptors that they inherited."""
    names = {part for name in imported(path) for part in name.split(".")}
    attributes = {
        node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
    }
    if place(path) not in MESSAGES:
        assert not LOADERS & (names | attributes)
    assert not {"allow_pickle", "weights_only"} & {
        word.arg for word in ast.walk(ast.parse(path.read_text())) if isinstance(word, ast.keyword)
    }


def test_planning_is_pure():
    """Standard library and our own values only, and so for whatever it imports: no NumPy, no device, no executor."""
    for path in closure(sorted((ROOT / "planning").glob("*.py"))):
        assert tops(path) <= {*sys.stdlib_module_names, "carpool"}, place(path)
        assert place(path).split("/")[0] in ("planning", "errors.py", "memory"), place(path)
        assert place(path) != "memory/device.py"


def test_loops_and_their_printer_know_no_framework():
    """Only `lower/` does: another framework's steps, and a printer of another language, can join."""
    for path in closure(sorted((ROOT / "kernels" / "resident").glob("*.py"))):
        assert tops(path).isdisjoint(FRAMEWORKS), place(path)


def test_the_ledger_is_pure():
    assert tops(ROOT / "memory" / "ledger.py") <= sys.stdlib_module_names


def test_the_laws_look_at_something():
    assert len(FILES) > 40
    assert "torch" in tops(ROOT / "adapters" / "torch" / "train.py")
    assert "carpool.planning.cursor" in imported(ROOT / "planning" / "plan.py")
    assert "carpool.adapters" in imported(ROOT / "train.py")
    assert ROOT / "errors.py" in set(closure([ROOT / "planning" / "plan.py"]))


# What importing does

IMPORTING = """
import sys, pynvml
def touched(*_): raise SystemExit("a device was touched")
pynvml.nvmlInit = touched
before = set(sys.modules)
import carpool, carpool.testing
names = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(names & set(sys.argv[1:])))
with open("/proc/self/maps") as file: maps = file.read()
print(*sorted(word for word in ("libcuda", "libnvidia-ml", "libcudart") if word in maps))
"""


def test_importing_imports_no_framework_and_touches_no_device():
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORTING, *sorted(FRAMEWORKS)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    frameworks, libraries = ran.stdout.split("\n")[:2]
    assert frameworks == ""
    assert libraries == ""


# Public names


def test_the_public_names_are_these():
    assert carpool.__all__ == [
        "CarpoolError",
        "EarlyStopping",
        "Interrupted",
        "Job",
        "Loop",
        "Outcome",
        "Phase",
        "Result",
        "Results",
        "Schedule",
        "Stack",
        "batch_order",
        "data",
        "each",
        "fit",
        "grid",
        "limit_memory",
        "load",
        "map",
        "plan",
        "predict",
        "train",
    ]


def test_the_public_names_for_testing_are_these():
    assert carpool.testing.__all__ == [
        "AdapterConformance",
        "FakeAdapter",
        "FakeClock",
        "FakeFusedSession",
        "FakeSession",
        "Reference",
        "Script",
        "Variant",
        "pairwise",
    ]


@pytest.mark.parametrize("module", [carpool, carpool.testing], ids=lambda module: module.__name__)
def test_every_public_name_is_there_and_documented(module: object):
    for name in module.__all__:  # type: ignore[attr-defined]
        thing = getattr(module, name)
        assert (inspect.getdoc(thing) or "").strip(), name
        assert not (thing.__doc__ or "").startswith(f"{name}("), (
            f"{name} has only a dataclass's own docstring"
        )


def test_public_functions_take_their_options_by_name():
    for function, positional in (
        (carpool.train, ["jobs"]),
        (carpool.plan, ["jobs"]),
        (carpool.Job, ["model", "data"]),
        (carpool.predict, ["models", "inputs"]),
        (carpool.Stack, ["models", "optimizers"]),
        (carpool.limit_memory, ["memory"]),
        (carpool.map, ["function", "configs"]),
    ):
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
