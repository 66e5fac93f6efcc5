"""``shardwright run``: a pipeline file, inputs from a file or at random, and what comes out.

The calls are streamed through a `Runner`. Under torchrun every rank runs this and is one device
slot; only rank 0 has the outputs and prints.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file

from shardwright.cli.steps import Steps
from shardwright.engine.timeline import Timeline
from shardwright.errors import InputError
from shardwright.ir.structure import Call, describe_result, leaves, rebuild_call
from shardwright.ir.tensor_meta import dtype_name, seconds_text, tensor_text, torch_dtype
from shardwright.pipeline import Pipeline, write_paramfile
from shardwright.pipeline.schema import Document
from shardwright.reporting import TimelineChart, new_table, slot_table, task_table
from shardwright.runtime import Runner


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of the command; its help says what each means."""

    inputs: Path | None
    random: bool
    seed: int
    weights: Path | None
    output: Path | None
    in_process: bool
    timeout: float
    threads: int
    modules: tuple[str, ...]
    trace: Path | None
    timeline: bool
    repeat: int
    npu_as_cpu: bool


def run_file(file: Path, options: RunOptions) -> None:
    """Run a pipeline file as the options say. Raises ShardwrightError."""
    leads = os.environ.get("RANK", "0") == "0"
    steps = Steps(Console(stderr=True), quiet=not leads)
    with steps.step("load"):
        pipeline = Pipeline.load(file, weights_in=options.weights)
        call = as_call(pipeline, _inputs(pipeline, options))
    with steps.step("start"):
        runner = _start(pipeline, options)
    with runner:
        with steps.step("run"):
            result, seconds = _stream(runner, call, options.repeat)
        timeline = runner.timeline
    if leads:
        _report(outputs_by_name(result), seconds, timeline, options)


def _inputs(pipeline: Pipeline, options: RunOptions) -> Mapping[str, torch.Tensor]:
    if options.random == (options.inputs is not None):
        raise InputError("give either --inputs FILE or --random")
    if options.inputs is not None:
        return read_inputs(options.inputs)
    return random_inputs(pipeline, options.seed)


def _start(pipeline: Pipeline, options: RunOptions) -> Runner:
    return Runner(
        pipeline,
        in_process=options.in_process,
        timeout=options.timeout,
        threads=options.threads,
        modules=options.modules,
        trace=options.timeline or options.trace is not None,
        npu_as_cpu=options.npu_as_cpu,
    )


def _stream(runner: Runner, call: Call, count: int) -> tuple[Any, float]:
    """The last result of ``count`` equal calls in a stream, and the seconds they all took."""
    start = time.perf_counter()
    futures = [runner.submit(*call.args, **call.kwargs) for _ in range(count)]
    results = [future.result() for future in futures]
    return results[-1], time.perf_counter() - start


def _report(
    outputs: Mapping[str, torch.Tensor], seconds: float, timeline: Timeline, options: RunOptions
) -> None:
    """Print what came out and, where asked, who did what; write the files that were asked for."""
    console = Console()
    if options.output is not None:
        write_paramfile(options.output, outputs)
    if options.trace is not None:
        timeline.save_chrome_trace(options.trace)
    console.print(output_table(outputs))
    if options.repeat > 1:
        each = seconds_text(seconds / options.repeat)
        console.print(f"{options.repeat} calls in {seconds_text(seconds)}: {each} a call")
    if options.timeline:
        console.print("", TimelineChart(timeline.events), "", sep="\n")
        console.print(slot_table(timeline), "", task_table(timeline), sep="\n")


def output_table(outputs: Mapping[str, torch.Tensor]) -> Table:
    """One row an output: its name, its type, and its least, mean and greatest number."""
    table = new_table("Outputs", ("output", "type"), ("least", "mean", "greatest"))
    for name, tensor in outputs.items():
        kind = tensor_text(dtype_name(tensor.dtype), tensor.shape)
        numbers = tensor.double()
        found = (numbers.min(), numbers.mean(), numbers.max()) if tensor.numel() else ()
        table.add_row(escape(name), escape(kind), *(f"{number.item():.4g}" for number in found))
    return table


# --- inputs and outputs ---------------------------------------------------------------------------


def read_inputs(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file by name. Raises InputError."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"inputs cannot be read from {path}: {error}") from None


def random_inputs(document: Document, seed: int = 0) -> dict[str, torch.Tensor]:
    """A tensor for each input: normal for floats, 0 or 1 for integers (a valid index into
    nearly any table), True for bools. The same seed gives the same tensors.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _random(info.shape, torch_dtype(info.dtype), generator)
        for name, info in document.metadata.tensors.inputs.items()
    }


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.ones(shape, dtype=dtype)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, dtype=dtype, generator=generator)


def as_call(document: Document, tensors: Mapping[str, torch.Tensor]) -> Call:
    """The arguments of the captured call that hold these tensors. Raises InputError."""
    wanted = sorted(document.metadata.tensors.inputs.items(), key=lambda item: item[1].idx)
    names = [name for name, _ in wanted]
    if set(names) != set(tensors):
        raise InputError(
            f"the inputs are {', '.join(names) or 'none'}; found {', '.join(tensors) or 'none'}"
        )
    structure = document.metadata.structure
    if structure is None:
        return Call((), dict(tensors))
    return rebuild_call(structure.inputs, [tensors[name] for name in names])


def outputs_by_name(result: Any) -> dict[str, torch.Tensor]:
    """The tensors of a result, named as in the file's metadata."""
    tree, tensors = describe_result(result)
    return {leaf.name: tensors[leaf.index] for leaf in leaves(tree)}
