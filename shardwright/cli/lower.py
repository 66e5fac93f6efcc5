"""``shardwright lower``: a pipeline file of operators as one of kernel calls."""

from __future__ import annotations

from rich.console import Console

from shardwright.cli.options import Modules, PipelineFile, PipelineOutput


def lower(
    file: PipelineFile,
    output: PipelineOutput,
    modules: Modules = None,
) -> None:
    """Lower the supertasks of a pipeline file from operators to kernel calls."""
    from shardwright.cli.steps import Steps
    from shardwright.compiler import lower as lower_pipeline
    from shardwright.launch.operators import load_operators
    from shardwright.pipeline import Pipeline
    from shardwright.reporting import device_table, headline

    steps = Steps(Console(stderr=True))
    with steps.step("load"):
        pipeline = Pipeline.load(file)
        load_operators(pipeline, modules or ())
    with steps.step("lower"):
        lowered = lower_pipeline(pipeline)
    with steps.step("save"):
        lowered.save(output)
    Console().print(headline(lowered), device_table(lowered), sep="\n")
