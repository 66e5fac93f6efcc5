"""A program in a folder, with what eager PyTorch makes of it, and how results are compared."""

from __future__ import annotations

import copy
import importlib.util
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardwright as sw
from fuzz.grammar import Program

STEPS = 3
TOLERANCE = {"float64": 1e-9, "float32": 2e-4}
COARSE = {"bfloat16": 0.05, "float16": 0.01}
"""What a program rounds to on its way: the last bit of what it rounds there may be another."""
ROUNDING = {"float64": 1e-13, "float32": 1e-6}
"""How far the same operators may be from eager's, which now and then takes a fused kernel."""


class MismatchError(Exception):
    """A number, a shape or a structure is another than eager's."""


class Trained(NamedTuple):
    """What steps of training leave."""

    losses: list[float]
    state: dict[str, Tensor]


@dataclass
class Case:
    """A program in a folder of its own, with what eager makes of it."""

    program: Program
    folder: Path
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.chance = random.Random(f"ways of {self.program.seed}")

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the grammar knows of the program."""
        return self.program.facts

    @property
    def tolerance(self) -> float:
        """How near numbers must come, as a part of the largest, where eager itself is as near."""
        return self._coarse or max(TOLERANCE[self.facts["dtype"]], 4 * self._error_of_eager)

    @property
    def _coarse(self) -> float:
        """The tolerance of a program that rounds to half precision; 0 for others."""
        named = [part for name, part in COARSE.items() if f"torch.{name}" in self.program.text]
        return max(named, default=0.0)

    @cached_property
    def module(self) -> ModuleType:
        """The program, imported from its file."""
        name = f"program_{self.program.seed}"
        path = self.folder / f"{name}.py"
        path.write_text(self.program.text)
        return imported(name, path)

    def model(self) -> nn.Module:
        """The model, in evaluation."""
        return self.module.build().eval()

    @cached_property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call."""
        return self.module.arguments(1)

    @cached_property
    def expected(self) -> Any:
        """What the model gives for them."""
        args, kwargs = copy.deepcopy(self.call)
        with torch.no_grad():
            return self.model()(*args, **kwargs)

    @cached_property
    def rounding(self) -> float:
        """How near the same operators must come to eager: some of what eager itself rounds off.

        Eager has kernels that only its modules call, as `nn.MultiheadAttention` does where no
        gradient is wanted, and the rest of a program may make much of how they round.
        """
        if self._coarse:
            return self._coarse
        least = ROUNDING[self.facts["dtype"]]
        return min(max(least, 4 * self._error_of_eager), self.tolerance)

    @cached_property
    def _error_of_eager(self) -> float:
        """How far eager is from exact, as a part of the largest number: float32 from float64."""
        own = f"torch.{self.facts['dtype']}"
        (other,) = {"torch.float32", "torch.float64"} - {own}
        name = f"program_{self.program.seed}_otherwise"
        path = self.folder / f"{name}.py"
        path.write_text(self.program.text.replace(own, other))
        dtype = getattr(torch, other.removeprefix("torch."))
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t.clone(), self.call
        )
        with torch.no_grad():
            found = imported(name, path).build().eval()(*args, **kwargs)
        leaves = zip(pytree.tree_leaves(found), pytree.tree_leaves(self.expected), strict=True)
        error = max((_gap(a, b) / _size(b) for a, b in leaves if _is_float(b)), default=0.0)
        return error if self.facts["dtype"] == "float32" else error * 2.0**-29

    @cached_property
    def graph(self) -> sw.IRGraph:
        """The captured model; nothing of it, of its arguments or of torch's state has changed."""
        model = self.model()
        before = copy.deepcopy((model.state_dict(), self.call)), torch.get_rng_state()
        args, kwargs = self.call
        graph = sw.capture(model, args, kwargs)
        equal("the model and its arguments after capture", (model.state_dict(), self.call),
              before[0], 0.0)  # fmt: skip
        if not torch.equal(before[1], torch.get_rng_state()):
            raise MismatchError("capture drew random numbers")
        return graph

    def batches(self, count: int = STEPS) -> list[Any]:
        """The batches of the steps."""
        return [self.module.batch(seed) for seed in range(count)]

    @cached_property
    def eager(self) -> Trained:
        """What a plain loop leaves."""
        return self.looped(STEPS)

    def looped(self, steps: int, change: float = 0.0) -> Trained:
        """What a plain loop of some steps leaves, its weights and batches changed by as much."""
        model, _, step = self.module.train()
        batches = self.batches(steps)
        if change:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(_changed(parameter, change))
            batches = pytree.tree_map_only(Tensor, lambda t: _changed(t, change), batches)
        losses = [loss_of(call(step, batch)) for batch in batches]
        return Trained(losses, model.state_dict())

    @cached_property
    def is_stable(self) -> bool:
        """Whether a change of weights and batches in the last digits stays one of the results.

        Rounding alone decides the others: where Adam divides a gradient that is zero but for it,
        say, or a norm what does not vary.
        """
        digits = {"float64": 1e-14, "float32": 1e-6}[self.facts["dtype"]]
        changed = self.looped(STEPS, 2e-3 if self.facts["autocast"] else digits)
        try:
            held(changed, self.eager, self.tolerance / 4)
        except MismatchError:
            return False
        return True

    @cached_property
    def in_halves(self) -> bool:
        """Whether halves of a batch make the step of the whole: losses and gradients alike."""
        if self.facts["rows"] % 2 or self.facts["writes"] or self.facts["dropout"]:
            return False
        rows = self.facts["rows"] // 2
        for batch in self.batches():
            whole = self._gradients([batch])
            try:
                halves = [
                    pytree.tree_map_only(Tensor, lambda t, k=k: _rows(t, k, rows), batch)
                    for k in (0, rows)
                ]
                parts = self._gradients(halves)
                equal("", parts, whole, 1e-6)
            except Exception:  # whatever a program does with another number of rows
                return False
        return True

    def _gradients(self, batches: Sequence[Any]) -> Any:
        """The mean of loss and gradients over some batches, before clipping."""
        model, optimizer, step = self.module.train()
        found: list[Any] = []
        optimizer.step = lambda *_: None
        optimizer.zero_grad = lambda *_, **__: None
        kept = nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_
        nn.utils.clip_grad_norm_ = nn.utils.clip_grad_value_ = lambda *_: None
        try:
            for batch in batches:
                model.zero_grad()
                loss = loss_of(call(step, batch))
                grads = [p.grad if p.grad is not None else torch.zeros_like(p)
                         for p in model.parameters()]  # fmt: skip
                found.append([torch.tensor(loss), *grads])
        finally:
            nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_ = kept
        return [torch.stack(values).mean(0) for values in zip(*found, strict=True)]


def _changed(tensor: Tensor, change: float) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor * (1 + change * torch.randn_like(tensor))


def _rows(tensor: Tensor, start: int, count: int) -> Tensor:
    whole = tensor.dim() and len(tensor) == 2 * count
    return tensor[start : start + count] if whole else tensor


def imported(name: str, path: Path) -> ModuleType:
    """A module from a file, under this name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def call(function: Callable[..., Any], batch: Any) -> Any:
    """Call a step as `sw.train` does with a batch."""
    return function(**batch) if isinstance(batch, dict) else function(*batch)


def loss_of(result: Any) -> float:
    """The loss that a step returns."""
    return float(result["loss"] if isinstance(result, dict) else result)


def equal(where: str, found: Any, expected: Any, tolerance: float) -> None:
    """Hold a structure of tensors and values against another. Raises MismatchError."""
    a, tree = pytree.tree_flatten_with_path(found)
    b, wanted = pytree.tree_flatten_with_path(expected)
    if tree != wanted:
        raise MismatchError(f"{where}: structure {tree} in place of {wanted}")
    for (path, one), (_, other) in zip(a, b, strict=True):
        _equal_leaf(f"{where}{pytree.keystr(path)}", one, other, tolerance)


def _equal_leaf(where: str, a: Any, b: Any, tolerance: float) -> None:
    if not isinstance(b, Tensor):
        if isinstance(a, float) and isinstance(b, float):
            a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
        elif type(a) is not type(b) or a != b:
            raise MismatchError(f"{where}: {a!r} in place of {b!r}")
        else:
            return
    if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        found = f"{a.dtype}{list(a.shape)}" if isinstance(a, Tensor) else repr(a)
        raise MismatchError(f"{where}: {found} in place of {b.dtype}{list(b.shape)}")
    a, b = a.detach(), b.detach()
    if not b.numel() or torch.equal(a, b):
        return
    if not b.is_floating_point() and not b.is_complex():
        raise MismatchError(f"{where}: integers differ in {int((a != b).sum())} of {b.numel()}")
    if _gap(a, b) > tolerance * _size(b):
        raise MismatchError(
            f"{where}: differs by {_gap(a, b):.3g}, largest value {_largest(b):.3g}"
        )


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.numel())


def _gap(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinite where one is not a number and the other is."""
    exact = (a.is_complex() and torch.complex128) or torch.float64
    a, b = a.detach().to(exact), b.detach().to(exact)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(float("inf"), float("inf"))
    return float(gap.max())


def _largest(tensor: Tensor) -> float:
    return float(torch.where(tensor.isfinite(), tensor.abs(), 0.0).max())


def _size(tensor: Tensor) -> float:
    """What differences are a part of."""
    return max(_largest(tensor), 1e-2)


def held(found: Trained, expected: Trained, tolerance: float) -> None:
    """Hold what training left against what it should have."""
    equal("losses", found.losses, expected.losses, tolerance)
    equal("state", dict(found.state), dict(expected.state), tolerance * 10)
