"""A stack and predictions on a GPU: captured steps end where plain loops end, outputs come home."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import carpool

pytestmark = pytest.mark.gpu


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("compile", [False, True])
def test_a_captured_stack_equals_plain_loops(compile: bool):
    xs = torch.randn(50, 8, 6, dtype=torch.float64, device="cuda")
    ys = torch.randint(0, 3, (50, 8), device="cuda")
    models = [net().cuda() for _ in range(4)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3 * (i + 1)) for i, m in enumerate(models)]
    twins, their_optimizers = copy.deepcopy((models, optimizers))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.95) for o in optimizers]
    with carpool.Stack(models, optimizers, compile=compile) as stack:
        for k, (x, y) in enumerate(zip(xs, ys, strict=True)):
            assert stack.step(F.cross_entropy, x, y, clip_norm=1.0).device.type == "cuda"
            if k == 25:
                stack.drop(3)
            for scheduler in schedulers:
                scheduler.step()
            stack.evaluate(F.cross_entropy, x, y)
    for i, (twin, own) in enumerate(zip(twins, their_optimizers, strict=True)):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(own, 0.95)
        for x, y in list(zip(xs, ys, strict=True))[: 26 if i == 3 else 50]:
            own.zero_grad()
            F.cross_entropy(twin(x), y).backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            own.step()
            scheduler.step()
        for name, leaf in models[i].state_dict().items():
            torch.testing.assert_close(leaf, twin.state_dict()[name], rtol=0, atol=1e-8)


@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_predictions_come_back_to_the_inputs(home: str):
    models, x = [net().to(home) for _ in range(3)], torch.randn(10, 6, dtype=torch.float64)
    outputs = carpool.predict([*models, nn.Linear(6, 2).double()], x, batch_size=4)
    for model, output in zip(models, outputs, strict=False):
        assert output.device.type == "cpu"
        assert {leaf.device.type for leaf in model.parameters()} == {home}
        torch.testing.assert_close(output, model.eval()(x.to(home)).detach().cpu())
