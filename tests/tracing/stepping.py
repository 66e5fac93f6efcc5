"""Runs the graph of a training step with torch's own autograd and optimizers, to hold it to eager.

Each marker is done by what it stands for: `Backward` by ``torch.autograd.grad`` over the operators
run before it, an update by the optimizer itself on copies. So a graph that is right gives the same
bits as the step function, step after step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.ir import IRGraph, IRNode, resolve
from shardwright.ir.operators import join_call, signature
from shardwright.ir.structure import flatten_call, rebuild
from shardwright.tracing.closures import find_closure
from shardwright.tracing.step import CapturedStep, capture_step
from shardwright.tracing.step_model import StepModel

OPTIMIZERS = {
    "sgd_step": torch.optim.SGD,
    "adam_step": torch.optim.Adam,
    "adamw_step": torch.optim.AdamW,
}
STATE = {
    "sgd_step": lambda attrs: ["momentum_buffer"] if attrs["momentum"] else [],
    "adam_step": lambda attrs: _adam_state(attrs),
    "adamw_step": lambda attrs: _adam_state(attrs),
}


def _adam_state(attrs: dict[str, Any]) -> list[str]:
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if attrs["amsgrad"] else []), "step"]


class GraphSteps:
    """A step graph that is run again and again; ``stored`` are its stored values by id."""

    def __init__(self, graph: IRGraph) -> None:
        self.graph = graph
        self.stored = {value.id: self._begin(value) for value in graph.stored()}

    def _begin(self, value: Any) -> Tensor:
        if value.init == "zeros":
            dtype = torch.float64 if value.dtype == "f64" else torch.float32
            return torch.zeros(value.shape, dtype=dtype)
        return self.graph.tensors[value.id].detach().clone()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graph = self.graph
        given = flatten_call(graph.in_structure, args, kwargs)
        self.values = dict(zip(graph.inputs, given, strict=True))
        self.current: dict[str, Tensor] = {}
        for value in graph.stored():
            tensor = self.stored[value.id]
            if value.role == "param":
                original = graph.tensors[value.id]
                tensor = tensor.clone().requires_grad_(original.requires_grad)
                self.current[value.names[0]] = tensor
            self.values[value.id] = tensor
        for node in graph.nodes:
            self.run(node)
        result = [self.values[value_id] for value_id in graph.outputs]
        for old, new in graph.updates.items():
            self.stored[old] = self.values[new].detach().clone()
        return rebuild(graph.out_structure, result)

    def run(self, node: IRNode) -> None:
        inputs = [self.values[value_id] for value_id in node.inputs]
        if "." in node.op:
            overload = resolve(node.op)
            args, kwargs = join_call(overload, inputs, node.attrs, "cpu")
            result = overload(*args, **kwargs)
            made = [result] if signature(overload).returns_one else list(result)
        else:
            made = getattr(self, node.op.removesuffix("_step"))(node, inputs)
        self.values |= dict(zip(node.outputs, made, strict=True))

    def Backward(self, node: IRNode, inputs: list[Tensor]) -> Sequence[Tensor]:
        loss, *gradient = inputs
        parameters = [self.current[name] for name in node.attrs["parameters"]]
        found = torch.autograd.grad(loss, parameters, gradient or None, retain_graph=True)
        # As eager's are: a norm is summed in the order in which its numbers stand.
        return [torch.empty_like(p).copy_(g) for p, g in zip(parameters, found, strict=True)]

    def zero_grad(self, node: IRNode, inputs: list[Tensor]) -> list[Tensor]:
        return []

    def clip_grad_norm(self, node: IRNode, inputs: list[Tensor]) -> list[Tensor]:
        parameters = [_with_gradient(torch.empty_like(tensor), tensor) for tensor in inputs]
        norm = torch.nn.utils.clip_grad_norm_(parameters, **node.attrs)
        return [norm, *(parameter.grad for parameter in parameters)]

    def clip_grad_value(self, node: IRNode, inputs: list[Tensor]) -> list[Tensor]:
        parameters = [_with_gradient(torch.empty_like(tensor), tensor) for tensor in inputs]
        torch.nn.utils.clip_grad_value_(parameters, **node.attrs)
        return [parameter.grad for parameter in parameters]

    def sgd(self, node: IRNode, inputs: list[Tensor]) -> list[Tensor]:
        return self.update(node, inputs)

    def adam(self, node: IRNode, inputs: list[Tensor]) -> list[Tensor]:
        return self.update(node, inputs)

    def adamw(self, node: IRNode, inputs: list[Tensor]) -> list[Tensor]:
        return self.update(node, inputs)

    def update(self, node: IRNode, inputs: list[Tensor]) -> list[Tensor]:
        attrs = dict(node.attrs)
        names, keys = attrs.pop("parameters"), STATE[node.op](attrs)
        rate, *rest = inputs
        count = len(names)
        parameters, gradients, *state = [
            rest[start : start + count] for start in range(0, len(rest), count)
        ]
        assert len(state) == len(keys)
        copies = [_with_gradient(*pair) for pair in zip(parameters, gradients, strict=True)]
        optimizer = OPTIMIZERS[node.op](copies, lr=rate.item(), **attrs)
        for i, copy in enumerate(copies):
            optimizer.state[copy] = {
                key: values[i].clone() for key, values in zip(keys, state, strict=True)
            }
        optimizer.step()
        for name, copy in zip(names, copies, strict=True):
            self.current[name] = copy
        return copies + [optimizer.state[copy][key] for key in keys for copy in copies]


def _with_gradient(tensor: Tensor, gradient: Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(tensor.detach().clone())
    parameter.grad = gradient.detach().clone()
    return parameter


def stored_of(step_fn: Callable[..., Any]) -> dict[str, Tensor]:
    """Everything a step function keeps: parameters, buffers, gradients, state, by graph names."""
    closure = find_closure(step_fn)
    model = StepModel(closure)
    found = {stored.names[0]: stored.tensor for stored in model.contents.values()}
    for optimizer in closure.optimizers.values():
        for name, parameter in model.originals.items():
            for key, tensor in optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{name}.{key}"] = tensor
    return found


def assert_same_steps(
    make: Callable[[], Callable[..., Any]], batches: Sequence[Any], *, tolerance: float = 0.0
) -> IRGraph:
    """Steps of the graph on ``batches`` give the same bits as those of the step function.

    ``make`` makes the step function with all it closes over, the same each time it is called.
    ``tolerance`` is for what is differentiated otherwise: ``max|a - b| <= tolerance * max|b|``.
    """
    eager, step_fn = make(), make()
    captured = unchanged_capture(step_fn, batches[0])
    steps = GraphSteps(captured.graph)
    twin = find_closure(eager)
    optimizers = dict(
        zip(find_closure(step_fn).optimizers.values(), twin.optimizers.values(), strict=True)
    )
    for batch in batches:
        rates = {
            rate.input: torch.tensor(
                float(optimizers[rate.optimizer].param_groups[rate.group]["lr"]),
                dtype=torch.float64,
            )
            for rate in captured.rates
        }
        expected = eager(*batch)
        found = steps(*batch, **rates)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
    assert_same_stored(steps, stored_of(eager), tolerance)
    return captured.graph


def assert_same_stored(
    steps: GraphSteps, expected: dict[str, Tensor], tolerance: float = 0.0
) -> None:
    for value in steps.graph.stored():
        if value.role != "constant" and value.names[0] in expected:
            wanted = expected[value.names[0]].detach()
            largest = wanted.abs().max().item() if tolerance and wanted.numel() else 0.0
            torch.testing.assert_close(
                steps.stored[value.id],
                wanted,
                rtol=0,
                atol=tolerance * largest,
                msg=lambda text, value=value: f"{value.names[0]}: {text}",
            )
        elif value.role == "state" and value.id in steps.graph.updates:
            assert not steps.stored[value.id].any(), f"{value.names[0]} should be gone"


def unchanged_capture(
    step_fn: Callable[..., Any], args: Sequence[Any], **kwargs: Any
) -> CapturedStep:
    """The captured step, after seeing that capture changed nothing."""
    before = snapshot(step_fn)
    captured = capture_step(step_fn, args, **kwargs)
    assert_unchanged(before, snapshot(step_fn))
    captured.graph.check()
    return captured


def snapshot(step_fn: Callable[..., Any]) -> Any:
    """All that a capture must leave alone: identities, contents, versions, random numbers."""
    closure = find_closure(step_fn)
    tensors = stored_of(step_fn)
    modules = {
        (name, path): (dict(vars(module)), list(module._parameters), list(module._buffers))
        for name, root in closure.modules.items()
        for path, module in root.named_modules()
    }
    return {
        "contents": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "identity": {name: (id(t), id(t.grad), t._version) for name, t in tensors.items()},
        "modules": modules,
        "optimizers": [
            (
                dict(vars(optimizer)),
                [dict(group) for group in optimizer.param_groups],
                [list(map(id, group["params"])) for group in optimizer.param_groups],
                {id(key): dict(state) for key, state in optimizer.state.items()},
            )
            for optimizer in closure.optimizers.values()
        ],
        "schedulers": [dict(vars(item)) for item in closure.schedulers.values()],
        "random": torch.get_rng_state(),
        "grad": torch.is_grad_enabled(),
    }


def assert_unchanged(before: Any, after: Any) -> None:
    contents = before.pop("contents"), after.pop("contents")
    torch.testing.assert_close(*contents, rtol=0, atol=0)
    random = before.pop("random"), after.pop("random")
    assert torch.equal(*random)
    before["optimizers"], after["optimizers"] = (
        _comparable(item["optimizers"]) for item in (before, after)
    )
    assert before == after


def _comparable(item: Any) -> Any:
    """Tensors by identity, since equality of tensors is none."""
    if isinstance(item, Tensor):
        return id(item)
    if isinstance(item, dict):
        return {_comparable(key): _comparable(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [_comparable(value) for value in item]
    return item
