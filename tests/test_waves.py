"""Wave after wave of jobs in one process: nothing stays behind."""

import gc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import carpool


def net(hidden):
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.slow
def test_two_hundred_jobs_in_waves_leave_the_host_memory_where_it_was():
    if not Path("/proc/self/statm").exists():
        pytest.skip("the system does not tell")
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))

    def job(number, hidden):
        optimizer = partial(torch.optim.Adam, lr=1e-3)
        make = partial(net, hidden)
        return carpool.Job(
            make, (x, y), name=str(number), loss=F.cross_entropy, optimizer=optimizer, seed=number, epochs=2
        )

    seen = []
    for _ in range(12):
        jobs = [job(number, 256 if number < 16 else 100 + number) for number in range(20)]
        carpool.train(jobs, device="cpu", reporters=[], compile=False)
        del jobs
        gc.collect()
        seen.append(resident_mib())
    slope = np.polyfit(range(10), seen[2:], 1)[0]
    assert slope < 1.0, f"{slope:.2f} MiB a wave of 20 jobs: {seen}"
