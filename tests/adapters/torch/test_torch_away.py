"""Models on another device and home again."""

import pytest
import torch
from torch import nn

from carpool.adapters.torch.away import Away


def test_a_leaf_two_models_share_stays_until_the_last_is_home():
    moved = Away()
    trunk = nn.Linear(2, 2)
    one, two = nn.Sequential(trunk, nn.Linear(2, 1)), nn.Sequential(trunk, nn.Linear(2, 1))
    home = trunk.weight.data_ptr()
    moved.send(one, "cpu")
    moved.send(two, "cpu")
    left = moved._absent[(id(trunk), "weight")]
    assert left.sessions == 2
    assert left.home.data_ptr() == home
    moved.bring(one)
    assert moved._absent[(id(trunk), "weight")].sessions == 1
    assert (id(one[1]), "weight") not in moved._absent
    moved.bring(two)
    assert not moved._absent


def test_what_could_not_be_sent_is_not_away(monkeypatch):
    def full(self, device):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(nn.Module, "to", full)
    away = Away()
    with pytest.raises(torch.OutOfMemoryError):
        away.send(nn.Linear(2, 2), "away")
    assert not away._absent


@pytest.mark.gpu
def test_a_shared_trunk_trains_on_the_gpu_under_two_jobs_and_comes_home_into_its_own_memory():
    trunk = nn.Linear(2, 2)
    trunk.requires_grad_(False)
    one, two = nn.Sequential(trunk, nn.Linear(2, 1)), nn.Sequential(trunk, nn.Linear(2, 1))
    home, value = trunk.weight.data_ptr(), trunk.weight.detach().clone()
    away = Away()
    away.send(one, "cuda")
    away.send(two, "cuda")
    away.bring(one)
    assert trunk.weight.is_cuda
    assert two(torch.ones(1, 2, device="cuda")).is_cuda
    away.bring(two)
    assert trunk.weight.data_ptr() == home
    assert torch.equal(trunk.weight, value)
