"""Graphs run by plans, beside the same graphs run node by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.compiler.executor import Executor
from shardwright.compiler.lowering import lower_graph
from shardwright.compiler.memory.plan import ExecPlan, make_exec_plan
from shardwright.ir import IRGraph, compile_graph
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.kernels.emitters import emit_graph
from shardwright.kernels.files import check_calls


def planned(graph: IRGraph, **options: Any) -> ExecPlan:
    """The plan of a graph as it stands, without passes, when its calls were found legal."""
    lowered = lower_graph(emit_graph(graph))
    check_calls(lowered)
    return make_exec_plan(lowered, **options)


def contents(graph: IRGraph) -> dict[int, torch.Tensor]:
    """A copy of every stored value's contents, laid out as the graph says, by id."""
    found = {}
    for value in graph.stored():
        tensor = graph.tensors.get(value.id)
        if tensor is None:
            tensor = torch.zeros(value.shape, dtype=torch_dtype(value.dtype))
        copy = tensor.detach().clone()
        if value.strides is not None:
            empty = torch.empty_strided(value.shape, value.strides, dtype=tensor.dtype)
            copy = empty.copy_(tensor.detach())
        found[value.id] = copy
    return found


def feed_of(
    plan: ExecPlan, graph: IRGraph, inputs: Sequence[torch.Tensor], stored: dict[int, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors by the names that the plan's buffers have."""
    tensors = dict(zip(graph.inputs, inputs, strict=True)) | stored
    external = [buffer.vid for buffer in plan.buffers if buffer.kind in ("input", "stored")]
    return {graph.values[vid].name: tensors[vid] for vid in external}


def run_plan(
    graph: IRGraph, inputs: Sequence[torch.Tensor], *, native: bool = False, **options: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, and the stored tensors that are updated, after one run."""
    plan, stored = planned(graph, **options), contents(graph)
    executor = Executor(plan, native=native)
    outputs = executor.run(feed_of(plan, graph, inputs, stored))
    return outputs, [stored[vid] for vid in graph.updates]


def run_nodes(
    graph: IRGraph, inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What `run_plan` must give."""
    program, stored = compile_graph(graph), contents(graph)
    given = [*inputs, *(stored[vid] for vid in program.arguments[len(inputs) :])]
    made = [tensor.clone() for tensor in program(given)]
    return made[: len(graph.outputs)], made[len(graph.outputs) :]


def assert_same(
    graph: IRGraph,
    inputs: Sequence[torch.Tensor],
    *,
    tolerance: float = 0.0,
    absolute: float = 0.0,
    native: bool = False,
    **options: Any,
) -> None:
    """The plan gives what the nodes give: to the last bit, where no tolerance is given."""
    wanted, found = run_nodes(graph, inputs), run_plan(graph, inputs, native=native, **options)
    for made, expected in zip(found, wanted, strict=True):
        for a, b in zip(made, expected, strict=True):
            assert_close(a, b, tolerance, absolute)


def assert_close(
    found: torch.Tensor, wanted: torch.Tensor, tolerance: float, absolute: float = 0.0
) -> None:
    """max|a - b| <= tolerance * max|b| + absolute, NaN and infinities at the same places."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if tolerance == 0 or not wanted.is_floating_point():
        assert torch.equal(torch.nan_to_num(found), torch.nan_to_num(wanted))
        assert torch.equal(found.isnan(), wanted.isnan())
    elif wanted.numel():
        finite = wanted.isfinite()
        assert torch.equal(found.isfinite(), finite)
        error = (found - wanted)[finite].abs().max() if finite.any() else torch.tensor(0.0)
        largest = wanted[finite].abs().max() if finite.any() else torch.tensor(0.0)
        assert error <= tolerance * largest + absolute, f"{error} of {largest}"
