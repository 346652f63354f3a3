"""`phases=`: several updates in a training step, held against a GAN's loop written by hand."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, TensorDataset

import carpool
from carpool.errors import JobError, LossError, ModelError, OptimizerError
from carpool.kernels.updates import UPDATES
from carpool.kernels.updates.adagrad import Adagrad
from carpool.result import Outcome
from carpool.testing.conformance import DOUBLE

torch.manual_seed(0)
REAL, NOISE = torch.randn(44, 3, dtype=torch.float64), torch.randn(44, 2, dtype=torch.float64)
STREAM = DataLoader(TensorDataset(REAL, NOISE), batch_size=8)
COSINE = partial(schedules.CosineAnnealingLR, T_max=7)
BY_STEP = carpool.Schedule(COSINE, every="step")


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        self.double()


def critic(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    real, noise = batch
    right, wrong = model.discriminator(real), model.discriminator(model.generator(noise))
    return {
        "loss": F.softplus(-right).mean() + F.softplus(wrong).mean(),
        "right": (right > 0).double().mean(),
    }


def artist(model: Any, batch: Any) -> torch.Tensor:
    return F.softplus(-model.discriminator(model.generator(batch[1]))).mean()


def noisy_critic(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    return critic(model, (batch[0], torch.randn(len(batch[0]), 2, dtype=torch.float64)))


def noisy_artist(model: Any, batch: Any) -> torch.Tensor:
    return artist(model, (batch[0], torch.randn(len(batch[0]), 2, dtype=torch.float64)))


PLAIN = (torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9))


def job(
    seed: int, steps=(critic, artist), every=(1, 1), schedule=(None, None), kinds=PLAIN, **changes
) -> carpool.Job:
    makes = [partial(kind, lr=1e-2 / (1 + seed)) for kind in kinds]
    phases = [
        carpool.Phase(steps[0], makes[0], schedule[0], every[0], "discriminator", "critic"),
        carpool.Phase(steps[1], makes[1], schedule[1], every[1], "generator", "artist"),
    ]
    settings = {
        "epochs": 4,
        "batch_size": 8,
        "validation_data": (REAL, NOISE),
        "seed": seed,
        "name": f"m{seed}",
    }
    return carpool.Job(Gan, changes.pop("data", (REAL, NOISE)), phases=phases, **settings | changes)


def train(jobs: list[carpool.Job], strategy: str, **options) -> carpool.Results:
    return carpool.train(jobs, strategy=strategy, device="cpu", compile=False, reporters=[], **options)


def by_hand(job: carpool.Job) -> tuple[nn.Module, list[torch.optim.Optimizer], dict[str, list[float]]]:
    torch.manual_seed(job.seed)
    model = Gan()
    assert job.phases is not None
    parts = [model.discriminator, model.generator]
    optimizers = [p.optimizer(part.parameters()) for p, part in zip(job.phases, parts, strict=True)]
    timers: list[Any] = [
        COSINE(o) if p.scheduler else None for p, o in zip(job.phases, optimizers, strict=True)
    ]
    history: dict[str, list[float]] = {"critic_loss": [], "artist_loss": []}
    number, last = 0, [0.0, 0.0]
    for epoch in range(job.epochs):
        totals = [0.0, 0.0]
        order = carpool.batch_order(job.seed, epoch, len(REAL)) if job.shuffle else np.arange(len(REAL))
        for rows in torch.from_numpy(order).split(job.batch_size):
            for place, phase in enumerate(job.phases):
                if number % phase.every == 0:
                    made = phase.step(model, (REAL[rows], NOISE[rows]))
                    loss = made["loss"] if isinstance(made, dict) else made
                    model.zero_grad()
                    loss.backward()
                    if job.clip_norm:
                        nn.utils.clip_grad_norm_(parts[place].parameters(), job.clip_norm)
                    optimizers[place].step()
                    last[place] = loss.item()
                    if isinstance(phase.scheduler, carpool.Schedule):
                        timers[place].step()
                totals[place] += last[place] * len(rows)
            number += 1
        for phase, timer in zip(job.phases, timers, strict=True):
            if timer is not None and not isinstance(phase.scheduler, carpool.Schedule):
                timer.step()
        for name, total in zip(history, totals, strict=True):
            history[name].append(total / len(REAL))
    return model, optimizers, history


def assert_close(one: nn.Module, other: nn.Module, atol: float = DOUBLE) -> None:
    for mine, hers in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, hers, rtol=0, atol=atol)


def assert_same_state(mine: Sequence[torch.optim.Optimizer], hers: Sequence[torch.optim.Optimizer]) -> None:
    for one, other in zip(mine, hers, strict=True):
        assert one.param_groups[0]["lr"] == pytest.approx(other.param_groups[0]["lr"])
        for p, q in zip(one.state.values(), other.state.values(), strict=True):
            assert {name for name in p if p[name] is not None} == {name for name in q if q[name] is not None}
            for slot, value in q.items():
                torch.testing.assert_close(p[slot], value, rtol=0, atol=DOUBLE)


TALLIED = (torch.optim.NAdam, partial(torch.optim.Adagrad, initial_accumulator_value=0.1))
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "a tally, and state before the first step": {"kinds": TALLIED},
    "the same seldom": {"kinds": TALLIED[::-1], "every": (2, 3)},
    "one slot name in both": {"kinds": (torch.optim.NAdam, torch.optim.RAdam), "schedule": (BY_STEP, None)},
    "streamed": {"data": STREAM, "shuffle": False, "every": (1, 2)},
    "clipped": {"clip_norm": 0.05},
    "generator seldom": {"every": (1, 4)},
    "both seldom": {"every": (2, 3), "schedule": (BY_STEP, BY_STEP)},
    "schedules": {"schedule": (COSINE, BY_STEP)},
}


CONTAINED = ("plain", "a tally, and state before the first step", "generator seldom")
"""Another case has all of each: schedules, the same seldom, both seldom."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fused", "interleaved"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in CONTAINED)) for case in CASES]
)
def test_a_gan_equals_a_loop_by_hand(case: str, strategy: str):
    jobs = [job(seed, **CASES[case]) for seed in range(3)]
    for one, result in zip(jobs, train(jobs, strategy), strict=True):
        model, optimizers, history = by_hand(one)
        assert (result.error, result.strategy) == (None, strategy)
        assert_close(result.model, model)
        assert_same_state(result.optimizer, optimizers)
        for name, values in history.items():
            assert result.history[name] == pytest.approx(values, abs=DOUBLE)
        sums = [sum(pair) for pair in zip(*history.values(), strict=True)]
        assert result.history["loss"] == pytest.approx(sums, abs=DOUBLE)
        assert {"right", "val_loss", "val_critic_loss", "val_artist_loss", "val_right"} <= set(result.history)


@pytest.mark.parametrize("every", [(1, 1), pytest.param((1, 3), marks=pytest.mark.slow)])
def test_noise_is_keyed_so_a_fused_gan_equals_itself_alone(every: tuple[int, int]):
    lengths = [44, 30, 21]

    def jobs() -> list[carpool.Job]:
        return [
            job(seed, (noisy_critic, noisy_artist), every, (COSINE, BY_STEP), index=range(length))
            for seed, length in enumerate(lengths)
        ]

    fused, alone = train(jobs(), "fused", verify=True), train(jobs(), "in_turn")
    for one, other in zip(fused, alone, strict=True):
        assert_close(one.model, other.model)
        assert one.history.keys() == other.history.keys()
        for name, values in other.history.items():
            assert one.history[name] == pytest.approx(values, abs=DOUBLE), name
        assert_same_state(one.optimizer, other.optimizer)


class Forgetful(Adagrad):
    def apply(self, weight, grad, slots, columns, options):
        new, *kept = super().apply(weight, grad, slots, columns, options)
        return [new, *(slot * 0.9 for slot in kept)]


def test_the_check_looks_at_the_state_of_every_phase(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(UPDATES, torch.optim.Adagrad, Forgetful())
    kinds = (torch.optim.Adam, torch.optim.Adagrad)
    results = train([job(seed, kinds=kinds) for seed in range(2)], "auto")
    assert "at 'sum' of 'generator." in results[0].reason


def test_the_results_hold_a_tuple_of_optimizers_and_one_of_schedulers():
    (result,) = train([job(0, schedule=(None, COSINE))], "in_turn")
    assert [type(optimizer) for optimizer in result.optimizer] == [torch.optim.Adam, torch.optim.SGD]
    assert result.scheduler[0] is None
    assert result.scheduler[1].last_epoch == 4


def test_a_phase_gives_no_gradient_to_the_other_phases_parameters():
    (result,) = train([job(0, every=(1, 1000), epochs=1)], "in_turn")
    torch.manual_seed(0)
    start = Gan()
    moved = {name for name, p in result.model.named_parameters() if (p != start.get_parameter(name)).any()}
    assert {name.split(".")[0] for name in moved} == {"discriminator", "generator"}
    assert {int(s["step"]) for s in result.optimizer[0].state.values()} == {6}
    assert all(p.grad is None for p in result.model.parameters())


def test_a_job_whose_second_phase_diverges_ends_alike_and_leaves_its_neighbours_bits():
    holed = NOISE.clone()
    holed[carpool.batch_order(1, 0, len(NOISE))[18]] = torch.nan

    def only_real(model: Any, batch: Any) -> torch.Tensor:
        return F.softplus(-model.discriminator(batch[0])).mean()

    def jobs(noise: torch.Tensor) -> list[carpool.Job]:
        data = [(REAL, NOISE), (REAL, noise), (REAL, NOISE)]
        return [job(s, (only_real, artist), data=data[s], validation_data=None) for s in range(3)]

    sound, broken = train(jobs(NOISE), "fused"), train(jobs(holed), "fused")
    (single,) = train([jobs(holed)[1]], "in_turn")
    assert broken[1].outcome is single.outcome is Outcome.DIVERGED
    assert broken[1].steps == single.steps == 2
    assert_close(broken[1].model, single.model)
    for mine, hers in zip(broken[1].optimizer, single.optimizer, strict=True):
        assert [s.get("step") for s in mine.state.values()] == [s.get("step") for s in hers.state.values()]
    for row in (0, 2):
        assert_close(sound[row].model, broken[row].model, atol=0)


def test_a_parameter_of_two_phases_trains_alone_and_is_not_fused():
    def jobs() -> list[carpool.Job]:
        make = partial(torch.optim.Adam, lr=1e-2)
        phases = [carpool.Phase(critic, make), carpool.Phase(artist, make, of="generator")]
        return [carpool.Job(Gan, (REAL, NOISE), phases=phases, seed=s, name=str(s)) for s in range(2)]

    results = train(jobs(), "auto")
    assert "fused" not in {r.strategy for r in results}
    assert "'generator.0.weight' is held by two phases, 'critic' and 'artist'" in results[0].reason
    assert [len(optimizer.state) for optimizer in results[0].optimizer] == [10, 6]


def test_phases_of_one_name_are_numbered():
    def phase(of: str) -> carpool.Phase:
        return carpool.Phase(artist, partial(torch.optim.SGD, lr=0.1), of=of)

    one = carpool.Job(Gan, (REAL, NOISE), phases=[phase("generator"), phase("discriminator")])
    assert set(train([one], "in_turn")[0].history) == {"loss", "artist-0_loss", "artist-1_loss"}


def test_jobs_whose_phases_differ_are_different_structures():
    plan = carpool.plan([job(0), job(1), job(2, every=(1, 2))], device="cpu")
    assert "'phases[1].every=' is 2, expected 1" in plan.groups[1].reason


SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"phases": []}, JobError, "at least one phase"),
        ({"phases": [artist]}, JobError, "carpool.Phase objects"),
        ({"phases": [carpool.Phase(artist, SGD)], "loss": F.mse_loss}, JobError, "either phases= or loss="),
        (
            {"phases": [carpool.Phase(artist, SGD)], "optimizer": SGD},
            JobError,
            "either phases= or optimizer=",
        ),
        ({"phases": [carpool.Phase(artist, SGD)], "accumulate": 2}, JobError, "phases without accumulate"),
        ({"phases": [carpool.Phase(artist, SGD, of="painter")]}, ModelError, "generator, discriminator"),
        ({"phases": [carpool.Phase(artist, SGD, of="generator.2")]}, OptimizerError, "parameters for phase"),
        (
            {
                "phases": [
                    carpool.Phase(critic, SGD, of="discriminator"),
                    carpool.Phase(critic, SGD, name="b"),
                ]
            },
            LossError,
            "'right' from two",
        ),
    ],
)
def test_misuse_is_refused(options: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        train([carpool.Job(Gan, (REAL, NOISE), **options)], "auto")


@pytest.mark.parametrize(
    ("options", "words"), [({"every": 0}, "every of at least 1"), ({"name": " "}, "name")]
)
def test_a_wrong_phase_is_refused(options: dict[str, Any], words: str):
    with pytest.raises(JobError, match=words):
        carpool.Phase(artist, SGD, **options)


def test_a_step_that_is_no_function_is_refused():
    with pytest.raises(LossError, match="step to be a function"):
        carpool.Phase(3, SGD)  # type: ignore[arg-type]
