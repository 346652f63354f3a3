"""Views, shared arrays, members with data of their own, unequal lengths."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from zoo import mlp, plain_loop, plain_objects, shown, tables

import carpool
from carpool.adapters.torch.fused import StackedSession
from carpool.adapters.torch.store import Pool, Store, shuffled
from carpool.adapters.torch.train import TorchAdapter
from carpool.testing.conformance import assert_close


def double_mlp():
    return mlp().double()


def job(seed: int = 0, **changes) -> carpool.Job:
    settings = {
        "data": tables(True)["vector"],
        "loss": F.cross_entropy,
        "optimizer": partial(torch.optim.AdamW, lr=2e-3 * (1 + seed)),
        "batch_size": 16,
        "epochs": 4,
        "seed": seed,
    }
    return carpool.Job(double_mlp, **{**settings, **changes})


def assert_equal_to_plain(jobs: list[carpool.Job], **options) -> carpool.Results:
    results = carpool.train(jobs, device="cpu", reporters=[], compile=False, strategy="fused", **options)
    for one, result in zip(jobs, results, strict=True):
        got = shown(result.model, result.optimizer, result.history["loss"])
        assert_close(got, plain_loop(one, *plain_objects(one)), double=True)
    return results


def test_512_members_hold_one_copy_of_their_arrays():
    adapter = TorchAdapter(compile=False)
    x, y = tables(True)["vector"]
    many = [replace(job(i), name=f"m{i}") for i in range(512)]
    specs = [adapter.describe(one) for one in many]
    assert len({key for spec in specs for key, _ in spec.data}) == 2
    assert adapter.fuser is not None
    session = adapter.fuser.open(many, 512, "cpu", lambda *_: None)
    assert isinstance(session, StackedSession)
    held = [tensor for name, tensor in session._tensors.items() if name.startswith("data:")]
    assert sum(tensor.nbytes for tensor in held) == x.nbytes + y.nbytes
    assert len(adapter._store) == 2
    plan = carpool.plan(many[:8], device="cpu")
    assert plan.data_bytes == x.nbytes + y.nbytes


def test_numpy_arrays_are_shared_too():
    x, y = (tensor.numpy() for tensor in tables(True)["vector"])
    plan = carpool.plan([job(i, data=(x, y)) for i in range(4)], device="cpu")
    assert plan.data_bytes == x.nbytes + y.nbytes


def test_folds_are_views_of_one_copy():
    folds = np.array_split(np.random.default_rng(0).permutation(60), 5)
    jobs = [job(0, index=np.concatenate([f for j, f in enumerate(folds) if j != i])) for i in range(5)]
    assert_equal_to_plain(jobs)
    x, y = tables(True)["vector"]
    assert carpool.plan(jobs, device="cpu").data_bytes == x.nbytes + y.nbytes


def test_unequal_lengths_and_epochs_in_one_group():
    jobs = [
        job(0, index=np.arange(57), epochs=3),
        job(1, index=np.arange(58), epochs=2),
        job(2, index=np.arange(40), epochs=4),
        job(3, index=np.arange(32), epochs=5),
        job(4, index=np.arange(7), epochs=6),
    ]
    assert_equal_to_plain(jobs)


def test_members_with_arrays_of_their_own():
    rng = torch.Generator().manual_seed(0)
    own = [
        (torch.randn(n, 6, dtype=torch.float64, generator=rng), torch.randint(0, 3, (n,), generator=rng))
        for n in (30, 45, 60)
    ]
    assert_equal_to_plain([job(i, data=data) for i, data in enumerate(own)])


def test_without_shuffling_batches_come_in_order():
    assert_equal_to_plain([job(i, shuffle=False, index=np.arange(59, -1, -1)) for i in range(3)])


def test_a_dataset_of_tensors_is_its_tensors():
    x, y = tables(True)["vector"]
    results = carpool.train(
        [job(i, data=TensorDataset(x, y)) for i in range(2)], device="cpu", reporters=[], compile=False
    )
    plain = carpool.train([job(i) for i in range(2)], device="cpu", reporters=[], compile=False)
    assert results[1].history == plain[1].history


def test_a_function_that_makes_data_is_called_once():
    calls = []

    def load():
        calls.append(1)
        return tables(True)["vector"]

    carpool.train([job(i, data=load) for i in range(3)], device="cpu", reporters=[], compile=False)
    assert len(calls) == 1


def test_validation_equals_a_plain_evaluation():
    x, y = tables(True)["vector"]

    def accuracy(prediction, target):
        return (prediction.argmax(-1) == target).double().mean()

    held = (x[:37], y[:37])
    jobs = [job(i, validation_data=held, metrics={"accuracy": accuracy}) for i in range(3)]
    for result in assert_equal_to_plain(jobs):
        result.model.eval()
        with torch.no_grad():
            prediction = result.model(held[0])
        np.testing.assert_allclose(
            result.history["val_loss"][-1], F.cross_entropy(prediction, held[1]).item(), rtol=1e-9
        )
        np.testing.assert_allclose(
            result.history["val_accuracy"][-1], accuracy(prediction, held[1]).item(), rtol=1e-9
        )
        assert set(result.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}


def test_members_with_validation_data_of_their_own():
    x, y = tables(True)["vector"]
    jobs = [job(i, validation_data=(x[: 10 + 13 * i], y[: 10 + 13 * i])) for i in range(3)]
    for one, result in zip(jobs, assert_equal_to_plain(jobs), strict=True):
        held = one.validation_data
        with torch.no_grad():
            expected = F.cross_entropy(result.model.eval()(held[0]), held[1]).item()
        np.testing.assert_allclose(result.history["val_loss"][-1], expected, rtol=1e-9)


def test_the_order_on_the_device_is_the_public_order():
    seeds, epochs, length = [0, 3, -5, 2**63 + 9, 3], [0, 1, 2, 3, 1], 101
    from carpool.random import signed_seed

    rows = shuffled(
        torch.arange(length).repeat(5, 1),
        np.array([signed_seed(seed) for seed in seeds]),
        np.array(epochs),
    )
    for row, seed, epoch in zip(rows, seeds, epochs, strict=True):
        assert row.tolist() == carpool.batch_order(seed, epoch, length).tolist()


def test_a_pool_lays_distinct_arrays_end_to_end():
    adapter = TorchAdapter()
    one, two = (torch.arange(3.0), torch.arange(3)), (torch.arange(4.0) + 10, torch.arange(4) + 10)
    arrays = []
    for number, data in enumerate((one, two, one)):
        made = adapter._build(replace(job(number, data=data), name=f"p{number}"))
        arrays.append(made.data)
    pool = Pool(arrays)
    assert pool.length == 7
    joined = pool.arrays(Store(), "cpu")
    assert joined[0].tolist() == [0, 1, 2, 10, 11, 12, 13]
    assert pool.positions(arrays[1]).tolist() == [3, 4, 5, 6]
    assert pool.positions(arrays[2]).tolist() == [0, 1, 2]


def test_ten_folds_on_one_copy_equal_ten_fits_one_after_another():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import KFold

    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images) / 16, torch.from_numpy(labels).long()
    folds = [train for train, _ in KFold(n_splits=10, shuffle=True, random_state=0).split(images)]

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)).double()

    jobs = [
        carpool.Job(
            make,
            (x, y),
            index=fold,
            name=f"fold {number}",
            loss=F.cross_entropy,
            optimizer=partial(torch.optim.Adam, lr=0.01),
            batch_size=64,
            epochs=2,
            seed=number,
        )
        for number, fold in enumerate(folds)
    ]
    assert carpool.plan(jobs, device="cpu").data_bytes == x.nbytes + y.nbytes
    results = carpool.train(jobs, device="cpu", strategy="fused", reporters=[], compile=False)
    for number, fold in enumerate(folds):
        torch.manual_seed(number)
        model = make()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in range(2):
            order = fold[carpool.batch_order(number, epoch, len(fold))]
            for start in range(0, len(order), 64):
                rows = order[start : start + 64]
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
        for one, other in zip(results[number].model.parameters(), model.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-8)
