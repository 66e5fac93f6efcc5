"""`codegen`: from a plan and its graph to a Python file with a module a partition."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

from ruff.__main__ import find_ruff_bin

from shardwright.atomic import replacing
from shardwright.codegenerate.program import program_of_plan
from shardwright.codegenerate.stage import StageProgram
from shardwright.codegenerate.writing.file import file_text
from shardwright.codegenerate.writing.origins import WIDTH, read_again
from shardwright.errors import CodegenError
from shardwright.ir import IRGraph
from shardwright.pipeline import Pipeline
from shardwright.planning.plan import Plan, check_belongs

_OPTIONS = ("--isolated", "--target-version", "py311", "--line-length", str(WIDTH))
_FIXES = ("check", "--select", "I,F401", "--fix-only", "--quiet")
_SECONDS = 120


def formatted(text: str) -> str:
    """The text as ruff formats it. Raises CodegenError where it is no Python or cannot be run."""
    _check(text)
    for command in (_FIXES, ("format", "--quiet")):
        text = _run(command, text)
    return text


def _check(text: str) -> None:
    try:
        ast.parse(text)
    except SyntaxError as error:
        lines = text.splitlines()
        line = lines[error.lineno - 1].strip() if error.lineno and lines[error.lineno - 1 :] else ""
        raise CodegenError(
            f"the generated code is no Python ({error.msg}) at line {error.lineno}: {line!r}; "
            "this is a mistake of shardwright's, please report it with the model"
        ) from error


def _run(command: tuple[str, ...], text: str) -> str:
    try:
        done = subprocess.run(
            [_ruff(), *command, *_OPTIONS, "--no-cache", "-"],
            input=text,
            capture_output=True,
            encoding="utf-8",
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise CodegenError(
            f"the generated code could not be formatted: {said.strip()}; it is written with ruff "
            "0.11 or later, which is installed with shardwright (pip install 'ruff>=0.11')"
        ) from error
    return done.stdout


def _ruff() -> str:
    try:
        return str(Path(find_ruff_bin()))
    except FileNotFoundError as error:
        raise OSError(f"ruff is not to be found ({error})") from None


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


def program_of(source: Pipeline | Plan, graph: IRGraph | None = None) -> StageProgram:
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
