"""The torch adapter keeps the promise, over its zoo."""

import pytest
from zoo import TorchZoo

from carpool.testing import AdapterConformance


class TestTorch(TorchZoo, AdapterConformance):
    """On the CPU."""


@pytest.mark.gpu
class TestTorchOnTheGpu(TorchZoo, AdapterConformance):
    device = "cuda"
