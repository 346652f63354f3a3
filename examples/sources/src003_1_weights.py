"""Models of one structure with weights of their own, asked together: their weights are stacked, and one launch serves all."""

import torch
from torch import nn

import carpool


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(10, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


def drawn(seed):
    """A model with weights of its own, drawn without the global generator."""
    model, random = Net(), torch.Generator().manual_seed(seed)
    model.load_state_dict(
        {name: torch.randn(w.shape, generator=random) for name, w in model.state_dict().items()}
    )
    return model


def main():
    models = {f"seed {seed}": drawn(seed) for seed in range(4)}
    x = torch.linspace(-1, 1, 50).reshape(5, 10)
    said = carpool.predict(models, x, device="cpu")
    with torch.no_grad():
        apart = max(float((said[name] - model(x)).abs().max()) for name, model in models.items())
    differ = not torch.equal(said["seed 0"], said["seed 1"])
    return {"names": list(said), "shape": list(said["seed 0"].shape), "apart": apart, "differ": differ}


if __name__ == "__main__":
    print(main())
