"""Policies as the frameworks' own variables."""

from __future__ import annotations

import subprocess
import sys

import pytest

from carpool.memory.policy import TORCH_NAMES, Policy, variables
from carpool.memory.size import Limit
from patience import PATIENCE_S

GIB = 1 << 30


def test_growth_alone():
    made = variables(Policy())
    assert made == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }


def test_no_growth_leaves_torch_as_it_is():
    made = variables(Policy(growth=False))
    assert made == {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "TF_FORCE_GPU_ALLOW_GROWTH": "false"}


@pytest.mark.parametrize("limit", [Limit(share=0.25), Limit(size_bytes=20 * GIB)])
def test_a_share_and_a_size_are_the_same_fraction(limit: Limit):
    made = variables(Policy(limit), total_bytes=80 * GIB)
    assert made["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.250000"
    for name in TORCH_NAMES:
        assert made[name] == "expandable_segments:True,per_process_memory_fraction:0.250000"


def test_fractions_are_rounded_down_and_never_nothing():
    assert variables(Policy(Limit(share=2 / 3)))["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.666666"
    made = variables(Policy(Limit(size_bytes=1)), total_bytes=80 * GIB)
    assert made["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.000001"


def test_a_size_without_a_device_is_no_fraction():
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in variables(Policy(Limit(size_bytes=GIB)))


def test_a_size_larger_than_the_device_is_all_of_it():
    assert Policy(Limit(size_bytes=200)).fraction(100) == 1.0
    assert Policy(Limit(size_bytes=200)).limit_bytes(100) == 100


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_what_the_user_set_for_torch_stays(name: str):
    theirs = (
        "roundup_power2_divisions:[256:1,512:2], expandable_segments:False,per_process_memory_fraction:0.9"
    )
    made = variables(Policy(Limit(share=0.5)), present={name: theirs})
    expected = "expandable_segments:False,roundup_power2_divisions:[256:1,512:2],per_process_memory_fraction:0.500000"
    assert made["PYTORCH_ALLOC_CONF"] == made["PYTORCH_CUDA_ALLOC_CONF"] == expected


def test_only_one_of_xlas_two_names_is_set():
    made = variables(Policy(Limit(share=0.5)), present={"XLA_CLIENT_MEM_FRACTION": "0.9"})
    assert made["XLA_CLIENT_MEM_FRACTION"] == "0.500000"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in made


def test_jax_itself_reads_what_was_written():
    pytest.importorskip("jaxlib")
    code = (
        "import os; from carpool.memory.policy import Policy, variables; from carpool.memory.size import Limit\n"
        "os.environ.update(variables(Policy(Limit(share=0.25))))\n"
        "from jaxlib import xla_client; options = xla_client.generate_pjrt_gpu_plugin_options()\n"
        "print(options['memory_fraction'], options['preallocate'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.stdout.split() == ["0.25", "False"], ran.stderr
