"""What a job draws from the process's generators depends on its own seed alone, whatever draws beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import carpool
from drawing import Meeting, Source, at_once, own_generators

X, Y = torch.randn(12, 3), torch.randn(12, 1)


class Noisy(nn.Module):
    """Draws from all three generators, by what no key replaces: it runs operator by operator."""

    def __init__(self, meet: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.net, self._meet = nn.Linear(3, 1), meet
        self.scale = random.random() + float(np.random.rand())

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:  # a step, and none that only looks at shapes
            self._meet()
        drawn = torch.multinomial(torch.ones(8), 3).float()
        return self.net(x * drawn * np.random.rand() * random.random())


def job(make: Callable[[], nn.Module], data: Any = (X, Y), **arguments: Any) -> carpool.Job:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    said = {"batch_size": 4, "epochs": 2, "loss": F.mse_loss, "optimizer": optimizer, **arguments}
    return carpool.Job(make, data, **said)


def train(*jobs: carpool.Job, strategy: str = "interleaved") -> carpool.Results:
    return carpool.train(list(jobs), device="cpu", strategy=strategy, reporters=[])


def bits(result: carpool.Result) -> dict[str, bytes]:
    held = {name: leaf.numpy().tobytes() for name, leaf in result.model.state_dict().items()}
    return {**held, "scale": np.float64(getattr(result.model, "scale", 0)).tobytes()}


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.randn(3),
    "numpy": lambda: np.random.rand(),
    "python": lambda: random.random(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_job_beside_a_source_that_draws_has_the_weights_and_the_end_that_it_has_alone(draw: Any):
    source = Source((X[:4], Y[:4]), draw)
    beside = train(
        job(lambda: nn.Linear(3, 1), source, name="source", epochs=1, prefetch=1 << 20),
        job(lambda: source.beside(Noisy), name="beside", seed=3),
    )
    alone = train(job(Noisy, name="beside", seed=3))
    assert bits(beside["beside"]) == bits(alone["beside"])


def test_two_threads_that_train_at_once_leave_each_job_with_the_bits_of_running_alone():
    made, stepped = Meeting(), Meeting()

    def noisy() -> nn.Module:
        made.meet()
        return Noisy(stepped.meet)

    alone = [bits(train(job(Noisy, seed=seed))[0]) for seed in (1, 2)]
    runs = [partial(train, job(noisy, seed=seed)) for seed in (1, 2)]
    assert [bits(results[0]) for results in at_once(*runs)] == alone


def test_training_leaves_the_processs_own_generators_as_they_were():
    class Drawing:
        def __iter__(self) -> Any:
            for draw in DRAWS.values():
                draw()
                yield X[:4], Y[:4]

    def data() -> Any:
        return X + torch.randn(()), Y + float(np.random.rand()) + random.random()

    def calls_back(event: Any) -> None:
        for draw in DRAWS.values():
            draw()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=10 ** random.uniform(-3, -2))

    before = own_generators(), torch.get_rng_state().tolist()
    results = train(
        job(Noisy, Drawing(), name="source"),
        job(Noisy, data, name="function", callbacks=[calls_back], optimizer=optimizer),
        job(lambda: nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5)), name="stack", callbacks=[calls_back]),
        strategy="auto",
    )
    assert not results.failed
    assert (own_generators(), torch.get_rng_state().tolist()) == before


def test_data_that_functions_draw_is_what_each_draws_alone():
    def drawn(name: str) -> carpool.Job:
        return job(lambda: nn.Linear(3, 1), lambda: (torch.randn(8, 3), torch.randn(8, 1)), name=name)

    together = train(drawn("a"), drawn("b"))
    alone = train(drawn("b"))
    assert bits(together["b"]) == bits(alone["b"])


def test_what_callbacks_and_optimizers_factories_draw_depends_on_their_jobs_seed_alone():
    def drawing(name: str, seed: int) -> carpool.Job:
        made: list[Any] = []

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            made.append(torch.optim.SGD(parameters, lr=random.uniform(0.01, 0.1)))
            return made[-1]

        def moves(event: Any) -> None:
            made[-1].param_groups[0]["lr"] *= random.choice([0.5, 2.0]) + np.random.rand()

        return job(
            lambda: nn.Linear(3, 1), name=name, seed=seed, callbacks=[moves], optimizer=optimizer, epochs=3
        )

    together = train(drawing("a", 1), drawing("b", 2))
    alone = train(drawing("b", 2))
    assert bits(together["b"]) == bits(alone["b"])
    assert bits(together["a"]) != bits(together["b"])
