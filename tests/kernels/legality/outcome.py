"""What becomes of a lowered task: refused in words, or run in every way that there is.

It runs by native kernels, by torch's, and each call alone on operands of exactly their size,
between pages that may not be touched.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.compiler.executor import Executor, written_out
from shardwright.compiler.memory.reuse import legalize_layouts
from shardwright.compiler.tasks import plan_task
from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import contiguous_strides, itemsize, torch_dtype
from shardwright.kernels.files import decode
from shardwright.kernels.lowered import (
    BaseView,
    LoweredGraph,
    LoweredOp,
    bind_torch,
    find_bases,
    kind_of,
)
from shardwright.kernels.native.library import BoundCall, Library, NativeOperand, addresses, load
from shardwright.kernels.row import ABSENT
from shardwright.kernels.strides import extent
from tests.kernels.legality.mutants import NUMBERS
from tests.ops.guarded import Guarded


def feed_of(graph: LoweredGraph, rng: random.Random | None = None) -> dict[str, Tensor]:
    """Numbers for every input; whole ones are zeros, which any table has a row for, or wild."""
    draws = torch.Generator().manual_seed(0)
    feed = {}
    for vid in graph.inputs:
        spec = graph.values[vid]
        strides = spec.strides or contiguous_strides(spec.shape)
        x = torch.rand(extent(spec.shape, strides), generator=draws) + 0.5
        dtype = torch_dtype(spec.dtype)
        if dtype.is_floating_point or dtype.is_complex:
            x = x.to(dtype)
        else:
            x = torch.zeros(x.shape, dtype=dtype)
            if rng is not None and dtype == torch.int64 and x.numel():
                x[rng.randrange(x.numel())] = rng.choice(NUMBERS)
        feed[spec.name] = x.as_strided(spec.shape, strides)
    return feed


def is_torchs(error: Exception) -> bool:
    """Whether torch has no kernel of a dtype, or an operator takes less than it told of."""
    notes = getattr(error, "__notes__", [""])
    return isinstance(error, NotImplementedError) or notes[0].startswith("in generic, call")


class Outcome(NamedTuple):
    """What became of a mutant, by what it was refused, and what it called where it ran."""

    word: str
    refused_by: str = ""
    called: tuple[str, ...] = ()


def outcome(text: str, seed: int | None = None) -> Outcome:
    """What becomes of a text: refused, or run, where torch may raise in a generic call."""
    try:
        graph = decode(text)
    except ExecError as error:
        return Outcome("refused", _rule(error))
    rng = None if seed is None or seed % 4 else random.Random(seed)
    feed, plan = feed_of(graph, rng), plan_task(graph)
    found, result = [], "run"
    for native in (True, False):
        try:
            found.append(Executor(plan, native=native).run(feed))
        except ExecError as error:
            result, rule = "refused as it ran", _rule(error)
        except Exception as error:
            if not (is_torchs(error) or rng is not None):
                raise
            result, rule = "torch's error", type(error).__name__
    called: list[str] = []
    if (library := load()) is not None and result == "run":
        try:
            with Guarded(seed is not None and seed % 2 == 1) as memory:
                run_alone(graph, feed, library, memory, called)
        except ExecError as error:  # a plan leaves out calls whose results nobody reads
            result, rule = "refused as it ran", _rule(error)
    for made in found:
        for vid, tensor in zip(graph.outputs, made, strict=True):
            spec = graph.values[vid]
            assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, torch_dtype(spec.dtype))
    return Outcome(result, "" if result == "run" else rule, tuple(called))


def _rule(error: BaseException) -> str:
    """The module and function that refused, without those that only word it."""
    while error.__context__ is not None:
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    names = [
        (Path(frame.filename).stem, frame.name)
        for frame in frames
        if "shardwright" in frame.filename
    ]
    told = [name for name in names if name[0] != "call"] or names
    return " ".join(told[-1]) if told else type(error).__name__


def run_alone(
    graph: LoweredGraph,
    feed: Mapping[str, Tensor],
    library: Library,
    guarded: Guarded,
    called: list[str],
) -> None:
    """Every call on operands of exactly their size: what reads or writes beyond is seen."""
    graph = legalize_layouts(graph, find_bases(graph.values, graph.ops))
    bases = find_bases(graph.values, graph.ops)
    memory = {}
    for vid in {view.base for view in bases.values()}:
        spec = graph.values[vid]
        strides = spec.strides or contiguous_strides(spec.shape)
        size = extent(spec.shape, strides)
        memory[vid] = guarded.zeros(size, torch_dtype(spec.dtype))
        if vid in graph.inputs:
            memory[vid].copy_(feed[spec.name].as_strided((size,), (1,)))
    for number, op in enumerate(graph.ops):
        if kind_of(op.kind_id).name != "view":
            called.append(_run_call(op, number, graph, bases, memory, library))


def _run_call(
    op: LoweredOp,
    number: int,
    graph: LoweredGraph,
    bases: Mapping[int, BaseView],
    memory: Mapping[int, Tensor],
    library: Library,
) -> str:
    """What it called: a kernel by its kind, an operator by its name."""
    kind, vids = kind_of(op.kind_id), (*op.in_vids, *op.out_vids)
    roots = list(dict.fromkeys(bases[vid].base for vid in vids if vid != ABSENT))
    operands = [
        None
        if vid == ABSENT
        else NativeOperand(
            roots.index(bases[vid].base),
            bases[vid].offset * itemsize(graph.values[vid].dtype),
            graph.values[vid].dtype,
            bases[vid].shape,
            bases[vid].strides,
            vid in graph.inputs and vid not in op.out_vids,
        )
        for vid in vids
    ]
    bound: BoundCall | str = "torch's"
    if kind.name != "generic":
        blob = written_out(kind, op)
        bound = library.bind(op.kind_id, 1, blob, operands, len(op.in_vids), number=number)
    if isinstance(bound, BoundCall):
        bases = addresses([memory[root].data_ptr() for root in roots])
        bound.prepare(bases, 1)
        library.program([bound]).run(bases, 1)
        return f"native {kind.name}"
    seen = [
        None
        if vid == ABSENT
        else memory[bases[vid].base].as_strided(*bases[vid][2:], bases[vid].offset)
        for vid in vids
    ]
    attrs = kind.unpack(op.attr_schema, op.attr_blob)
    bind_torch(kind.name, attrs, seen[: len(op.in_vids)], seen[len(op.in_vids) :])()
    return str(attrs["op"]) if kind.name == "generic" else f"torch's {kind.name}"
