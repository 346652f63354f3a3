"""A job's signature: its model and objective, its optimizer's arithmetic, the shapes of its data."""

from __future__ import annotations

from collections.abc import Hashable

from carpool.adapters.torch.build import Arrays, Built
from carpool.adapters.torch.signature import callable_signature, model_signature
from carpool.kernels.updates import UPDATES
from carpool.marks import Identity
from carpool.planning.spec import Signature


def behaviour(built: Built) -> list[tuple[str, Hashable]]:
    """What a job's model and objective are and do. Labels of the job's own end in "=", which no module's name can."""
    job = built.job
    entries: list[tuple[str, Hashable]] = list(model_signature(built.model))
    for label, function in (("loss=", job.loss), ("step=", job.step)):
        if function is not None:
            entries += callable_signature(label, function)
    for number, phase in enumerate(job.phases or ()):
        entries += callable_signature(f"phases[{number}].step=", phase.step)
        entries += [(f"phases[{number}].every=", phase.every), (f"phases[{number}].name=", phase.name)]
    for name, metric in (job.metrics or {}).items():
        entries += callable_signature(f"metrics.{name}=", metric)
    return entries


def job_signature(built: Built) -> Signature:
    """What must be equal for two jobs to be stacked: behaviour, the optimizer's arithmetic, shapes of data."""
    job = built.job
    entries = behaviour(built)
    entries += optimizer_signature(built)
    entries += _data_signature("data", built.data)
    if built.validation is not None:
        entries += _data_signature("validation_data", built.validation)
    entries += [
        ("batch_size=", job.batch_size),
        ("precision=", job.precision),
        ("accumulate=", job.accumulate),
        ("clip_norm=", "set" if job.clip_norm is not None else "none"),
        ("share=", "set" if job.share is not None else "none"),
    ]
    return tuple(entries)


def optimizer_signature(built: Built) -> list[tuple[str, Hashable]]:
    names = {id(parameter): name for name, parameter in built.model.named_parameters()}
    entries: list[tuple[str, Hashable]] = []
    for place, phase in enumerate(built.phases):
        word = f"phases[{place}].optimizer" if built.job.phases else "optimizer"
        kind = type(phase.optimizer)
        entries.append((f"{word}=", f"{kind.__module__}.{kind.__qualname__}"))
        # A class made in a function shares its name with others.
        entries.append((f"{word}.class=", Identity(kind)))
        update = UPDATES.get(kind)
        for number, group in enumerate(phase.optimizer.param_groups):
            label = f"{word}.groups[{number}]="
            entries.append((label, tuple(names[id(p)] for p in group["params"])))
            if update is not None:
                entries += [(f"{label}{option}", value) for option, value in update.structure(group)]
    return entries


def _data_signature(word: str, arrays: Arrays) -> list[tuple[str, Hashable]]:
    shapes = [(f"{word}[{i}]=", (tuple(t.shape[1:]), str(t.dtype))) for i, t in enumerate(arrays.tensors)]
    return [(f"{word}=", (type(arrays).__name__.lower(), str(arrays.nest))), *shapes]
