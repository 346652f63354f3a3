"""The torch adapter keeps the promise, over its zoo."""

from collections.abc import Callable

import pytest
from zoo import TorchZoo
from zoo_operators import OperatorZoo

from carpool.adapters.torch import programs
from carpool.adapters.torch.program import Program
from carpool.adapters.torch.programs import Programs
from carpool.adapters.torch.resident import Code
from carpool.testing import AdapterConformance


class TestTorch(TorchZoo, AdapterConformance):
    """On the CPU."""

    fast_pairs, fast_every = 60, 3


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch on its own float32 kernel, alone as well
class TestTorchOperators(OperatorZoo, AdapterConformance):
    """Models that need operators of carpool's own, on the CPU."""

    fast_every = 2


@pytest.mark.slow
class TestTorchResident(TorchZoo, AdapterConformance):
    """Steps as machine code, wherever every operator of a step has loops."""

    compile = "auto"

    @pytest.fixture(autouse=True)
    def forced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Programs, "_choose", _forced)
        monkeypatch.setattr(programs, "FEWEST_LAUNCHES", 0)


def _forced(programs: Programs, program: Program, code: Code | None, launches: Callable[[], int]) -> None:
    program.stay_traced()
    if code is not None:
        programs._follows(program, code)


@pytest.mark.gpu
class TestTorchOnTheGpu(TorchZoo, AdapterConformance):
    device = "cuda"
    test_equals_the_plain_loop_full_cross = None  # type: ignore[assignment]  # the CPU runs it; pairs suffice here


@pytest.mark.gpu
class TestTorchOperatorsOnTheGpu(OperatorZoo, AdapterConformance):
    device = "cuda"
    test_equals_the_plain_loop_full_cross = None  # type: ignore[assignment]  # as above
