"""The zoo, end to end: `python -m zoo` captures, cuts, runs and compares every model.

Each model is captured, cut in 2 and in 4, and held against eager bit for bit, in one process and,
in 2, on two worker processes. Then it is split by data, tensor and sequence on 2, 3 and 4 slots,
and in stages of tensor splits, which changes the order of additions and is held to rounding.
Beside it stands what torch's own pipeline splitter (`torch.distributed.pipelining.pipeline`, cut
before the middle block) does with the same model in PyTorch's default mode, gradients on.

With ``--training`` each model takes a step of training in two stages, held against eager
(`gradients`).
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

import shardwright as sw
from shardwright.runtime.verify import rounding
from zoo import gradients
from zoo.models import MODELS, ZooModel

PASSED = "equal"
ROUNDS = "rounds"
"""What is said of a model that differs by rounding, where this machine's products round by how
their arrays are laid out: that is so of half a tensor which crosses from stage to stage."""
BITS = 1e-6
ROUNDING = 1e-5
SPLITS = [{axis: size} for axis in ("data", "tensor", "sequence") for size in (2, 3, 4)]
SPLITS += [{"pipeline": 2, "tensor": 2}]


@dataclass(frozen=True)
class Row:
    """What happened to one model; a field a column."""

    model: str
    nodes: str
    capture: str
    two_stages: str
    four_stages: str
    two_processes: str
    splits: str
    stored_twice: str
    torch_pipelining: str

    @property
    def passed(self) -> bool:
        """Whether everything of ours is as it should be."""
        ours = (self.two_stages, self.four_stages, self.two_processes)
        whole = self.stored_twice == "0" and self.splits == f"{len(SPLITS)} of {len(SPLITS)}"
        return whole and all(result in (PASSED, ROUNDS, "") for result in ours)


def run(entry: ZooModel, *, processes: bool) -> Row:
    """One model through the whole way."""
    model, args, kwargs = entry.make()
    start = time.perf_counter()
    graph = sw.capture(model, args, kwargs, name=entry.name)
    seconds = time.perf_counter() - start
    files = {stages: sw.build(graph, sw.plan(graph, devices=stages)) for stages in (2, 4)}
    return Row(
        model=entry.name,
        nodes=str(len(graph.nodes)),
        capture=f"{seconds:.1f} s",
        two_stages=compare(entry, files[2], model, kwargs, in_process=True),
        four_stages=compare(entry, files[4], model, kwargs, in_process=True),
        two_processes=compare(entry, files[2], model, kwargs, in_process=False)
        if processes
        else "",
        splits=f"{count_splits(entry, graph, model, kwargs)} of {len(SPLITS)}",
        stored_twice=str(stored_twice(model, files[4])),
        torch_pipelining=peer(model, kwargs),
    )


def compare(
    entry: ZooModel, file: sw.Pipeline, model: nn.Module, kwargs: dict, *, in_process: bool
) -> str:
    """`equal` where every output equals eager's to the last bit, else the first line of why not."""
    bounds = {PASSED: 0.0, ROUNDS: BITS if rounding().by_layout else 0.0}
    why = ""
    for result, tolerance in bounds.items():
        try:
            sw.verify(
                file,
                model,
                (),
                kwargs,
                tolerance=tolerance,
                in_process=in_process,
                modules=entry.modules,
            )
        except sw.ShardwrightError as error:
            why = why or str(error).splitlines()[0]
        else:
            return result
    return why


def count_splits(entry: ZooModel, graph: sw.IRGraph, model: nn.Module, kwargs: dict) -> int:
    """How many of `SPLITS` give what eager gives, up to rounding."""
    passed = 0
    for mesh in SPLITS:
        file = sw.build(graph, sw.plan(graph, mesh=mesh))
        try:
            sw.verify(file, model, (), kwargs, tolerance=ROUNDING, modules=entry.modules)
        except sw.VerifyError:
            continue
        passed += 1
    return passed


def stored_twice(model: nn.Module, file: sw.Pipeline) -> int:
    """How many of the model's parameters stand under more than one name in weight files."""
    stored = {info.value.name for info in file.tensors.values() if info.value is not None}
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return sum(len(aliases & stored) > 1 for aliases in names.values())


def peer(model: nn.Module, kwargs: dict) -> str:
    """What torch.distributed.pipelining's splitter does, cut before the middle block."""
    blocks = next(blocks_of(model))
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            split = pipeline(model, (), kwargs, split_spec={blocks: SplitPoint.BEGINNING})
            found = split(**kwargs)
            expected = model(**kwargs)
    except Exception as error:  # whatever the peer raises is what the table is about
        return f"fails: {type(error).__name__}"
    finally:
        logging.disable(logging.NOTSET)
    same = all(map(torch.equal, tensors(found), tensors(expected)))
    return PASSED if same else "differs"


def blocks_of(model: nn.Module) -> Iterator[str]:
    """The path of the middle child of each list of modules, the longest list first."""
    lists = [
        (len(module), path)
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1
    ]
    for count, path in sorted(lists, key=lambda found: -found[0]):
        yield f"{path}.{count // 2}"


def tensors(result: object) -> Iterator[torch.Tensor]:
    """The tensors of a result, in order."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, dict):
        for item in result.values():
            yield from tensors(item)
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from tensors(item)


def as_table(rows: Sequence[Row | gradients.Row]) -> Table:
    """The rows for a terminal."""
    table = Table(title=f"{sum(row.passed for row in rows)} of {len(rows)} models pass")
    heading, *lines = cells(rows)
    for name in heading:
        table.add_column(name)
    for line in lines:
        table.add_row(*line)
    return table


def as_markdown(rows: Sequence[Row | gradients.Row]) -> str:
    """The rows as a table of docs/zoo.md."""
    heading, *lines = cells(rows)
    lines = [heading, ["---"] * len(heading), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(rows: Sequence[Row | gradients.Row]) -> list[list[str]]:
    """The names of the columns, and a line a row."""
    names = [column.name for column in fields(rows[0])]
    heading = [name.replace("_", " ") for name in names]
    return [heading, *([getattr(row, name) for name in names] for row in rows)]


def main() -> int:
    """Print the table; 1 where a model does not pass."""
    parser = argparse.ArgumentParser(
        prog="python -m zoo", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("models", nargs="*", help="names of models; all where none is given")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--no-processes", action="store_true", help="run in this process only")
    parser.add_argument("--training", action="store_true", help="take a step of training instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [entry for entry in MODELS if not options.models or entry.name in options.models]
    console = Console(stderr=True)
    rows = [
        gradients.run(entry.name)
        if options.training
        else run(entry, processes=not options.no_processes)
        for entry in track(chosen, "models", console=console)
    ]
    if options.markdown:
        print(as_markdown(rows))
    else:
        Console(width=140).print(as_table(rows))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
