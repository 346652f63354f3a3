"""What a stack is predicted to take, against what its tensors take while it is opened, checked and stepped."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import carpool
from carpool.adapters.torch.footprint import Live, peak_bytes
from carpool.adapters.torch.train import TorchAdapter
from carpool.memory.estimate import estimate
from carpool.planning.cursor import Cursor, cut


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(16, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


class Language(nn.Module):
    """Tied embedding and output around a block of attention."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(500, 64)
        self.block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.out = nn.Linear(64, 500, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.block(self.embed(x))[:, -1])


def images(*layers):
    return lambda: nn.Sequential(*(make() for make in layers))


conv = partial(nn.Conv2d, kernel_size=3, padding=1)
flat = partial(nn.Flatten)
ZOO = {
    "mlp": (
        images(partial(nn.Linear, 64, 256), nn.ReLU, partial(nn.Linear, 256, 10)),
        "vectors",
        torch.optim.Adam,
    ),
    "mlp_sgd": (
        images(partial(nn.Linear, 64, 512), nn.ReLU, partial(nn.Linear, 512, 10)),
        "vectors",
        torch.optim.SGD,
    ),
    "deep": (
        images(
            partial(nn.Linear, 64, 128),
            *[nn.ReLU, partial(nn.Linear, 128, 128)] * 6,
            partial(nn.Linear, 128, 10),
        ),
        "vectors",
        torch.optim.AdamW,
    ),
    "dropout": (
        images(partial(nn.Linear, 64, 256), nn.Dropout, partial(nn.Linear, 256, 10)),
        "vectors",
        torch.optim.RMSprop,
    ),
    "batch_norm": (
        images(
            partial(nn.Linear, 64, 256), partial(nn.BatchNorm1d, 256), nn.GELU, partial(nn.Linear, 256, 10)
        ),
        "vectors",
        torch.optim.Adam,
    ),
    "conv": (
        images(
            partial(conv, 3, 16),
            nn.ReLU,
            partial(nn.MaxPool2d, 2),
            partial(conv, 16, 32),
            nn.ReLU,
            flat,
            partial(nn.Linear, 32 * 64, 10),
        ),
        "pictures",
        torch.optim.Adam,
    ),
    "conv_norm": (
        images(
            partial(conv, 3, 16),
            partial(nn.BatchNorm2d, 16),
            nn.ReLU,
            partial(nn.AvgPool2d, 4),
            flat,
            partial(nn.Linear, 16 * 16, 10),
        ),
        "pictures",
        torch.optim.SGD,
    ),
    "depthwise": (
        images(
            partial(conv, 3, 12),
            partial(conv, 12, 12, groups=12),
            nn.SiLU,
            partial(nn.MaxPool2d, 4),
            flat,
            partial(nn.Linear, 12 * 16, 10),
        ),
        "pictures",
        torch.optim.NAdam,
    ),
    "lstm": (Recurrent, "series", torch.optim.Adam),
    "language": (Language, "tokens", torch.optim.AdamW),
}
DATA = {
    "vectors": lambda: torch.randn(32, 64),
    "pictures": lambda: torch.randn(32, 3, 16, 16),
    "series": lambda: torch.randn(32, 12, 16),
    "tokens": lambda: torch.randint(0, 500, (32, 12)),
}


def jobs(name, count):
    make, kind, optimizer = ZOO[name]
    torch.manual_seed(0)
    data = (DATA[kind](), torch.randint(0, 10, (32,)))
    return [
        carpool.Job(
            make,
            data,
            name=str(seed),
            loss=F.cross_entropy,
            optimizer=partial(optimizer, lr=0.01),
            batch_size=16,
            seed=seed,
        )
        for seed in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_prediction_over_actual_is_between_1_and_one_and_a_half(name):
    members = 4
    listed = jobs(name, members)
    adapter = TorchAdapter(compile=False)
    adapter.device("cpu")
    specs = [adapter.describe(job) for job in listed]
    assert adapter.fuser is not None
    footprint = adapter.fuser.footprint(listed)
    assert footprint is not None
    with Live() as live:
        live.count([listed[0].data])
        session = adapter.fuser.open(listed, members, "cpu", lambda *_: None)
        supplies = {row: spec.course.supply(0) for row, spec in enumerate(specs)}
        chunk = cut(supplies, dict.fromkeys(supplies, Cursor()), 2)
        assert chunk is not None
        session.check(chunk, chunk.rows)
        session.metrics(session.advance(chunk))
        session.close()
    assert 1.0 <= estimate(specs, footprint).total_bytes / live.peak_bytes <= 1.5


def test_what_cannot_be_stacked_is_not_measured():
    def branching(model, batch):
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        return loss * 2 if loss.item() > 1 else loss

    data = (torch.randn(8, 4), torch.randint(0, 2, (8,)))
    job = carpool.Job(partial(nn.Linear, 4, 2), data, name="a", step=branching, optimizer=torch.optim.SGD)
    adapter = TorchAdapter(compile=False)
    adapter.device("cpu")
    adapter.describe(job)
    assert adapter.fuser is not None
    assert adapter.fuser.footprint([job]) is None


def test_memory_is_counted_from_making_to_freeing_and_views_count_nothing():
    with Live() as live:
        first = torch.zeros(1000)
        second = first + 1
        view = second.view(10, 100)
        del second
        assert live.live_bytes == 8000
        del view
        assert live.live_bytes == 4000
    assert live.peak_bytes == 8000
    del first


def test_a_simulated_device_runs_full():
    with Live(capacity_bytes=6000):
        held = torch.zeros(1000)
        with pytest.raises(torch.OutOfMemoryError, match="8000 bytes needed, 6000 available"):
            _ = held + 1
        held.add_(1)  # and goes on when there is room


def convolved(device):
    """Bytes of a convolution's input, weight and output, and what it is predicted to take, on a device that is only named."""
    with FakeTensorMode():
        x, weight = torch.empty(4, 3, 8, 8, device=device), torch.empty(5, 3, 3, 3, device=device)
        held = x.nbytes + weight.nbytes + F.conv2d(x, weight).nbytes
        return held, peak_bytes(F.conv2d, [x, weight])


def test_on_a_gpu_a_convolution_may_copy_its_tensors():
    held, peak = convolved("cuda")
    assert peak == 2 * held


def test_on_a_cpu_a_convolution_copies_nothing():
    held, peak = convolved("cpu")
    assert peak == held


def test_the_backward_pass_of_a_convolution_may_copy_all_it_reads_and_makes():
    with FakeTensorMode():
        x, weight, grad = (
            torch.empty(shape, device="cuda") for shape in ((4, 3, 8, 8), (5, 3, 3, 3), (4, 5, 6, 6))
        )
        held = x.nbytes + weight.nbytes + grad.nbytes

        def backward(x, weight, grad):
            return torch.ops.aten.convolution_backward(
                grad, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
            )

        made = x.nbytes + weight.nbytes  # the gradients
        assert peak_bytes(backward, [x, weight, grad]) == 2 * (held + made)


def test_what_a_convolution_copies_is_gone_when_it_is_done():
    with FakeTensorMode(), Live(fake=True) as live:
        x, weight = torch.empty(4, 3, 8, 8, device="cuda"), torch.empty(5, 3, 3, 3, device="cuda")
        made = F.conv2d(x, weight)
        assert live.live_bytes == x.nbytes + weight.nbytes + made.nbytes


def test_other_operations_on_a_gpu_copy_nothing():
    with FakeTensorMode():
        x = torch.empty(1000, device="cuda")
        assert peak_bytes(lambda x: x + 1, [x]) == 8000
