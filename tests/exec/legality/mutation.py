"""Lowered tasks of which something was changed, and what becomes of them.

    python -m tests.exec.legality.mutation 0 50000 --sanitize

Each seed changes one to three things in a good task: a shape, dtype, stride, operand, call, byte of
attributes, argument of a generic call, or the contents of whole numbers. It is refused in words, or
runs: by native kernels, by torch's, and each call alone on operands of exactly their size. With
``--sanitize`` the native kernels are compiled by g++ with AddressSanitizer, and a process that it
ends is told with its report and its seed. Exits with 1 where a seed did anything else than that.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import select
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.errors import ExecError
from shardwright.exec.executor import Executor
from shardwright.exec.files import decode
from shardwright.exec.kernels.table import bind_torch
from shardwright.exec.kinds import BY_NAME, kind_of
from shardwright.exec.layouts import meet_layouts
from shardwright.exec.lowered import ABSENT, LoweredGraph, LoweredOp
from shardwright.exec.native.library import Bound, Library, Operand, addresses, load
from shardwright.exec.segments import written_out
from shardwright.exec.spots import Spots, extent, find_spots
from shardwright.exec.task_program import plan_task
from shardwright.ir.dtypes import DTYPES, itemsize, torch_dtype
from shardwright.ir.values import contiguous_strides
from tests.runtime.programs import gpt, tokens

SANITIZER = "g++ -fsanitize=address -fno-omit-frame-pointer -g1 -D_GLIBCXX_ASSERTIONS -mno-avx512f"
"""Without masked loads and stores, which the sanitizer does not see."""
PATIENCE = 300.0
"""Seconds after which a mutant hangs."""

# --- good tasks ------------------------------------------------------------------------------


class Images(nn.Module):
    """Convolutions with norms and pools."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.norm, self.last = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.adaptive_avg_pool2d(x + self.second(x), 1)
        return self.last(x.flatten(1))


class Places(nn.Module):
    """Operators that take places from contents, and others that are torch's alone."""

    def forward(self, x: Tensor, rows: Tensor, picked: Tensor) -> tuple[Tensor, ...]:
        taken = x.index_select(0, rows).gather(1, picked)
        added = torch.zeros_like(x).index_add(0, rows, x).scatter_add(1, picked, taken)
        best, at = x.topk(2, 1)
        wide = F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear")
        bent = F.pad(x[None], (1, 1), mode="reflect").cumsum(-1)
        seen = F.grid_sample(
            x[None, None],
            torch.zeros_like(wide[:, :1, :2, :2, None])[..., [0, 0]][:, 0],
            align_corners=False,
        )
        return added, best, at, wide, bent, F.embedding(rows, x), x[rows, rows], seen, x.sort(1)[0]


def _texts(pipeline: sw.Pipeline) -> set[str]:
    lowered = sw.lower(pipeline)
    tasks = lowered.supertasks.items()
    return {lowered.data_of(name) for name, task in tasks if task.kind == "dfg"}


def _step(made: Any, batch: Any) -> set[str]:
    graph = sw.compile_ir(made.step, *batch)
    return _texts(sw.build(graph, sw.plan(graph, devices=2)))


def _images() -> set[str]:
    torch.manual_seed(0)
    model, x = Images(), torch.randn(2, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    graph = sw.compile_ir(step, x, torch.randn(2, 4))
    return _texts(sw.build(graph, sw.plan(graph, devices=1)))


def _places() -> set[str]:
    rows, picked = torch.tensor([0, 2, 1, 1]), torch.zeros(4, 3, dtype=torch.long)
    graph = sw.capture(Places(), (torch.randn(4, 6), rows, picked))
    return _texts(sw.build(graph, sw.plan(graph, devices=1)))


@cache
def texts() -> list[str]:
    """Tasks of all models, in one order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sorted(_step(gpt(0.1), tokens(1)[0]) | _images() | _places())


# --- what is changed -------------------------------------------------------------------------

SIZES = (0, 1, 2, 3, 4, 5, 8, 16, 17, -1)
NUMBERS = (0, 1, -1, 2, 7, 31, 63, 64, 127, 255, 2**15, 2**31 - 1, 2**31, 2**33, -(2**31), 2**62)
Text = dict[str, Any]
Change = Callable[[random.Random, Text], None]


def _value(rng: random.Random, text: Text) -> Text:
    return rng.choice(text["values"])


def _call(rng: random.Random, text: Text) -> Text:
    return rng.choice(text["calls"]) if text["calls"] else {"inputs": [], "outputs": []}


def _dtype(rng: random.Random, text: Text) -> None:
    _value(rng, text)["dtype"] = rng.choice(sorted(DTYPES))


def _shape(rng: random.Random, text: Text) -> None:
    shape = _value(rng, text)["shape"]
    place, how = rng.randint(0, len(shape)), rng.choice(("size", "insert", "remove"))
    if how == "insert" or place == len(shape):
        shape.insert(place, rng.choice(SIZES))
    elif how == "remove":
        del shape[place]
    else:
        shape[place] = rng.choice(SIZES)


def _strides(rng: random.Random, text: Text) -> None:
    value = _value(rng, text)
    value["strides"] = [rng.choice((0, 1, 2, 3, 5, 8, 20, 64)) for _ in value["shape"]]


def _blob(rng: random.Random, text: Text) -> None:
    """A byte, a number of four or eight bytes, or the length."""
    call = _call(rng, text)
    blob = bytearray(base64.b64decode(call.get("blob", "")))
    place, how = rng.randint(0, len(blob)), rng.choice(("byte", "bit", "word", "long", "cut"))
    if place == len(blob):
        blob.append(rng.randint(0, 255))
    elif how == "cut":
        del blob[place:]
    elif how in ("word", "long"):
        size = 4 if how == "word" else 8
        number = rng.choice(NUMBERS) % 2 ** (8 * size)
        blob[place : place + size] = number.to_bytes(size, "little")
    else:
        blob[place] = rng.randint(0, 255) if how == "byte" else blob[place] ^ 1 << rng.randint(0, 7)
    call["blob"] = base64.b64encode(blob).decode()


def _operand(rng: random.Random, text: Text) -> None:
    call = _call(rng, text)
    if side := call[rng.choice(("inputs", "outputs"))]:
        side[rng.randrange(len(side))] = rng.randint(-1, len(text["values"]))


def _operands(rng: random.Random, text: Text) -> None:
    """One more, one less, or two the other way round."""
    side = _call(rng, text)[rng.choice(("inputs", "outputs"))]
    how = rng.choice(("more", "less", "swap"))
    if how == "more":
        side.insert(rng.randint(0, len(side)), rng.randint(-1, len(text["values"])))
    elif side and how == "less":
        side.pop(rng.randrange(len(side)))
    elif side:
        rng.shuffle(side)


def _kind(rng: random.Random, text: Text) -> None:
    _call(rng, text)[rng.choice(("kind", "schema"))] = rng.randint(0, 44)


def _outputs(rng: random.Random, text: Text) -> None:
    outputs = text["outputs"]
    if outputs:
        outputs[rng.randrange(len(outputs))] = rng.randint(0, len(text["values"]))


def _calls(rng: random.Random, text: Text) -> None:
    """A call less, twice, or at another place."""
    calls = text["calls"]
    if not calls:
        return
    at, how = rng.randrange(len(calls)), rng.choice(("less", "twice", "moved"))
    call = calls[at] if how == "twice" else calls.pop(at)
    if how != "less":
        calls.insert(rng.randint(0, len(calls)), json.loads(json.dumps(call)))


def _inputs(rng: random.Random, text: Text) -> None:
    text["inputs"] += rng.choice((-1, 1, 2))


def _generic(rng: random.Random, text: Text) -> None:
    """A number among the arguments of a generic call, or another operator."""
    generic = BY_NAME["generic"]
    calls = [call for call in text["calls"] if call["kind"] == generic.id]
    if not calls:
        return _blob(rng, text)
    call = rng.choice(calls)
    try:
        attrs = generic.unpack(call["schema"], base64.b64decode(call["blob"]))
        given = json.loads(attrs["call"])
    except (ExecError, ValueError):  # it was changed before
        return _blob(rng, text)
    if rng.random() < 0.25:
        attrs["op"] = rng.choice(_operators())
    else:
        attrs["call"] = json.dumps(_other_number(rng, given))
    call["schema"], blob = generic.pack(attrs)
    call["blob"] = base64.b64encode(blob).decode()


def _other_number(rng: random.Random, found: Any) -> Any:
    """The same with one of its numbers another."""
    places: list[tuple[Any, Any]] = []

    def look(item: Any) -> None:
        pairs = item.items() if isinstance(item, dict) else enumerate(item)
        for key, part in pairs:
            if isinstance(part, dict | list):
                look(part)
            elif isinstance(part, int | float) or part is None:
                places.append((item, key))

    look(found)
    if places:
        item, key = rng.choice(places)
        item[key] = rng.choice((*NUMBERS, *SIZES, None, True, 0.5, [1], [2, 2]))
    return found


TRUSTING = (
    *("aten.as_strided.default", "aten._reshape_alias.default", "aten.resize.default"),
    *("aten.embedding_dense_backward.default", "aten.max_pool2d_with_indices_backward.default"),
    *("aten.adaptive_max_pool2d_backward.default", "aten.segment_reduce.default"),
    *(
        "aten._convert_indices_from_csr_to_coo.default",
        "aten.take.default",
        "aten.index_put.default",
    ),
    *("aten.max_unpool2d.default", "aten.unfold_backward.default", "aten.put.default"),
    *("aten.empty.memory_format", "aten.empty_strided.default", "aten.select_backward.default"),
)
"""Operators that trust places or sizes, which a file may be made to name."""


@cache
def _operators() -> list[str]:
    """Operators that generic calls are made to have."""
    generic, found = BY_NAME["generic"], set(TRUSTING)
    for text in texts():
        for call in json.loads(text)["calls"]:
            if call["kind"] == generic.id:
                blob = base64.b64decode(call["blob"])
                found.add(generic.unpack(call["schema"], blob)["op"])
    return sorted(found)


CHANGES: Mapping[str, Change] = {
    "dtype": _dtype,
    "shape": _shape,
    "strides": _strides,
    "blob": _blob,
    "operand": _operand,
    "operands": _operands,
    "kind": _kind,
    "outputs": _outputs,
    "calls": _calls,
    "inputs": _inputs,
    "generic": _generic,
}


def mutant(seed: int) -> str:
    """The text of a seed's mutant."""
    rng = random.Random(seed)
    text = json.loads(rng.choice(texts()))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        CHANGES[rng.choice(sorted(CHANGES))](rng, text)
    return json.dumps(text)


# --- what becomes of it ----------------------------------------------------------------------


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


def outcome(text: str, seed: int | None = None) -> str:
    """What becomes of a text: refused, or run, where torch may raise in a generic call."""
    try:
        graph = decode(text)
    except ExecError:
        return "refused"
    rng = None if seed is None or seed % 4 else random.Random(seed)
    feed, plan = feed_of(graph, rng), plan_task(graph)
    found, result = [], "run"
    for native in (True, False):
        try:
            found.append(Executor(plan, native=native).run(feed))
        except ExecError:
            result = "refused as it ran"
        except Exception as error:
            if not (is_torchs(error) or rng is not None):
                raise
            result = "torch's error"
    if (library := load()) is not None and result == "run":
        try:
            run_alone(graph, feed, library)
        except ExecError:  # a plan leaves out calls whose results nobody reads
            result = "refused as it ran"
    for made in found:
        for vid, tensor in zip(graph.outputs, made, strict=True):
            spec = graph.values[vid]
            assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, torch_dtype(spec.dtype))
    return result


def run_alone(graph: LoweredGraph, feed: Mapping[str, Tensor], library: Library) -> None:
    """Every call on operands of exactly their size: what reads or writes beyond is seen."""
    graph = meet_layouts(graph, find_spots(graph.values, graph.ops))
    spots = find_spots(graph.values, graph.ops)
    memory = {}
    for vid in {spot.root for spot in spots.values()}:
        spec = graph.values[vid]
        strides = spec.strides or contiguous_strides(spec.shape)
        size = extent(spec.shape, strides)
        if vid in graph.inputs:
            memory[vid] = feed[spec.name].as_strided((size,), (1,)).clone()
        else:
            memory[vid] = torch.zeros(size, dtype=torch_dtype(spec.dtype))
    for number, op in enumerate(graph.ops):
        if kind_of(op.kind_id).name != "view":
            _run_call(op, number, graph, spots, memory, library)


def _run_call(
    op: LoweredOp,
    number: int,
    graph: LoweredGraph,
    spots: Spots,
    memory: Mapping[int, Tensor],
    library: Library,
) -> None:
    kind, vids = kind_of(op.kind_id), (*op.in_vids, *op.out_vids)
    roots = list(dict.fromkeys(spots[vid].root for vid in vids if vid != ABSENT))
    operands = [
        None
        if vid == ABSENT
        else Operand(
            roots.index(spots[vid].root),
            spots[vid].offset * itemsize(graph.values[vid].dtype),
            graph.values[vid].dtype,
            spots[vid].shape,
            spots[vid].strides,
            vid in graph.inputs and vid not in op.out_vids,
        )
        for vid in vids
    ]
    bound: Bound | str = "torch's"
    if kind.name != "generic":
        blob = written_out(kind, op)
        bound = library.bind(op.kind_id, 1, blob, operands, len(op.in_vids), number=number)
    if isinstance(bound, Bound):
        bases = addresses([memory[root].data_ptr() for root in roots])
        bound.prepare(bases, 1)
        library.program([bound]).run(bases, 1)
        return
    seen = [
        None
        if vid == ABSENT
        else memory[spots[vid].root].as_strided(*spots[vid][2:], spots[vid].offset)
        for vid in vids
    ]
    attrs = kind.unpack(op.attr_schema, op.attr_blob)
    bind_torch(kind.name, attrs, seen[: len(op.in_vids)], seen[len(op.in_vids) :])()


# --- many ------------------------------------------------------------------------------------


def _work(first: int, end: int, corpus: Path) -> None:
    """The seeds of a slice, each told before and after it is tried."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = json.loads(corpus.read_text())
    globals()["texts"] = lambda: found
    for seed in range(first, end):
        print(f"try {seed}", flush=True)
        try:
            said = outcome(mutant(seed), seed)
        except Exception as error:
            said = f"raw {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"end {said}", flush=True)


def _slice(first: int, end: int, corpus: Path, sanitize: bool) -> Iterator[tuple[int, str]]:
    """Seeds and what became of them, in processes that are replaced when they end or hang."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if sanitize:
        # The sanitizer looks for the thrower of exceptions as the process begins.
        names = ("libasan.so", "libstdc++.so.6")
        found = [
            subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
            for name in names
        ]
        environment |= {
            "CXX": SANITIZER,
            "LD_PRELOAD": " ".join(found),
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:detect_odr_violation=0"
            ":max_allocation_size_mb=4096",
        }
    while first < end:
        command = [sys.executable, "-m", __spec__.name, str(first), str(end)]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [*command, "--corpus", str(corpus)],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )
            seed, ended = first - 1, True
            assert process.stdout is not None
            for line in _lines(process.stdout.fileno()):
                word, _, said = line.partition(" ")
                if word == "try":
                    seed, ended = int(said), False
                elif word == "end":
                    ended = True
                    yield seed, said
            process.kill()
            code = process.wait()
            errors.seek(0)
            report = errors.read()
        if not ended or code:
            seed = max(seed, first)
            yield seed, f"ended with code {code}\n{report[-6000:]}"
        first = seed + 1


def _lines(file: int) -> Iterator[str]:
    """Lines of a pipe, until it ends or says nothing for too long."""
    kept = b""
    while select.select([file], [], [], PATIENCE)[0]:
        if not (read := os.read(file, 1 << 16)):
            return
        *whole, kept = (kept + read).split(b"\n")
        yield from (line.decode() for line in whole)


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutants of lowered tasks.")
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int, help="the seed behind the last")
    parser.add_argument("--sanitize", action="store_true", help="kernels with AddressSanitizer")
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.corpus is not None:
        _work(asked.first, asked.end, asked.corpus)
        return 0
    counts: Counter[str] = Counter()
    bad, begin = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "texts.json"
        corpus.write_text(json.dumps(texts()))
        for done, (seed, said) in enumerate(
            _slice(asked.first, asked.end, corpus, asked.sanitize), 1
        ):
            word = "raw error" if said.startswith("raw ") else said.split("\n")[0]
            counts[word] += 1
            if word == "raw error" or said.startswith("ended"):
                bad += 1
                print(f"seed {seed}: {said}", flush=True)
            if done % 1000 == 0 or seed + 1 == asked.end:
                spent = time.monotonic() - begin
                print(f"{done} mutants in {spent:.0f} s: {dict(counts)}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
