"""The one question of these tests: does the captured graph compute what the model computes?"""

import copy
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwright.ir import IRGraph, compile_graph
from shardwright.ir.structure import flatten_call
from shardwright.tracing import capture


class Module(nn.Module):
    """A model whose forward is a function of (model, *args, **kwargs), with two parameters."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def captured(function: Any, *args: Any, **kwargs: Any) -> IRGraph:
    """The graph of a function as the forward of a `Module`."""
    return capture(Module(function), args, kwargs)


def operators(graph: IRGraph) -> list[str]:
    """The names of a graph's operators, without namespace and overload."""
    return [node.op.split(".")[1] for node in graph.nodes]


def assert_same(model: Any, *args: Any, **kwargs: Any) -> IRGraph:
    """Capture, and compare with eager bit for bit: results, strides, buffers and gradients.

    ``model`` is a module, or a function that becomes the forward of a `Module`.
    """
    model = model if isinstance(model, nn.Module) else Module(model)
    reference = copy.deepcopy(model)
    graph = capture(model, args, kwargs)
    graph.check()

    expected, expected_inputs = run(reference, args, kwargs)
    found, found_inputs = run(graph.run, args, kwargs)
    assert_equal_trees(found, expected)
    assert_equal_buffers(graph, reference, args, kwargs)

    backward(expected)
    backward(found)
    assert_equal_gradients(found_inputs, expected_inputs)
    assert_equal_gradients(list(model.parameters()), list(reference.parameters()))
    return graph


def run(function: Any, args: Any, kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
    """The result, and the copies of the input tensors that it was computed from."""
    args, kwargs = fresh(args), fresh(kwargs)
    torch.manual_seed(1)
    return function(*args, **kwargs), tensors((args, kwargs))


def fresh(value: Any) -> Any:
    """Copies of all tensors; one that stands twice stays one tensor."""
    copies: dict[int, torch.Tensor] = {}

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            made.copy_(tensor.detach())
            copies[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, one, value)


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def leaves(value: Any) -> list[Any]:
    """Leaves of nested containers, dataclasses among them."""
    if hasattr(value, "__dataclass_fields__"):
        return [
            leaf for name in value.__dataclass_fields__ for leaf in leaves(getattr(value, name))
        ]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def assert_equal_trees(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    pairs = list(zip(leaves(found), leaves(expected), strict=True))
    for a, b in pairs:
        if isinstance(b, torch.Tensor):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert a.numel() == 0 or real_strides(a) == real_strides(b)
            assert torch.equal(a, b) or torch.equal(a.isnan(), b.isnan())
        else:
            assert a == b


def real_strides(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element."""
    return [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def assert_equal_buffers(graph: IRGraph, reference: nn.Module, args: Any, kwargs: Any) -> None:
    """Updates are the buffers as eager left them, and no other buffer changed."""
    program = compile_graph(graph)
    assert graph.in_structure is not None
    inputs = flatten_call(graph.in_structure, *fresh((args, kwargs)))
    stored = [graph.tensors[value_id] for value_id in program.arguments[len(inputs) :]]
    torch.manual_seed(1)
    results = program([*inputs, *stored])[len(graph.outputs) :]
    updated = {
        name: new
        for old, new in zip(graph.updates, results, strict=True)
        for name in graph.values[old].names
    }
    buffers = dict(reference.named_buffers(remove_duplicate=False))
    for value in graph.stored():
        if value.role == "buffer":
            for name in value.names:
                assert torch.equal(updated.get(name, graph.tensors[value.id]), buffers[name])


def backward(result: Any) -> None:
    """Backpropagate the sum of everything that has a gradient."""
    parts = [t.abs().sum() for t in tensors(leaves(result)) if t.requires_grad]
    if parts:
        torch.stack([part.double() for part in parts]).sum().backward()


def assert_equal_gradients(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Gradients are equal; one that is None counts as zeros, as for what is overwritten."""
    for a, b in zip(found, expected, strict=True):
        zeros = torch.zeros_like(a)
        assert torch.equal(zeros if a.grad is None else a.grad, zeros if b.grad is None else b.grad)
