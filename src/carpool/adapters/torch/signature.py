"""The structure signature of a torch model, a loss or a step: what two jobs must share to be stacked.

Covers module classes, every attribute, hooks, the order and names of children, parameters and buffers by shape, dtype,
`requires_grad` and ties. The values of the model's own parameters and buffers are each member's own and left out; a
tensor or module that is reached in any other way (an attribute, a closure, a loss's weight) counts with its contents.
How a plain Python value is compared is in carpool.fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from carpool.fingerprint import LARGEST_DIGEST_BYTES, digest, fingerprint
from carpool.marks import Identity, Made, Plain
from carpool.planning.spec import Signature

_BY_REPR = frozenset({torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout})
_ORDINARY_TENSORS = frozenset({Tensor, nn.Parameter})
_STATE = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
# Taken from torch itself: a user's own `_my_hooks` dict is an attribute like any other, keys included.
_HOOKS = frozenset(name for name in vars(nn.Module()) if "_hooks" in name or name == "_is_full_backward_hook")
_HOOK_OPTIONS = ("_with_kwargs", "_always_called")


def model_signature(model: nn.Module) -> Signature:
    """What the model does, entry by entry, without the values of its parameters and buffers.

    >>> dict(model_signature(nn.Linear(2, 3)))["weight"]
    (3, 2) float32
    """
    taken = "model" in model._modules or "model" in model._parameters or "model" in model._buffers
    root = "the model" if taken else "model"
    return _Scope().described(model, _Names(root, ""), contents=False)


def callable_signature(label: str, function: Callable[..., Any]) -> Signature:
    """What a loss, a step or a metric does, entry by entry, the contents of its own tensors included.

    >>> dict(callable_signature("loss", nn.CrossEntropyLoss(label_smoothing=0.1)))["loss.label_smoothing"]
    0.1
    """
    scope = _Scope()
    if isinstance(function, nn.Module):
        return scope.described(function, _Names(label, f"{label}."), contents=True)
    entries = _Entries()
    entries.expand(label, scope.fingerprint(function))
    return entries.listed()


@dataclass(frozen=True)
class Leaf:
    """A parameter or buffer without its values, shown as "(64, 10) float32"."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    notes: tuple[Hashable, ...] = ()

    def __str__(self) -> str:
        shape = f"{self.shape} {self.dtype}"
        return ", ".join(
            [shape if self.kind == "parameter" else f"{self.kind} {shape}", *map(str, self.notes)]
        )

    __repr__ = __str__


@dataclass(frozen=True)
class Note:
    """A word about a place in the model, shown as it reads."""

    text: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


class _Entries:
    """The entries of a signature in the making, each under a label of its own."""

    def __init__(self) -> None:
        self._by_label: dict[str, Hashable] = {}

    def add(self, label: str, value: Hashable) -> None:
        while label in self._by_label:
            label += "'"
        self._by_label[label] = value

    def expand(self, label: str, value: Hashable) -> None:
        """Adds a value part by part where its parts have names, so that a difference is told by name."""
        parts = value.named_parts() if isinstance(value, Made) else None
        if not isinstance(value, Made) or parts is None:
            return self.add(label, value)
        self.add(label, value.kind if not isinstance(value.kind, str) else Note(value.kind))
        for name, part in parts:
            self.add(f"{label}: {name}", part)
        return None

    def listed(self) -> Signature:
        return tuple(self._by_label.items())


@dataclass(frozen=True)
class _Names:
    """How paths inside a root module are shown."""

    root: str
    prefix: str

    def of(self, path: str) -> str:
        return f"{self.prefix}{path}" if path else self.root

    def inside(self, path: str, name: str) -> str:
        """The label of a module's own attribute."""
        return f"{self.of(path)}.{name}"

    def leaf(self, path: str, name: str) -> str:
        """The label of a parameter or buffer: its full path, as in a state dict."""
        return self.prefix + _joined(path, name)


@dataclass
class _Scope:
    """The modules and tensors that have a name by now: another way to one of them is that name."""

    modules: dict[int, str] = field(default_factory=dict)
    tensors: dict[int, str] = field(default_factory=dict)
    addresses: dict[int, str] = field(default_factory=dict)

    def fingerprint(self, value: Any) -> Hashable:
        return fingerprint(value, self.special)

    def special(self, value: Any) -> Any:
        kind = type(value)
        if kind in _BY_REPR:
            return Plain(kind, repr(value))
        if issubclass(kind, Tensor):
            return self._reference(value)
        if issubclass(kind, nn.Module):
            return self._module(value)
        return NotImplemented

    def _reference(self, value: Tensor) -> Hashable:
        if (name := self.tensors.get(id(value))) is not None:
            return Note(f"the tensor {name!r}")
        return _with_contents("tensor", value, (("trained",) if value.requires_grad else ()))

    def _module(self, value: nn.Module) -> Hashable:
        if (name := self.modules.get(id(value))) is not None:
            return Note(f"the module {name!r}")
        name = f"outside module {len(self.modules)}"
        return Made("module", self.described(value, _Names(name, f"{name}."), contents=True))

    def described(self, root: nn.Module, names: _Names, *, contents: bool) -> Signature:
        """The entries of a module and all below it, with or without the values of its tensors."""
        visits = list(
            self._visits(root, names)
        )  # all names are given before the first attribute is looked at
        entries = _Entries()
        for path, module in visits:
            if isinstance(module, nn.Module):
                self._add_module(entries, path, module, names, contents)
            else:
                entries.add(names.of(path), module)
        for path, module in visits:
            if isinstance(module, nn.Module):
                _add_order(entries, names.of(path), module)
        return entries.listed()

    def _visits(self, root: nn.Module, names: _Names) -> Iterator[tuple[str, nn.Module | Note | Identity]]:
        """Every place in the tree, parents first: a module where it is first met, what to say in other places."""
        waiting: list[tuple[str, nn.Module | None]] = [("", root)]
        while waiting:
            path, module = waiting.pop()
            if module is None:
                yield path, Note("None")
            elif id(module) in self.modules:
                yield path, Note(f"the module {self.modules[id(module)]!r}")
            elif isinstance(module, torch.jit.ScriptModule):
                yield path, Identity(module)  # its code and state live in C++
            else:
                self._name(path, module, names)
                yield path, module
                waiting.extend(reversed([(_joined(path, name), c) for name, c in module._modules.items()]))

    def _name(self, path: str, module: nn.Module, names: _Names) -> None:
        self.modules[id(module)] = names.of(path)
        for name, tensor in _tensors(module):
            if tensor is not None:
                self.tensors.setdefault(id(tensor), names.leaf(path, name))

    def _add_module(
        self, entries: _Entries, path: str, module: nn.Module, names: _Names, contents: bool
    ) -> None:
        entries.expand(names.of(path), self.fingerprint(type(module)))
        for name in sorted(vars(module).keys() - _STATE):
            if name in _HOOKS and not vars(module)[name]:
                continue  # most of what a module has are tables of no hooks
            self._add_attribute(entries, names.inside(path, name), module, name)
        for name, tensor in _tensors(module):
            label = names.leaf(path, name)
            entries.add(label, self._leaf(label, module, name, tensor, contents))
            if tensor is not None:
                self._add_extras(entries, label, tensor)

    def _add_attribute(self, entries: _Entries, label: str, module: nn.Module, name: str) -> None:
        value = vars(module)[name]
        entries.add(label, self._hooks(module, name, value) if name in _HOOKS else self.fingerprint(value))

    def _hooks(self, module: nn.Module, name: str, value: Any) -> Hashable:
        """The hooks in order; for a table of options, the positions of the hooks that have the option."""
        for option in _HOOK_OPTIONS:
            if name.endswith(option):
                order = list(vars(module)[name.removesuffix(option)])
                return tuple(order.index(key) for key in value if key in order)
        return self.fingerprint(list(value.values()) if isinstance(value, dict) else value)

    def _leaf(
        self, label: str, module: nn.Module, name: str, tensor: Tensor | None, contents: bool
    ) -> Hashable:
        if tensor is None or is_lazy(tensor):
            return Note("None") if tensor is None else Identity(tensor)
        first = self.tensors[id(tensor)]
        tied = first != label
        notes = [f"tied to {first!r}"] if tied else self._memory_notes(label, tensor)
        contents = contents and not tied
        if name in module._parameters:
            return _leaf("parameter", tensor, notes + ([] if tensor.requires_grad else ["frozen"]), contents)
        notes += ["trained"] if tensor.requires_grad else []
        notes += ["not persistent"] if name in module._non_persistent_buffers_set else []
        return _leaf("buffer", tensor, notes, contents)

    def _memory_notes(self, label: str, tensor: Tensor) -> list[str]:
        """Two parameters over one memory (`Parameter(other.data)`) are tied too, although they are two objects."""
        address = tensor.data_ptr() if _has_contents(tensor) else 0
        first = self.addresses.setdefault(address, label) if address else label
        return [] if first == label else [f"shares memory with {first!r}"]

    def _add_extras(self, entries: _Entries, label: str, tensor: Tensor) -> None:
        """What the user hung on a parameter: gradient hooks and attributes."""
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(tensor, name, None):
                entries.add(f"{label}.{name}", self.fingerprint(list(hooks.values())))
        for name, value in sorted(vars(tensor).items()):
            entries.add(f"{label}.{name}", self.fingerprint(value))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor | None]]:
    yield from module._parameters.items()
    yield from module._buffers.items()


def _add_order(entries: _Entries, label: str, module: nn.Module) -> None:
    tables = {"children": module._modules, "parameters": module._parameters, "buffers": module._buffers}
    for word, table in tables.items():
        if len(table) > 1:
            entries.add(f"{label}: order of {word}", Note(", ".join(table)))


def _leaf(kind: str, tensor: Tensor, notes: Iterable[Hashable], contents: bool) -> Hashable:
    if contents:
        return _with_contents(kind, tensor, notes)
    own_type = () if type(tensor) in _ORDINARY_TENSORS else (Identity(type(tensor)),)
    layout = () if tensor.layout is torch.strided else (str(tensor.layout),)
    return Leaf(kind, tuple(tensor.shape), _dtype(tensor), (*notes, *own_type, *layout))


def _with_contents(kind: str, tensor: Tensor, notes: Iterable[Hashable]) -> Hashable:
    if not _has_contents(tensor) or tensor.numel() * tensor.element_size() > LARGEST_DIGEST_BYTES:
        return Identity(tensor)
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten()
    read = digest(flat.view(torch.uint8).numpy()) if flat.numel() else ""
    return Leaf(kind, tuple(tensor.shape), _dtype(tensor), (*notes, f"contents {read}"))


def _has_contents(tensor: Tensor) -> bool:
    strided = type(tensor) in _ORDINARY_TENSORS and tensor.layout is torch.strided
    return strided and not tensor.is_meta and not tensor.is_quantized and not is_lazy(tensor)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
