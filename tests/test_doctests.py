"""Every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import carpool

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(carpool.__path__, "carpool.")
    if not module.name.endswith("__main__")
)
WITH_EXAMPLES = {
    "carpool.job",
    "carpool.grid",
    "carpool.order",
    "carpool.predict",
    "carpool.random",
    "carpool.reporters.prefixed",
    "carpool.result",
    "carpool.scripts",
    "carpool.stack",
    "carpool.stopping",
    "carpool.errors",
    "carpool.train",
    "carpool.kernels.updates.table",
    "carpool.planning.cursor",
    "carpool.process.mps",
    "carpool.planning.widths",
    "carpool.memory.enforce",
    "carpool.memory.ledger",
    "carpool.memory.policy",
    "carpool.testing.fakes",
    "carpool.testing.pairs",
}
"""Modules whose public functions are shown by example: one that loses its examples fails a test."""


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of(name: str):
    ran = doctest.testmod(importlib.import_module(name))
    assert ran.failed == 0
    assert ran.attempted > 0 or name not in WITH_EXAMPLES


def test_every_module_with_examples_is_found():
    assert set(MODULES) >= WITH_EXAMPLES
