"""Steps of random nets as machine code: as near to float64 as torch's own float32 is, and always of the same bits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from resident_beside import Beside, faults_of
from resident_nets import ACTIVATIONS, LOSSES, OPTIMIZERS, net

from carpool import machine, processor
from carpool.kernels.resident.builder import Refused
from carpool.kernels.updates import UPDATES
from carpool.machine import targets
from carpool.processor import Processor

pytestmark = pytest.mark.skipif(machine.unavailable() is not None, reason="no compiler of C")

MANY = 300
FAST = (5, 7, 8, 13, 14, 18, 31, 32, 44, 58)
REFUSED: dict[int, str] = {}
"""Nets whose steps are not made, and why."""


@pytest.mark.parametrize("number", FAST)
def test_a_net_is_as_near_to_float64_as_torch_is(number: int):
    check(number)


@pytest.mark.slow
@pytest.mark.parametrize("number", [number for number in range(MANY) if number not in FAST])
def test_many_nets_are_as_near_to_float64_as_torch_is(number: int):
    check(number)


def check(number: int) -> None:
    drawn = net(number)
    beside = Beside(drawn.jobs)
    try:
        for chunk in beside.chunks():
            beside.take_traced(chunk)
            if number in REFUSED:
                with pytest.raises(Refused, match=REFUSED[number]):
                    beside.bound(chunk.size)
                return
            assert beside.bound(chunk.size).run(chunk.steps, threads=1) == {}
        assert faults_of(beside, drawn.double) == [], str(drawn)
    finally:
        beside.close()


HERE = processor.processor()
ZEN_5 = replace(HERE, vendor="AuthenticAMD", family=26)
OTHERS = {
    "of another family": replace(ZEN_5, family=25),
    "of another maker": replace(ZEN_5, vendor="GenuineIntel"),
    "without AVX-512": replace(ZEN_5, flags=HERE.flags - targets._V4.keys()),
    "without AVX2": replace(ZEN_5, flags=HERE.flags - targets._V4.keys() - {"avx", "avx2", "fma"}),
}


@pytest.mark.skipif(not targets.is_wide(ZEN_5), reason="a processor without AVX-512")
@pytest.mark.parametrize("here", [ZEN_5, OTHERS["of another family"]], ids=["64 bytes", "32 bytes"])
@pytest.mark.parametrize("number", FAST[:3])
def test_vectors_of_any_width_are_as_near(number: int, here: Processor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "processor", lambda: here)
    machine._desk.cache_clear()
    check(number)


@pytest.mark.parametrize("other", OTHERS)
def test_processors_for_which_wide_vectors_were_not_timed_have_the_same_code(
    other: str, monkeypatch: pytest.MonkeyPatch
):
    drawn = net(FAST[0])
    monkeypatch.setattr(machine, "processor", lambda: OTHERS[other])
    there, narrow = Beside(drawn.jobs), Beside(drawn.jobs, vector_bytes=32)
    size = next(there.chunks()).size
    assert there.code(size) == narrow.code(size)


def test_the_nets_use_everything_that_is_listed():
    words = {word for number in range(MANY) for word in net(number).words}
    assert words >= {*ACTIVATIONS, *LOSSES, *OPTIMIZERS, "layer", "batch", "batch_plain", "group", "dropout"}
    assert words >= {"groups", "clip_norm", "accumulate", "scheduler", "metrics", "frozen", "tied", "both"}
    made = {type(make([torch.zeros(1, requires_grad=True)], lr=0.1)) for make, _ in OPTIMIZERS.values()}
    assert made >= {kind for kind in UPDATES if kind.__module__.startswith("torch.")}


# Bits

STEADY = (31, 35, 67)
"""With norms, dropout, clipping, groups, gathered gradients and words among them."""


def steps(beside: Beside, threads: int = 1, at_once: int = 64) -> None:
    """All steps of all members as machine code; what they are fed comes as the traced ones would be."""
    for chunk in beside.chunks():
        bound = beside.bound(chunk.size)
        for start in range(0, chunk.steps, at_once):
            assert bound.run(min(at_once, chunk.steps - start), threads) == {}
        beside.keep(beside.made)


def same(first: Beside, second: Beside, rows: int, but: tuple[str, ...] = ()) -> None:
    """Whether the first rows have the same bits."""
    for name in first.state:
        if name not in but:
            one, other = (bits(beside.made[name]) for beside in (first, second))
            assert torch.equal(one[:rows], other[:rows]) if one.dim() else torch.equal(one, other), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """So that NaN is itself, and zeros have signs."""
    kinds = {torch.float32: torch.int32, torch.float64: torch.int64}
    return tensor.contiguous().view(kinds.get(tensor.dtype, tensor.dtype))


@pytest.mark.parametrize("number", STEADY)
def test_a_member_has_the_same_bits_alone_among_many_and_in_threads(number: int):
    alone, among, threaded = (Beside(net(number, members=count).jobs) for count in (1, 24, 24))
    steps(alone)
    steps(among)
    steps(threaded, threads=2)
    same(alone, among, 1)
    same(among, threaded, 24)


@pytest.mark.parametrize("number", STEADY)
def test_steps_in_several_calls_are_the_same_steps(number: int):
    one, many = Beside(net(number).jobs), Beside(net(number).jobs)
    steps(one)
    steps(many, at_once=1)
    same(one, many, 2)


@pytest.mark.parametrize("number", STEADY)
def test_a_member_does_not_notice_that_another_leaves_fails_or_is_replaced(number: int):
    plain, moved = (Beside(net(number, members=4).jobs) for _ in range(2))
    steps(plain)
    for chunk in moved.chunks():
        bound = moved.bound(chunk.size)
        moved.made["active"][1] = False  # it left
        moved.made["weights"][2] = math.nan
        moved.made["alive"][2] = True
        moved.made["weights"][3] += 1.0  # another came
        before = {name: moved.made[name][1:3].clone() for name in moved.state if name not in ("k", "alive")}
        assert bound.run(chunk.steps, threads=2) == {}
        assert moved.made["alive"].tolist()[:3] == [True, True, False]
        for name, then in before.items():
            assert torch.equal(bits(moved.made[name][1:3]), bits(then)), name
        moved.keep(moved.made)
        moved.traced["alive"].fill_(True)
    same(plain, moved, 1)


def test_what_is_read_out_of_one_stack_goes_on_in_another():
    whole, first, second = (Beside(net(31).jobs) for _ in range(3))
    steps(whole)
    for chunk, other in zip(first.chunks(1), second.chunks(1), strict=True):
        taker, rest = (first, second) if chunk.cursors[0].step % 2 else (second, first)
        assert taker.bound(chunk.size).run(1, threads=1) == {}
        for name in taker.state:
            rest.made[name].copy_(taker.made[name])
        first.keep(first.made)
        second.keep(second.made)
        assert other.steps == 1
    same(whole, first, 2, but=("sums", "taken", "k"))


def test_a_place_out_of_bounds_is_its_own_members_error():
    """At its step, of which nothing is kept; the others go on."""
    drawn = net(11, members=3)
    plain, wrong = Beside(drawn.jobs), Beside(drawn.jobs)
    there, chunk = next(plain.chunks()), next(wrong.chunks())
    first = wrong.made["first"][1] + 2 * chunk.size
    sample = wrong.made["order"].view(-1)[first]
    orders = wrong.made["order"].view(-1)[
        wrong.made["first"][:, None] + torch.arange(chunk.steps * chunk.size)
    ]
    met = [int((order == sample).nonzero()) // chunk.size for order in orders]
    states = []
    for _ in range(there.steps):
        states.append({name: plain.made[name].clone() for name in plain.state})
        assert plain.bound(there.size).run(1, threads=1) == {}
    words = next(
        tensor
        for name, tensor in wrong.made.items()
        if name.startswith("data:") and tensor.dtype is torch.int64
    )
    words[sample] = 10**6
    assert wrong.bound(chunk.size).run(chunk.steps, threads=2) == dict(enumerate(met))
    for row, step in enumerate(met):
        for name in (name for name in wrong.state if name != "k"):
            assert torch.equal(wrong.made[name][row], states[step][name][row]), name


def test_a_dry_run_keeps_nothing():
    beside = Beside(net(35).jobs)
    chunk = next(beside.chunks())
    before = {name: beside.made[name].clone() for name in beside.state}
    beside.bound(chunk.size).rehearsed_s(chunk.steps, threads=1)
    for name, then in before.items():
        assert torch.equal(bits(beside.made[name]), bits(then)), name
