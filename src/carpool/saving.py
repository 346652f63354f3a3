"""Results on disk: `results.json`, and a safetensors file for each job's weights and one for its optimizer's state.

A save is written beside what is there, into a folder of its own (`save-1`, `save-2`, ...), and counts from the moment `results.json`
is exchanged for one that points there: whatever happens before, the earlier save is as it was. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from carpool import adapters, arrays, notation
from carpool.arguments import Arguments
from carpool.arrays import Array
from carpool.errors import FileError, OutOfRoomError, SaveError, StepError, described, printable, sentence
from carpool.result import Files, Outcome, Result, Results

_INDEX = "results.json"
_FORMAT = 1
_LONGEST_NAME = 100


def check(folder: str | Path) -> None:
    """Makes the folder, and raises FileError where results could not be saved there, or somebody else's are."""
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target):
            pass
    except OSError as error:
        raise FileError(
            sentence("a folder to save results in", f"{str(target)!r} ({described(error)})", "name another")
        ) from error
    if (target / _INDEX).exists() and _index(target) is None:
        raise FileError(
            sentence(
                f"a folder without a {_INDEX} that carpool did not write",
                repr(str(target)),
                "name another folder, or move that file away",
            )
        )


def load(folder: str | Path) -> Results:
    """The results that `Results.save`, or `carpool train --save`, wrote into a folder.

    Weights and optimizer states are read when they are asked for: `result.weights`, `result.load_into(model)`. Models are not made:
    `result.model` is None. What of a config could not be written as data, such as a function, is the text that shows it; errors are texts.
    """
    target = Arguments(FileError).path("a folder", folder, 'pass carpool.load("results")')
    index = _index(target)
    if index is None:
        found = f"{str(target)!r}, where there is none of carpool's"
        raise FileError(
            sentence(f"a folder with a {_INDEX}", found, "name a folder that results were saved in")
        )
    try:
        if index["format"] != _FORMAT:
            raise ValueError(f"it is of format {index['format']}, and this carpool reads {_FORMAT}")
        return Results([_result(entry, target) for entry in index["jobs"]], float(index["seconds"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        received = f"{str(target / _INDEX)!r}: {described(error)}"
        raise FileError(
            sentence(f"a {_INDEX} that this carpool can read", received, "save the results again")
        ) from error


def save(results: Results, folder: Path) -> Path:
    """Writes all of it, then lets it count, then removes the save before. Raises SaveError, which carries the results."""
    try:
        check(folder)
    except FileError as error:
        raise SaveError(str(error), results) from error
    try:
        _replace(results, folder)
    except OSError as error:
        raise SaveError(
            sentence(
                f"the results to be written into {str(folder)!r}",
                described(error),
                "make room or name another folder: they are in this error's .results, and what was saved there before is as it was",
            ),
            results,
        ) from error
    return folder


def weights_of(result: Result) -> Mapping[str, Array]:
    """A result's weights, of its model or of its file; none where there are none."""
    if result.saved is not None:
        return arrays.read(result.saved.weights)[0] if result.saved.weights is not None else {}
    if adapters.has_weights(result.model):
        return adapters.claiming(result.model)().weights(result.model)
    return _listed(result)


def optimizer_of(result: Result) -> Any:
    """What a result's optimizer and scheduler hold, with an `Array` wherever there is an array; None where there is nothing."""
    if result.saved is not None:
        return _read_optimizer(result.saved.optimizer) if result.saved.optimizer is not None else None
    if result.optimizer is None or not adapters.has_weights(result.model):
        return None
    kind = adapters.claiming(result.model)
    return kind().optimizer_state(result.model, result.optimizer, result.scheduler)


def plain(state: Any) -> Any:
    """The state with NumPy's arrays."""
    if isinstance(state, Array):
        return state.numpy()
    if isinstance(state, Mapping):
        return {key: plain(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(plain(value) for value in state)
    return state


def file_names(names: Iterable[str]) -> list[str]:
    """A file name for each of these names: like it, safe on every system, and another for each.

    >>> file_names(["lr=0.1,seed=3", "a/b", "A"])
    ['lr=0.1,seed=3', 'a_b-c14cddc0', 'A']
    """
    taken: set[str] = set()
    found = []
    for name in names:
        safe = re.sub(r"[^A-Za-z0-9_.,=+@()\[\] -]", "_", name)[:_LONGEST_NAME].rstrip(". ")
        safe = "_" + safe[1:] if safe[:1] in (".", " ", "-") else safe
        if safe != name or safe.lower() in taken:
            safe += "-" + hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
        while safe.lower() in taken:
            safe += "_"
        taken.add(safe.lower())
        found.append(safe)
    return found


# Writing


def _replace(results: Results, folder: Path) -> None:
    before = (_index(folder) or {}).get("folder")
    place = _fresh(folder)
    draft = folder / f".{place.name}-{os.getpid()}.json"
    try:
        index = _written(results, place)
        draft.write_text(json.dumps(index, indent=1, allow_nan=False) + "\n")
        _reach_disk([*place.rglob("*"), place, draft])
        os.replace(draft, folder / _INDEX)
    except BaseException:
        draft.unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        raise
    _reach_disk([folder])
    if isinstance(before, str) and re.fullmatch(r"save-\d+", before):
        shutil.rmtree(folder / before, ignore_errors=True)


def _fresh(folder: Path) -> Path:
    """A folder that nobody has, for this save."""
    number = 1
    while True:
        place = folder / f"save-{number}"
        try:
            place.mkdir()
            return place
        except FileExistsError:
            number += 1


def _reach_disk(paths: Iterable[Path]) -> None:
    """Returns when the files, and the names in the folders, are on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _written(results: Results, place: Path) -> dict[str, Any]:
    """Writes the arrays, and says what `results.json` is to hold."""
    from carpool import __version__

    lost: dict[str, str] = {}
    for kind in ("weights", "optimizers"):
        (place / kind).mkdir()
    jobs = []
    for result, name in zip(results, file_names([result.name for result in results]), strict=True):
        weights, optimizer = (
            place / "weights" / f"{name}.safetensors",
            place / "optimizers" / f"{name}.safetensors",
        )
        files = {
            "weights": _kept(weights, lambda path, one=result: _write_weights(path, one), result, lost),
            "optimizer": _kept(optimizer, lambda path, one=result: _write_optimizer(path, one), result, lost),
        }
        jobs.append({**_entry(result), **files})
    if lost:
        text = "; ".join(f"{printable(name)}: {why}" for name, why in list(lost.items())[:3])
        warnings.warn(f"carpool: arrays of {len(lost)} jobs could not be saved: {text}", stacklevel=5)
    return {
        "format": _FORMAT,
        "carpool": __version__,
        "seconds": notation.written(results.seconds),
        "folder": place.name,
        "jobs": jobs,
    }


def _kept(path: Path, write: Callable[[Path], bool], result: Result, lost: dict[str, str]) -> str | None:
    """The file's place in the folder, if there was something to write. What of one job cannot be written costs the others nothing."""
    try:
        is_there = write(path)
    except OSError:
        raise
    except Exception as error:
        lost[result.name] = described(error)
        is_there = False
    return path.relative_to(path.parents[2]).as_posix() if is_there else None


def _write_weights(path: Path, result: Result) -> bool:
    if found := weights_of(result):
        arrays.write(path, found)
    return bool(found)


def _write_optimizer(path: Path, result: Result) -> bool:
    state = optimizer_of(result)
    if state is None:
        return False
    held: dict[str, Array] = {}
    text = json.dumps(notation.written(state, held), allow_nan=False)
    arrays.write(path, held, {"state": text})
    return True


def _listed(result: Result) -> dict[str, Array]:
    """The weights of a Keras job of another backend, where its model could not be made here."""
    values = result.value
    if result.model is None and isinstance(values, list) and all(isinstance(v, np.ndarray) for v in values):
        return {str(place): Array.of(value) for place, value in enumerate(values)}
    return {}


def _entry(result: Result) -> dict[str, Any]:
    told = {name: result.metric(name) for name in result.history} if result.held is None else result.held
    return {
        "name": result.name,
        "outcome": result.outcome.word,
        "error": None if result.error is None else described(result.error),
        "config": notation.written(dict(result.config)),
        "history": {
            name: [notation.written(value) for value in values] for name, values in result.history.items()
        },
        "epoch": result.epoch,
        "held": notation.written(dict(told)),
        "modes": dict(result.modes),
        "steps": int(result.steps),
        "seconds": notation.written(result.seconds),
        "peak_bytes": notation.written(result.peak_bytes),
        "strategy": result.strategy,
        "reason": result.reason,
    }


# Reading


def _index(folder: Path) -> dict[str, Any] | None:
    """What `results.json` holds, if carpool wrote it."""
    try:
        held = json.loads((folder / _INDEX).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    ours = (
        isinstance(held, dict)
        and {"format", "carpool", "jobs"} <= held.keys()
        and isinstance(held["jobs"], list)
    )
    return held if ours else None


def _result(entry: Mapping[str, Any], folder: Path) -> Result:
    outcome = Outcome[str(entry["outcome"]).upper()]
    kind = OutOfRoomError if outcome is Outcome.OUT_OF_MEMORY else StepError
    return Result(
        name=entry["name"],
        outcome=outcome,
        config=notation.read(entry["config"]),
        history={name: tuple(map(notation.read, values)) for name, values in entry["history"].items()},
        error=None if entry["error"] is None else kind(entry["error"]),
        steps=entry["steps"],
        seconds=notation.read(entry["seconds"]),
        peak_bytes=entry["peak_bytes"],
        strategy=entry["strategy"],
        reason=entry["reason"],
        epoch=entry["epoch"],
        held=notation.read(entry["held"]),
        modes=entry["modes"],
        saved=Files(_inside(folder, entry["weights"]), _inside(folder, entry["optimizer"])),
    )


def _inside(folder: Path, name: str | None) -> Path | None:
    """A file of the folder, and none outside it."""
    if name is None:
        return None
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} is outside the folder")
    return path


def _read_optimizer(path: Path) -> Any:
    held, told = arrays.read(path)
    try:
        return notation.read(json.loads(told["state"]), held)
    except (KeyError, ValueError, TypeError) as error:
        received = f"{str(path)!r}: {described(error)}"
        raise FileError(
            sentence("a file with an optimizer's state", received, "save the results again")
        ) from error


def loaded(result: Result, model: Any, optimizer: Any, scheduler: Any) -> Any:
    """What `Result.load_into` says."""
    kind = adapters.claiming(model)()
    weights = weights_of(result)
    if not weights:
        raise FileError(
            sentence(f"weights of job {result.name!r}", "none", "see result.outcome and result.error")
        )
    made = kind.load_weights(model, weights)
    if optimizer is None:
        return made
    state = optimizer_of(result)
    if state is None:
        raise FileError(
            sentence(f"an optimizer's state of job {result.name!r}", "none", "load the model alone")
        )
    return made, kind.load_optimizer(made, optimizer, scheduler, state)
