"""The torch adapter keeps the promise, over its zoo."""

import pytest
from zoo import TorchZoo

from carpool.testing import AdapterConformance


class TestTorch(TorchZoo, AdapterConformance):
    """On the CPU."""


@pytest.mark.gpu
class TestTorchOnTheGpu(TorchZoo, AdapterConformance):
    device = "cuda"
    test_equals_the_plain_loop_full_cross = None  # type: ignore[assignment]  # the CPU runs it; pairs suffice here
