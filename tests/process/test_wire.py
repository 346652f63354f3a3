"""Messages to workers: large arrays beside the pickle, once each, and gone with the last process that maps them."""

import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from carpool.process.wire import LARGE_BYTES, Blocks, Channel, Closed


@pytest.fixture
def ends():
    ours, theirs = (Channel(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def sent(ends, message, blocks=None):
    ours, theirs = ends
    ours.send(message, blocks)
    return theirs.wait().decode()


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


ARRAYS = {
    "C": np.arange(60_000, dtype=np.float64).reshape(200, 300),
    "Fortran": np.asfortranarray(np.arange(60_000, dtype=np.int32).reshape(200, 300)),
    "strided": np.arange(120_000, dtype=np.float32).reshape(200, 600)[:, ::2],
    "dates": np.arange(20_000).astype("datetime64[s]"),
    "records": np.zeros(20_000, dtype=[("a", "i4"), ("b", "f8")]),
    "small": np.arange(3),
    "objects": np.array([{"a": 1}] * 20_000, dtype=object),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_arrive_as_they_were(ends, kind):
    array = ARRAYS[kind]
    found = sent(ends, array)
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.flags.f_contiguous == array.flags.f_contiguous
    np.testing.assert_array_equal(found, array)


def test_no_batch_is_ever_pickled(ends):
    """50 MB of data, as arrays and as tensors, are a few hundred bytes on the wire."""
    x, y = np.ones((1_000_000, 5), dtype=np.float64), torch.ones(2_500_000)
    found = sent(ends, {"data": (x, y)})
    assert x.nbytes + y.nbytes == 50_000_000
    assert ends[0].sent_bytes < 2_000
    assert found["data"][0].sum() == 5_000_000
    assert float(found["data"][1].sum()) == 2_500_000


def test_what_is_written_into_an_array_is_seen_by_nobody_else(ends):
    x = np.zeros(LARGE_BYTES)
    with Blocks() as blocks:
        for _ in range(2):
            blocks.survey(x)
        blocks.surveyed()
        first, second = sent(ends, x, blocks), sent(ends, x, blocks)
        first[:] = 1
        assert not second.any()
        assert not x.any()
        assert not sent(ends, x, blocks).any()


def test_an_array_that_several_messages_name_is_written_once(ends, monkeypatch):
    written = []
    place = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *of: (written.append(of[2]), place(*of)))
    shared, own = np.ones(1_000_000), [np.full(20_000, i, float) for i in range(3)]
    tensor = torch.ones(1_000_000)
    with Blocks() as blocks:
        for array in own:
            blocks.survey((shared, array, tensor))
        blocks.surveyed()
        for number, array in enumerate(own):
            found = sent(ends, (shared, array, tensor), blocks)
            assert (found[0][0], found[1][0], float(found[2][0])) == (1, number, 1)
    assert sum(written) == pytest.approx(8_000_000 + 4_000_000 + 3 * 160_000, abs=1_000)


def test_an_array_named_by_one_message_only_is_not_kept(ends):
    before = open_descriptors()
    with Blocks() as blocks:
        blocks.survey(np.ones(100_000))
        blocks.surveyed()
        sent(ends, np.ones(100_000), blocks)
        assert open_descriptors() == before


def test_one_array_named_twice_stays_one_object(ends):
    x = np.ones(100_000)
    a, b = sent(ends, (x, x))
    assert a is b


def test_tensors_keep_their_views_parameters_and_ties(ends):
    base = torch.arange(100_000.0)
    model = nn.Linear(300, 300)
    model.other = model.weight
    base_, row, model_, optimizer = sent(
        ends, (base, base[10:20], model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    )
    row += 1
    assert base_[10] == 11
    assert model_.other is model_.weight
    assert optimizer.param_groups[0]["params"][0] is model_.weight
    assert torch.equal(model_.weight, model.weight)
    assert model_.weight.requires_grad


def test_layouts_of_tensors_stay(ends):
    images = torch.randn(8, 16, 32, 32).to(memory_format=torch.channels_last)
    found = sent(ends, images)
    assert found.stride() == images.stride()
    assert torch.equal(found, images)
    assert (
        found.data_ptr() % 64 == 0
    )  # as torch's own allocator has it: kernels may round differently elsewhere


def test_lambdas_and_closures_travel(ends):
    offset = np.ones(100_000)
    assert sent(ends, lambda x: (x + offset).sum())(2) == 300_000


def test_nothing_is_left_open_or_in_shared_memory(ends):
    named = set(os.listdir("/dev/shm"))
    before = open_descriptors()
    for _ in range(3):
        sent(ends, [np.ones(100_000), torch.ones(100_000)])
    assert open_descriptors() == before
    assert set(os.listdir("/dev/shm")) == named


def test_what_cannot_be_pickled_raises_and_sends_nothing(ends):
    ours, theirs = ends
    before = open_descriptors()
    with pytest.raises(TypeError, match="pickle"):
        ours.send((np.ones(100_000), threading.Lock()))
    assert theirs.poll() is None
    assert open_descriptors() == before


def test_hundreds_of_blocks_in_one_message(ends):
    arrays = [np.full(LARGE_BYTES // 8, i, float) for i in range(450)]
    with Blocks() as blocks:
        for array in arrays:
            for _ in range(2):
                blocks.survey(array)
        blocks.surveyed()
        for array in arrays:
            sent(ends, array, blocks)
        assert [int(found[0]) for found in sent(ends, arrays, blocks)] == list(range(450))


def test_messages_of_megabytes_arrive_whole_and_in_order(ends):
    ours, theirs = ends
    texts = [str(i) * 3_000_000 for i in range(3)]
    sender = threading.Thread(target=lambda: [ours.send(text) for text in texts])
    sender.start()
    assert [theirs.wait().decode() for _ in texts] == texts
    sender.join()
    assert theirs.poll() is None


def test_the_end_of_the_other_side_is_told(ends):
    ours, theirs = ends
    ours.send("last")
    ours.close()
    assert theirs.wait().decode() == "last"
    with pytest.raises(Closed):
        theirs.wait()
    with pytest.raises(Closed):
        theirs.send("into the void")
