"""The specification's names for the steps from a built model to a program.

    program = compile_cuda(model)              a `Model`, written layer by layer
    graph = optimize_ir(graph)                 passes
    lowered = lower_ir_cuda(graph)             calls
    plan = make_exec_plan_cuda(graph, lowered) memory
    plan = optimize_plan(plan)                 fewer calls
    CudaExecutor(plan).run(feed)               one run

They do what this package's own names do (`compile`, `prepare`, `lower_graph`, `make_exec_plan`,
`Executor`); where nothing says ``cuda``, plans run on the CPU too.
"""

from __future__ import annotations

import torch

from shardwright.compiler.executor import Executor as CudaExecutor
from shardwright.compiler.lowering import lower_graph
from shardwright.compiler.memory.plan import ExecPlan, make_exec_plan, optimize_plan
from shardwright.compiler.passes.pipeline import prepare
from shardwright.compiler.program import CompiledProgram, available, compile, parsed
from shardwright.ir import IRGraph
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.kernels.emitters import emit_graph
from shardwright.kernels.lowered import LoweredGraph
from shardwright.tracing import Model

__all__ = [
    "CudaExecutor",
    "compile_cuda",
    "lower_ir_cuda",
    "make_exec_plan_cuda",
    "optimize_ir",
    "optimize_plan",
]


def compile_cuda(model: Model | IRGraph, device: str | torch.device = "cuda") -> CompiledProgram:
    """Compile a model that was written layer by layer. Raises DeviceError without a GPU."""
    device = available(parsed(device))
    graph = model.finish() if isinstance(model, Model) else model
    values = [graph.values[value_id] for value_id in graph.inputs]
    examples = [torch.zeros(v.shape, dtype=torch_dtype(v.dtype), device=device) for v in values]
    return compile(graph, *examples, device=device)


def optimize_ir(graph: IRGraph, device: str | torch.device = "cuda") -> IRGraph:
    """Run all passes on a graph; the result computes the same.

    Raises GraphError if the graph is invalid (`IRGraph.check`).
    """
    graph.check()
    inference = not graph.updates
    return prepare(graph, inference=inference, device=device)


def lower_ir_cuda(graph: IRGraph) -> LoweredGraph:
    """The graph's calls; nodes that nobody emitted yet are."""
    return lower_graph(emit_graph(graph))


def make_exec_plan_cuda(graph: IRGraph, lowered: LoweredGraph) -> ExecPlan:
    """Where the values of these calls lie. ``graph`` is what was lowered."""
    del graph
    return make_exec_plan(lowered)
