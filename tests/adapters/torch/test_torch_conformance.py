"""The torch adapter keeps the promise, over its zoo."""

import pytest
from zoo import TorchZoo
from zoo_operators import OperatorZoo

from carpool.testing import AdapterConformance


class TestTorch(TorchZoo, AdapterConformance):
    """On the CPU."""

    fast_pairs, fast_every = 60, 3


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch on its own float32 kernel, alone as well
class TestTorchOperators(OperatorZoo, AdapterConformance):
    """Models that need operators of carpool's own, on the CPU."""

    fast_every = 2


@pytest.mark.gpu
class TestTorchOnTheGpu(TorchZoo, AdapterConformance):
    device = "cuda"
    test_equals_the_plain_loop_full_cross = None  # type: ignore[assignment]  # the CPU runs it; pairs suffice here


@pytest.mark.gpu
class TestTorchOperatorsOnTheGpu(OperatorZoo, AdapterConformance):
    device = "cuda"
    test_equals_the_plain_loop_full_cross = None  # type: ignore[assignment]  # as above
