"""One backend in a process: the one that KERAS_BACKEND names, JAX unless it says otherwise (tests/test_keras_backends.py runs the others)."""

import os
from collections import Counter

import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if os.environ["KERAS_BACKEND"] == "jax":
    os.environ.setdefault(
        "JAX_DEFAULT_MATMUL_PRECISION", "highest"
    )  # a GPU rounds products to TF32 otherwise

CROSSES = {
    "test_models_of_every_kind",
    "test_keras_own_callbacks_do_what_they_do_in_fit",
    "test_a_callback_that_raises_fails_its_job_alone",
    "test_arguments_of_fit",
    "test_a_model_alone_and_in_a_stack_ends_where_its_own_fit_ends",
    "test_an_optimizer_ends_where_its_own_fit_ends",
    "test_layers_of_all_kinds",
    "test_every_optimizer",
}
"""Tests over many cases that each compile anew: of these a few are in the fast suite, and all in the slow one."""
FAST_CASES = 3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        name = getattr(item, "originalname", "")
        seen[name] += name in CROSSES
        is_long = name.endswith("pairwise") and "attention" in item.name
        if seen[name] > FAST_CASES or is_long:
            item.add_marker(pytest.mark.slow)
