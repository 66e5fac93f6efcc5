"""What code is generated from, as a Program, wherever it comes from.

    a plan, and its graph          the program of the plan, with modules and source lines
    a pipeline that was built here  the same, of the graph and plan that it was built from
    a pipeline from a file         the program of the file; with its graph, modules and lines too

What always holds: the program's names are the model's. Where a pipeline that was built here reads
its parameters under other names (``rename=``), that is a matter of its weight files alone.
"""

from __future__ import annotations

from shardwright.codegenerate.sources.from_file import program_of_file
from shardwright.codegenerate.sources.from_plan import program_of_plan
from shardwright.codegenerate.stage import Program
from shardwright.errors import CodegenError
from shardwright.ir import IRGraph
from shardwright.pipeline import Pipeline
from shardwright.planning.plan import Plan, check_belongs


def program_of(source: Pipeline | Plan, graph: IRGraph | None = None) -> Program:
    """The partitions of a pipeline or of a plan; a plan needs the graph that it was made for.

    Raises CodegenError where code cannot be generated, PlanError where the graph is another.
    """
    if isinstance(source, Plan):
        if graph is None:
            raise CodegenError(
                f"the plan for {source.graph!r} says where nodes run and not what they do; give "
                "the graph that it was made for, too (graph=graph)"
            )
        return program_of_plan(graph, source)
    if not isinstance(source, Pipeline):
        raise CodegenError(
            f"code is generated from a Pipeline or a Plan, found a {type(source).__name__}"
        )
    if source.origin is not None and isinstance(source.origin.plan, Plan):
        if graph is not None:
            check_belongs(source.origin.plan, graph)
        return program_of_plan(source.origin.graph, source.origin.plan)
    return program_of_file(source, graph)
