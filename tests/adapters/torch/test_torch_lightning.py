"""LightningModules as models: Lightning's own class, and one that only looks like it."""

from functools import partial
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedules
from zoo import tables

import carpool
from carpool.errors import CarpoolError, LossError, ModelError, OptimizerError
from carpool.testing.conformance import DOUBLE

X, Y = tables(True)["vector"]


class Lit(lightning.LightningModule):
    def __init__(self, configure: Any = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))
        self.double()
        self.configure = configure

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("right", (logits.argmax(1) == y).double().mean(), prog_bar=True)
        self.log_dict({"size": logits.square().mean(), "one": 1.0})
        return F.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))
        self.log("val_right", (self(x).argmax(1) == y).double().mean())

    def configure_optimizers(self) -> Any:
        if self.configure is not None:
            return self.configure(self.parameters())
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


class LooksLike(nn.Module):
    """What is asked for, without the package."""

    automatic_optimization = True

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3).double()

    def training_step(self, batch):
        return {"loss": F.cross_entropy(self.net(batch[0]), batch[1])}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def job(seed: int, make: Any = Lit, **changes) -> carpool.Job:
    settings = {"batch_size": 16, "epochs": 3, "validation_data": (X, Y), "seed": seed, "name": f"m{seed}"}
    return carpool.Job(make, (X, Y), **settings | changes)


def train(jobs: list[carpool.Job], strategy: str) -> carpool.Results:
    return carpool.train(jobs, strategy=strategy, device="cpu", compile=False, reporters=[])


def by_hand(make: Any, seed: int, every: str | None = None, frequency: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    model = make()
    made = model.configure_optimizers()
    scheduler: Any
    optimizer, scheduler = made if every else (made, None)
    turns = 0
    for epoch in range(3):
        for rows in torch.from_numpy(carpool.batch_order(seed, epoch, len(X))).split(16):
            optimizer.zero_grad()
            F.cross_entropy(model.net(X[rows]), Y[rows]).backward()
            optimizer.step()
            if every == "step":
                turns += 1
                if turns % frequency == 0:
                    scheduler.step()
        if every == "epoch":
            scheduler.step()
    return model


def assert_close(one: nn.Module, other: nn.Module) -> None:
    for mine, hers in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, hers, rtol=0, atol=DOUBLE)


@pytest.mark.parametrize("make", [Lit, LooksLike])
@pytest.mark.parametrize("strategy", ["fused", "in_turn"])
def test_equals_a_loop_by_hand(make: Any, strategy: str):
    options = {} if make is Lit else {"validation_data": None}
    for result in train([job(seed, make, **options) for seed in range(2)], strategy):
        assert result.strategy == strategy
        assert_close(result.model, by_hand(make, int(result.name[1])))


def test_what_is_logged_becomes_metrics_fused_as_alone():
    fused, alone = (train([job(seed) for seed in range(2)], s) for s in ("fused", "in_turn"))
    assert set(alone[0].history) == {"loss", "right", "size", "one", "val_loss", "val_right"}
    for one, other in zip(fused, alone, strict=True):
        assert one.history.keys() == other.history.keys()
        for name, values in other.history.items():
            assert one.history[name] == pytest.approx(values, abs=DOUBLE), name
    assert fused[0].history["one"] == (1.0, 1.0, 1.0)


def test_the_module_is_as_it_was_but_for_its_weights():
    (result,) = train([job(0)], "in_turn")
    assert "log" not in vars(result.model)
    assert "optimizers" not in vars(result.model)
    assert result.model._trainer is None


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def exponential(optimizer: torch.optim.Optimizer) -> Any:
    return schedules.ExponentialLR(optimizer, gamma=0.7)


def with_config(parameters: Any, **config) -> Any:
    optimizer = sgd(parameters)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": exponential(optimizer), **config}}


def as_dict(parameters: Any) -> Any:
    optimizer = sgd(parameters)
    return {"optimizer": optimizer, "lr_scheduler": exponential(optimizer)}


def as_lists(parameters: Any) -> Any:
    optimizer = sgd(parameters)
    return [optimizer], [exponential(optimizer)]


def as_lists_with_config(parameters: Any) -> Any:
    optimizer = sgd(parameters)
    return [optimizer], [{"scheduler": exponential(optimizer), "interval": "step", "frequency": 5}]


def only_dict(parameters: Any) -> Any:
    return {"optimizer": sgd(parameters)}


def as_list(parameters: Any) -> Any:
    return [sgd(parameters)]


FORMS: dict[str, tuple[Any, str | None, int]] = {
    "optimizer": (sgd, None, 1),
    "dict without scheduler": (only_dict, None, 1),
    "list": (as_list, None, 1),
    "dict": (as_dict, "epoch", 1),
    "lists": (as_lists, "epoch", 1),
    "config by step": (partial(with_config, interval="step"), "step", 1),
    "config every third step": (partial(with_config, interval="step", frequency=3), "step", 3),
    "lists with config": (as_lists_with_config, "step", 5),
}


class Pair(Lit):
    """Optimizer and scheduler as a loop by hand wants them."""

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self.parameters())
        return optimizer, exponential(optimizer)


class Single(Lit):
    def configure_optimizers(self) -> Any:
        return sgd(self.parameters())


@pytest.mark.parametrize("strategy", ["fused", "in_turn"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_configure_optimizers(form: str, strategy: str):
    configure, every, frequency = FORMS[form]
    for result in train([job(seed, partial(Lit, configure)) for seed in range(2)], strategy):
        assert_close(result.model, by_hand(Pair if every else Single, int(result.name[1]), every, frequency))


def plateau(parameters: Any) -> Any:
    optimizer = sgd(parameters)
    scheduler = schedules.ReduceLROnPlateau(optimizer, mode="max", patience=0, threshold=10.0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_right"}}


@pytest.mark.parametrize("strategy", ["fused", "in_turn"])
def test_a_monitor_watches_what_was_logged(strategy: str):
    results = train([job(seed, partial(Lit, plateau)) for seed in range(2)], strategy)
    assert results[0].scheduler.best == results[0].history["val_right"][0]
    assert results[0].optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1 * 0.1)


def test_an_optimizer_of_the_job_takes_the_place_of_its_own_so_rates_fuse():
    jobs = [job(0, optimizer=partial(torch.optim.SGD, lr=lr), name=str(lr)) for lr in (0.1, 0.2)]
    assert {result.strategy for result in train(jobs, "fused")} == {"fused"}


class Manual(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()  # type: ignore[misc]
        for layer, optimizer, name in ((self.a, first, "a_loss"), (self.b, second, "b_loss")):
            self.toggle_optimizer(optimizer)
            loss = F.cross_entropy(layer(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5)  # type: ignore[arg-type]
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log(name, loss)
        if batch_idx == 3:
            self.lr_schedulers().step()  # type: ignore[union-attr,call-arg]

    def configure_optimizers(self):
        first, second = sgd(self.a.parameters()), torch.optim.Adam(self.b.parameters(), lr=1e-2)
        return [first, second], [exponential(first)]


def test_manual_optimization_runs_alone_with_the_reason():
    results = train([job(seed, Manual, validation_data=None) for seed in range(2)], "auto")
    assert "fused" not in {result.strategy for result in results}
    assert "automatic_optimization is False" in results[0].reason
    torch.manual_seed(0)
    model = Manual()
    (first, second), (scheduler,) = model.configure_optimizers()
    for epoch in range(3):
        for rows in torch.from_numpy(carpool.batch_order(0, epoch, len(X))).split(16):
            for layer, optimizer in ((model.a, first), (model.b, second)):
                optimizer.zero_grad()
                F.cross_entropy(layer(X[rows]), Y[rows]).backward()
                nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
                optimizer.step()
        scheduler.step()
    assert_close(results[0].model, model)
    assert [type(optimizer) for optimizer in results[0].optimizer] == [torch.optim.SGD, torch.optim.Adam]
    history = results[0].history
    assert history["loss"] == pytest.approx(
        [a + b for a, b in zip(history["a_loss"], history["b_loss"], strict=True)]
    )


class Hooked(Lit):
    def on_train_epoch_end(self) -> None: ...

    def on_save_checkpoint(self, checkpoint: Any) -> None: ...


class Unvalidated(LooksLike): ...


class Asking(Lit):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.current_epoch)


class Sometimes(Lit):
    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.log("first", 1.0)
        return super().training_step(batch, batch_idx)


class Silent(Lit):
    def training_step(self, batch, batch_idx) -> Any:
        return None


def several(parameters: Any) -> Any:
    own = list(parameters)
    return [sgd(own[:2]), sgd(own[2:])]


@pytest.mark.parametrize(
    ("make", "options", "error", "words"),
    [
        (Hooked, {}, ModelError, "on_train_epoch_end"),
        (Unvalidated, {}, ModelError, "a validation_step for validation_data"),
        (Asking, {}, CarpoolError, "current_epoch"),
        (partial(Lit, several), {}, OptimizerError, "2 from configure_optimizers"),
        (partial(Lit, lambda _: None), {}, OptimizerError, "to return torch optimizers"),
        (partial(Lit, partial(with_config, interval="week")), {}, OptimizerError, "week"),
        (Silent, {}, LossError, "loss to be a tensor"),
        (Manual, {"clip_norm": 1.0, "validation_data": None}, CarpoolError, "no clip_norm where"),
    ],
)
def test_misuse_is_refused(make: Any, options: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        train([job(0, make, **options)], "auto")


def test_a_branch_on_the_batch_number_runs_alone():
    results = train([job(seed, Sometimes) for seed in range(2)], "auto")
    assert "fused" not in {result.strategy for result in results}
    assert "if batch_idx == 0" in results[0].reason
    assert results[0].history["first"] == pytest.approx([16 / 60] * 3)


def test_importing_carpools_adapter_imports_no_lightning():
    import subprocess
    import sys

    code = "import sys, carpool.adapters.torch.train; print('lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
