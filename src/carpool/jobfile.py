"""Jobs from a Python file: its top-level `jobs`, a sequence of jobs or a function that returns one."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from carpool.errors import CarpoolError, FileError, described, sentence
from carpool.job import Job

T = TypeVar("T")

_REMEDY = "write `jobs = [carpool.Job(...), ...]`, or a function `jobs()` that returns such a list"


def load_jobs(file: str | Path) -> tuple[Job, ...]:
    """The jobs that a file names `jobs`, all of them built.

    The file is run with its own folder importable, as `python FILE` would run it.
    """
    path = Path(file)
    _check_path(path)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # and it stays: a factory named "module:function" is imported later
    module = _run(path, lambda: _import(path))
    if not hasattr(module, "jobs"):
        raise FileError(sentence(f"{path} to name its jobs `jobs`", _names(module), _REMEDY))
    return _run(path, lambda: _listed(path, module.jobs))


def _check_path(path: Path) -> None:
    if not path.exists():
        raise FileError(sentence("a Python file", f"{path}, which does not exist", "check the path"))
    if path.is_dir():
        raise FileError(sentence("a Python file", f"{path}, which is a folder", "name the file in it"))
    if path.suffix != ".py":
        raise FileError(sentence("a Python file (.py)", str(path), "pass the file that defines `jobs`"))


def _import(path: Path) -> ModuleType:
    # A prefix, because a file called torch.py must not take the place of torch.
    name = f"carpool_jobs_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file has a spec"
    assert spec.loader is not None, "and a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    spec.loader.exec_module(module)
    return module


def _run(path: Path, act: Callable[[], T]) -> T:
    """Runs the user's code; what it raises becomes a FileError that says where."""
    try:
        return act()
    except CarpoolError:
        raise
    except (Exception, SystemExit) as error:
        raise FileError(
            sentence(f"{path} to run", _where(path, error), "run it with python to see it all")
        ) from error


def _where(path: Path, error: BaseException) -> str:
    """The exception in one line, with the last line of the file it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return described(error) + (f" (line {own[-1]})" if own else "")


def _listed(path: Path, jobs: Any) -> tuple[Job, ...]:
    found = jobs() if callable(jobs) else jobs
    if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
        raise FileError(sentence(f"`jobs` in {path} to be a sequence of carpool.Job", _kind(found), _REMEDY))
    listed = tuple(found)
    for position, job in enumerate(listed):
        if not isinstance(job, Job):
            received = f"{_kind(job)} at position {position}"
            raise FileError(sentence(f"`jobs` in {path} to hold only carpool.Job", received, _REMEDY))
    if not listed:
        raise FileError(sentence(f"at least one job in {path}", "an empty `jobs`", _REMEDY))
    return listed


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _names(module: ModuleType) -> str:
    names = [name for name in vars(module) if not name.startswith("_")]
    return f"only {', '.join(names[:8])}" if names else "a file that defines nothing"
