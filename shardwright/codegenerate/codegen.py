"""`codegen`: from a pipeline or a plan to a Python file with a module a partition."""

from __future__ import annotations

from pathlib import Path

from shardwright.atomic import replacing
from shardwright.codegenerate.formatting import formatted
from shardwright.codegenerate.sources.program import program_of
from shardwright.codegenerate.writing.file import file_text
from shardwright.codegenerate.writing.origins import read_again
from shardwright.ir import IRGraph
from shardwright.pipeline import Pipeline
from shardwright.planning.plan import Plan


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
        What `build` made or a file holds; or what `plan` made, together with its ``graph``.
    path
        Where to write. The file is there whole or not at all.
    verbose
        Put each operator on a line of its own, instead of nesting those that are read once.
    graph
        The graph that a plan was made for. For a pipeline from a file it brings what the file does
        not hold: modules and source lines.

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
