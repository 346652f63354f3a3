import numpy as np
import pytest
import torch

import carpool
from carpool.adapters.torch import shuffle
from carpool.adapters.torch.orders import Orders
from carpool.adapters.torch.shuffle import Shuffler
from carpool.adapters.torch.standing import Rows


def expected(positions, seed, epoch):
    return positions[carpool.batch_order(seed, epoch, len(positions))].tolist()


def test_every_epoch_is_in_the_public_order_however_many_are_made_at_once():
    places = torch.stack([torch.arange(10, 17), torch.arange(20, 27)]).to(torch.int32)
    shuffler = Shuffler(places, np.array([3, 4]))
    for epoch in (0, 1, 2, 3, 4, 5, 9, 10, 2):
        for row, seed in enumerate((3, 4)):
            assert shuffler.epoch(epoch)[row].tolist() == expected(places[row].numpy(), seed, epoch)


@pytest.mark.parametrize(("most", "sorts"), [(4, 4), (1 << 18, 3)])
def test_epochs_ahead_are_made_in_few_launches_and_within_bounds(monkeypatch, most, sorts):
    made = []
    real = shuffle.shuffled
    monkeypatch.setattr(shuffle, "shuffled", lambda p, *keys: made.append(len(p)) or real(p, *keys))
    monkeypatch.setattr(shuffle, "_AHEAD_ELEMENTS", most)
    shuffler = Shuffler(torch.arange(2)[None], np.array([0]))
    for epoch in range(7):
        shuffler.epoch(epoch)
    assert len(made) == sorts
    assert max(made) * 2 <= max(2, most)


def test_an_order_that_could_not_be_made_is_made_when_it_is_asked_for_again(monkeypatch):
    orders = Orders(order := torch.zeros(1, 5, dtype=torch.int32))
    orders.set(0, torch.arange(5), True, 1)
    rows, epoch = Rows((0,), 1, order.device), np.array([0])

    def fails(*_):
        raise RuntimeError("no room")

    with monkeypatch.context() as once:
        once.setattr(shuffle, "shuffled", fails)
        with pytest.raises(RuntimeError, match="no room"):
            orders.lay(rows, epoch)
    orders.lay(rows, epoch)
    assert order[0].tolist() == expected(np.arange(5), 1, 0)


def test_rows_that_change_are_shuffled_anew():
    order = torch.zeros(2, 5, dtype=torch.int32)
    orders = Orders(order)
    orders.set(0, torch.arange(5), True, 1)
    orders.set(1, torch.arange(5), True, 2)
    rows = Rows((0, 1), 2, order.device)
    orders.lay(rows, np.array([0]))
    orders.lay(rows, np.array([1]))
    orders.set(1, torch.arange(5), True, 9)
    orders.lay(rows, np.array([2]))
    assert order[0].tolist() == expected(np.arange(5), 1, 2)
    assert order[1].tolist() == expected(np.arange(5), 9, 2)


def test_rows_of_other_lengths_and_epochs_are_laid_out_by_kind():
    order = torch.zeros(4, 6, dtype=torch.int32)
    orders = Orders(order)
    for row, (length, shuffles) in enumerate([(6, True), (4, True), (6, False), (6, True)]):
        orders.set(row, torch.arange(length), shuffles, row)
    orders.lay(Rows((0, 1, 2, 3), 4, order.device), np.array([0]))
    orders.lay(Rows((3, 0, 1), 4, order.device), np.array([0, 2, 1]))
    assert order[0].tolist() == expected(np.arange(6), 0, 2)
    assert order[1, :4].tolist() == expected(np.arange(4), 1, 1)
    assert order[2].tolist() == list(range(6))
    assert order[3].tolist() == expected(np.arange(6), 3, 0)
