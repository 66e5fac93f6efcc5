"""`codegen`: from a plan and its graph to a Python file with a module a partition."""

from __future__ import annotations

from pathlib import Path

from shardwright.atomic import replacing
from shardwright.codegenerate.formatting import formatted
from shardwright.codegenerate.sources.from_plan import program_of_plan
from shardwright.codegenerate.stage import Program
from shardwright.codegenerate.writing.file import file_text
from shardwright.codegenerate.writing.origins import read_again
from shardwright.errors import CodegenError
from shardwright.ir import IRGraph
from shardwright.pipeline import Pipeline
from shardwright.planning.plan import Plan, check_belongs


def codegen(
    pipeline_or_plan: Pipeline | Plan,
    path: str | Path,
    verbose: bool = False,
    graph: IRGraph | None = None,
) -> Path:
    """Write the partitions of a model as a Python file that imports torch only; gives its path.

    Each partition is a class ``Stage0(nn.Module)`` with the modules of the model that lie in it,
    under the original's names; ``create_pipeline_configuration(model)`` in the file makes them all.

    pipeline_or_plan
        What `plan` made, together with its ``graph``; or what `build` made of both here.
    path
        Where to write. The file is there whole or not at all.
    verbose
        Put each operator on a line of its own, instead of nesting those that are read once.
    graph
        The graph that the plan was made for.

    Raises CodegenError where there is no Python for what a partition does, or where it cannot be
    formatted; PlanError where the graph is not the plan's; WriteError where the file cannot be
    written.
    """
    target = Path(path)
    read_again()
    text = formatted(file_text(program_of(pipeline_or_plan, graph), verbose=verbose))
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return target


def program_of(source: Pipeline | Plan, graph: IRGraph | None = None) -> Program:
    """The partitions of a plan, or of the plan that a pipeline was built from.

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
    if source.origin is None or not isinstance(source.origin.plan, Plan):
        raise CodegenError(
            "a pipeline from a file has tasks of devices, not the model's modules; save the plan, "
            "too, and give codegen the plan and the graph: codegen(plan, path, graph=graph)"
        )
    if graph is not None:
        check_belongs(source.origin.plan, graph)
    return program_of_plan(source.origin.graph, source.origin.plan)
