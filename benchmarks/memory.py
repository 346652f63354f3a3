"""Nothing runs out: large jobs with nothing declared, wave after wave, and what was predicted beside what was taken.

On a GPU memory is what NVML sees of the whole device, so a context and workspaces are in it; on a CPU it is the process's own.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import carpool
from carpool.events import GroupFellBack
from carpool.memory import device as devices

_MIB = 1 << 20
_SAMPLE_S = 0.02


class Watch:
    """The most memory that is used while it is open, looked at every 20 ms."""

    def __init__(self, device: str) -> None:
        self._device, self.peak_mib = device, 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self.peak_mib = max(self.peak_mib, used_mib(self._device))


def used_mib(device: str) -> float:
    if device.startswith("cuda"):
        seen = devices.read(device)
        return (seen.total_bytes - seen.free_bytes) / _MIB
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _MIB


def deep(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())))


def job(make: Callable[[], nn.Module], data: Any, seed: int, batch: int, epochs: int = 1) -> carpool.Job:
    optimizer = partial(torch.optim.Adam, lr=1e-4)
    return carpool.Job(
        make,
        data,
        name=str(seed),
        loss=F.mse_loss,
        optimizer=optimizer,
        batch_size=batch,
        seed=seed,
        epochs=epochs,
    )


def forty(device: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Forty jobs of about 8 GiB each (on a CPU of some MiB), half of one structure: nothing is declared."""
    rows, layers, width = (65536, 24, 1024) if device.startswith("cuda") else (256, 6, 128)
    x = torch.randn(rows, width, device=device)
    jobs = [job(partial(deep, width, layers), (x, x), seed, rows, 4) for seed in range(20)]
    others = [torch.randn(rows, width - 8 * n, device=device) for n in range(1, 4)]
    for seed in range(20, 40):
        own = others[seed % 3]
        jobs.append(job(partial(deep, own.shape[1], layers + seed % 2), (own, own), seed, rows, 4))
    plan = carpool.plan(jobs, device=device)
    fell: list[str] = []

    def hear(event: object) -> None:
        if isinstance(event, GroupFellBack):
            fell.append(event.reason)

    with Watch(device) as watch:
        results = carpool.train(jobs, device=device, reporters=[hear])
    outcomes = Counter(result.outcome.word for result in results)
    member = max(group.memory.member_bytes for group in plan.groups) / _MIB
    say(
        f"forty: {dict(outcomes)}, {len(plan.groups)} groups, peak {watch.peak_mib:.0f} MiB, {len(fell)} fell back"
    )
    return {
        "outcomes": dict(outcomes),
        "groups": len(plan.groups),
        "member_mib": round(member),
        "peak_mib": round(watch.peak_mib),
        "total_mib": devices.read(device).total_bytes // _MIB,
        "fell_back": fell,
        "seconds": round(results.seconds, 1),
    }


def waves(device: str, say: Callable[[str], None], count: int = 10) -> dict[str, Any]:
    """Two hundred jobs, twenty at a time: memory after each wave."""
    x = torch.randn(1024, 256, device=device)
    after = []
    for _ in range(count):
        jobs = [job(partial(deep, 256, 3 + (n - 15 if n > 15 else 0)), (x, x), n, 128, 2) for n in range(20)]
        carpool.train(jobs, device=device, reporters=[])
        del jobs
        gc.collect()
        after.append(round(used_mib(device), 1))
    say(f"waves: {after}")
    return {"after_mib": after, "from_second_mib": round(max(after[1:]) - min(after[1:]), 1)}


def together(device: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Scripts of torch and of JAX that take all they are given, side by side under a cap each; on a GPU only."""
    if not device.startswith("cuda"):
        return {}
    cap_gib, frameworks = 6, ("torch", "jax", "torch", "jax")
    script = str(Path(__file__).with_name("fill.py"))
    before = used_mib(device)
    command = [sys.executable, "-m", "carpool", "exec", "--memory", f"{cap_gib}GiB"]
    for framework in frameworks:
        command += [":", script, framework] if command[-1] in frameworks else [script, framework]
    with Watch(device) as watch, tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    held = [line for line in ended.stdout.splitlines() if "held" in line]
    promised, taken = 1024 * cap_gib * len(frameworks), watch.peak_mib - before
    say(
        f"together: code {ended.returncode}, promised {promised} MiB, taken {taken:.0f} MiB, {held} {ended.stderr[-300:]}"
    )
    return {
        "promised_mib": promised,
        "taken_mib": round(taken),
        "code": ended.returncode,
        "scripts": held,
    }


def predicted(device: str, say: Callable[[str], None]) -> dict[str, Any]:
    """What a group was measured to take, beside torch's own peak of it; on a GPU only."""
    if not device.startswith("cuda"):
        return {}
    kinds: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
        "deep": (partial(deep, 512, 6), torch.randn(4096, 512, device=device)),
        "wide": (partial(deep, 2048, 2), torch.randn(512, 2048, device=device)),
        "conv": (_conv, torch.randn(512, 3, 32, 32, device=device)),
        "conv_norm": (_conv_norm, torch.randn(512, 3, 32, 32, device=device)),
        "transformer": (_transformer, torch.randn(256, 64, 128, device=device)),
    }
    ratios = {}
    for name, (make, x) in kinds.items():
        for members in (2, 8):
            jobs = [job(make, (x, x), seed, 128) for seed in range(members)]
            budgeted = [replace(one, budget="64GiB") for one in jobs]  # so that it is measured
            expected = carpool.plan(budgeted, device=device).groups[0].memory.total_bytes
            before = torch.cuda.memory_allocated(device)
            results = carpool.train(jobs, device=device, strategy="fused", reporters=[], compile=False)
            actual = (results[0].peak_bytes or 0) - before + x.nbytes
            ratios[f"{members} × {name}"] = round(expected / actual, 2)
    say(f"predicted ÷ actual: {ratios}")
    return ratios


def _conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 3, 3, padding=1))


def _conv_norm() -> nn.Module:
    parts = (nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 3, 3, padding=1))
    return nn.Sequential(*parts)


def _transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)


def run(device: str, say: Callable[[str], None]) -> dict[str, Any]:
    return {
        "waves": waves(device, say),
        "predicted_over_actual": predicted(device, say),
        "together": together(device, say),
        "forty": forty(device, say),
    }
