"""Runs a program written for TensorFlow 1 as it is: `python -m carpool.process.tf1 program.py ...`, or `-m module ...`.

When the program imports tensorflow it is given `tensorflow.compat.v1` with the behaviour of version 2 disabled, under the name that it asked for.
Nothing is imported before that: a program may set its environment first.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from carpool.errors import sentence

_GONE = {
    "contrib": "it left TensorFlow with version 2: take its successor (tf.nn, tf_slim, TensorFlow Addons), or tensorflow<2 in an environment of its own",
    "examples": "it left TensorFlow with version 2: read the data by yourself, such as with keras.datasets",
    "estimator": "it left TensorFlow with version 2.16: pip install tensorflow-estimator, or train in a session",
}
_LEGACY_KERAS = ("keras", "layers")


def main(arguments: Sequence[str]) -> None:
    """Runs the program that these arguments name, as Python itself would."""
    sys.meta_path.insert(0, Finder())
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


class Finder(MetaPathFinder):
    """Stands in for tensorflow at its first import, and says what has left it."""

    def __init__(self) -> None:
        self._is_asked = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, part = fullname.partition(".")
        if package != "tensorflow":
            return None
        if part in _GONE:
            raise ImportError(_told(part))
        if part or self._is_asked:
            return None  # the real one is found by the others
        self._is_asked = True
        return ModuleSpec("tensorflow", _Loader(), is_package=True)


class Compat(ModuleType):
    """TensorFlow as a program of its first version knows it."""

    def __init__(self, real: ModuleType) -> None:
        super().__init__("tensorflow", real.__doc__)
        self._v1: Any = real.compat.v1
        self._is_legacy = importlib.util.find_spec("tf_keras") is not None

    def __getattr__(self, name: str) -> Any:
        if name in _GONE:
            raise AttributeError(_told(name))
        if name in _LEGACY_KERAS and not self._is_legacy:
            raise AttributeError(
                sentence(f"a TensorFlow with tf.{name} of version 1", "Keras 3", "pip install tf_keras")
            )
        return getattr(self._v1, name)

    def __dir__(self) -> list[str]:
        return dir(self._v1)


class _Loader(Loader):
    """Imports the real TensorFlow, and gives what stands in for it."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        real = _begun()
        spec.submodule_search_locations = list(real.__path__)
        return Compat(real)

    def exec_module(self, module: ModuleType) -> None:
        return


def _begun() -> ModuleType:
    """The real TensorFlow, as version 1."""
    if importlib.util.find_spec("tf_keras") is not None:
        os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    real = importlib.import_module("tensorflow")
    importlib.import_module("tensorflow.compat.v1").disable_v2_behavior()
    return real


def _told(part: str) -> str:
    return sentence("a program without what TensorFlow 2 no longer has", f"tf.{part}", _GONE[part])


if __name__ == "__main__":
    main(sys.argv[1:])
