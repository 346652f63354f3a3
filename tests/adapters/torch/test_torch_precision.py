"""Precision settings are read, whichever of torch's two ways they were set in, and never changed."""

import pytest
import torch
from zoo import TorchZoo

from carpool.adapters.torch import precision
from carpool.adapters.torch.compare import tolerance
from carpool.testing import AdapterConformance, Variant

ZOO = type("Zoo", (TorchZoo, AdapterConformance), {})()


@pytest.fixture
def tf32_the_new_way():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("tf32_the_new_way")
def test_fusing_works_with_the_new_settings():
    results = ZOO.run(
        [ZOO.job("mlp", "sgd", "constant", Variant(seed)) for seed in range(2)], strategy="fused"
    )
    assert {result.strategy for result in results} == {"fused"}
    assert precision.multiplies_in_tf32()
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.usefixtures("tf32_the_new_way")
def test_tf32_loosens_the_check_on_a_gpu_only():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert (
        tolerance(torch.float32, gpu, convolves=False).weight
        > tolerance(torch.float32, cpu, convolves=False).weight
    )
    assert tolerance(torch.float64, gpu, convolves=True) == tolerance(torch.float64, cpu, convolves=True)


def test_convolutions_are_checked_as_tf32_where_torch_computes_them_so():
    gpu = torch.device("cuda")
    strict = tolerance(torch.float32, gpu, convolves=False)
    assert (tolerance(torch.float32, gpu, convolves=True) == strict) is not precision.convolves_in_tf32()


def test_recurrent_nets_are_checked_as_tf32_where_cudnn_computes_them_so():
    gpu = torch.device("cuda")
    strict = tolerance(torch.float32, gpu, convolves=False)
    loose = tolerance(torch.float32, gpu, convolves=False, recurs=True)
    assert (loose == strict) is not precision.recurs_in_tf32()
