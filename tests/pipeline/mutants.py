"""Mutants of pipeline files: small good files, and ways to spoil one, all told by a number.

`subjects` builds the files; `mutant` spoils one of them as its number says: by its structure, with
the graphs of its tasks taken apart (values swapped, dropped, doubled, of another type, of another
place), or by its bytes. The same number gives the same mutant.
"""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.pipeline import Pipeline

SUBJECTS = ("stages", "split", "training", "lowered", "lowered training")
BATCH, WIDTH = 4, 6


@dataclass(frozen=True)
class Mutant:
    """A spoiled file: which it was, what was done to it, and its bytes."""

    subject: str
    what: tuple[str, ...]
    data: bytes


class Model(nn.Module):
    """Layers of several kinds, two results of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.nn.functional.gelu(self.norm(self.first(x)))
        h = torch.softmax(self.second(h), -1) + h
        return {"whole": self.last(h), "rows": h.sum(-1)}


def inputs(step: int = 0) -> Tensor:
    """What the files are run on."""
    return torch.arange(BATCH * WIDTH).reshape(BATCH, WIDTH).sin() + step


def subjects(folder: Path) -> None:
    """Write the good files, each with its weights."""
    torch.manual_seed(0)
    model = Model().eval()
    graph = sw.capture(model, (inputs(),))
    stages = sw.build(graph, sw.plan(graph, devices=2))
    stages.save(folder / "stages.json")
    sw.build(graph, sw.plan(graph, mesh={"tensor": 2})).save(folder / "split.json")
    sw.lower(stages).save(folder / "lowered.json")
    step = sw.compile_ir(_step(), inputs()[: BATCH // 2])
    plan = sw.plan(step, mesh={"pipeline": 2}, microbatches=2)
    training = sw.build(step, plan)
    training.save(folder / "training.json")
    sw.lower(training).save(folder / "lowered training.json")


def _step() -> Callable[[Tensor], Tensor]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


# --- spoiling --------------------------------------------------------------------------------


def mutant(folder: Path, seed: int) -> Mutant:
    """The mutant of this number."""
    draw = random.Random(seed)
    subject = draw.choice(SUBJECTS)
    data = (folder / f"{subject}.json").read_bytes()
    if draw.random() < 0.15:
        what, spoiled = _bytes(data, draw)
        return Mutant(subject, (what,), spoiled)
    tree = opened(json.loads(data))
    what = tuple(_spoil(tree, draw) for _ in range(draw.choice((1, 1, 1, 2))))
    return Mutant(subject, what, json.dumps(closed(tree)).encode())


def opened(document: dict[str, Any]) -> dict[str, Any]:
    """The document, the texts of its graphs taken apart in their place."""
    for holder, key in _texts(document):
        holder[key] = json.loads(holder[key])
    return document


def closed(tree: Any) -> Any:
    """The document again, of whatever became of it."""
    for holder, key in _texts(tree):
        if not isinstance(holder[key], str):
            holder[key] = json.dumps(holder[key])
    return tree


def _texts(document: Any) -> Iterator[tuple[dict[str, Any], str]]:
    if not isinstance(document, dict):
        return
    blobs, tasks = document.get("blobs"), document.get("supertasks")
    if isinstance(blobs, dict):
        yield from ((blobs, key) for key in blobs)
    if isinstance(tasks, dict):
        for task in tasks.values():
            if isinstance(task, dict) and task.get("data") is not None:
                yield task, "data"


Place = tuple[Any, Any]
"""A container, and the key or index in it."""


def _places(tree: Any) -> Iterator[Place]:
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree))
    for key in list(keys):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def _spoil(tree: dict[str, Any], draw: random.Random) -> str:
    """Change the document in one place; says how."""
    section = draw.choice([key for key in tree if isinstance(tree[key], dict | list)] or [*tree])
    below = tree[section]
    candidates = [*_places(below)] if isinstance(below, dict | list) else []
    holder, key = draw.choice(candidates or [(tree, section)])
    change = draw.choice(_CHANGES)
    before = json.dumps(holder[key])[:60]
    name = change(tree, holder, key, draw)
    return f"{section}: {name} {key!r} {before}"


def _drop(tree: Any, holder: Any, key: Any, draw: random.Random) -> str:
    del holder[key]
    return "drop"


def _double(tree: Any, holder: Any, key: Any, draw: random.Random) -> str:
    if isinstance(holder, dict):
        holder[f"{key}'"] = copy.deepcopy(holder[key])
    else:
        holder.insert(draw.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    return "double"


def _swap(tree: Any, holder: Any, key: Any, draw: random.Random) -> str:
    other = draw.choice([*(holder if isinstance(holder, dict) else range(len(holder)))])
    holder[key], holder[other] = holder[other], holder[key]
    return "swap"


def _reorder(tree: Any, holder: Any, key: Any, draw: random.Random) -> str:
    if isinstance(holder, dict):
        items = [*holder.items()]
        draw.shuffle(items)
        holder.clear()
        holder.update(items)
    else:
        draw.shuffle(holder)
    return "reorder"


def _from_elsewhere(tree: Any, holder: Any, key: Any, draw: random.Random) -> str:
    """What stands under the same key, or is of the same type, in another place."""
    places = [*_places(tree)]
    alike = [h[k] for h, k in places if k == key and h is not holder]
    typed = [h[k] for h, k in places if type(h[k]) is type(holder[key])]
    holder[key] = copy.deepcopy(draw.choice(alike or typed))
    return "put another"


def _rename(tree: Any, holder: Any, key: Any, draw: random.Random) -> str:
    if not isinstance(holder, dict):
        return _from_elsewhere(tree, holder, key, draw)
    names = [k for h, k in _places(tree) if isinstance(h, dict)]
    new = draw.choice([*names, "", "none", "a b"])
    items = [(new if k == key else k, v) for k, v in holder.items()]
    holder.clear()
    holder.update(items)
    return f"rename to {new!r}"


def _retype(tree: Any, holder: Any, key: Any, draw: random.Random) -> str:
    holder[key] = draw.choice(
        [None, True, 0, -1, 1.5, "", "x", [], {}, [[]], {"ref": "n0"}, [1, 2]]
    )
    return "retype"


_NUMBERS = (0, 1, 2, 3, -1, 7, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**30)
_OPERATORS = (
    *("relu", "neg", "exp", "abs", "t", "detach", "clone", "contiguous", "alias", "sigmoid"),
    *("mm", "matmul", "bmm", "dot", "mv", "outer"),
    *("mul.Tensor", "sub.Tensor", "div.Tensor", "maximum", "pow.Tensor_Tensor", "add_.Tensor"),
    *("sum", "mean", "amax", "argmax", "cumsum", "sort", "topk", "nonzero", "unique_consecutive"),
    *("view", "reshape", "expand", "permute", "slice.Tensor", "select.int", "as_strided"),
    *("index_select", "gather", "scatter.src", "embedding", "embedding_dense_backward"),
    *("_reshape_alias", "resize", "empty.memory_format", "max_pool2d_with_indices_backward"),
    *("from_file", "segment_reduce", "set_.source_Tensor", "resize_", "no_such_operator"),
    *("item", "_local_scalar_dense", "rand_like", "native_dropout", "dropout", "to.dtype"),
)


def _scalar(tree: Any, holder: Any, key: Any, draw: random.Random) -> str:
    """Another number, text, operator or dtype in a leaf."""
    old = holder[key]
    if isinstance(old, bool) or old is None:
        holder[key] = draw.choice([True, False, None, 1])
    elif isinstance(old, int):
        holder[key] = draw.choice([old + 1, old - 1, old * 2, draw.choice(_NUMBERS)])
    elif isinstance(old, float):
        holder[key] = draw.choice([-old, old * 2, 0.0, 1e300, 1e-300, 3])
    elif key == "op":
        name = draw.choice(_OPERATORS)
        holder[key] = f"aten.{name}" if "." in name else f"aten.{name}.default"
    elif key == "blob":
        holder[key] = _other_blob(old, draw)
    elif key == "dtype":
        holder[key] = draw.choice(["f32", "f64", "f16", "bf16", "i64", "i32", "bool", "u8", "c64"])
    elif key == "kind":
        kinds = ["FX", "dfg", "send", "recv", "all_reduce", "all_gather", "input", "output", "npu"]
        holder[key] = draw.choice(kinds)
    elif isinstance(old, str):
        texts = [h[k] for h, k in _places(tree) if isinstance(h[k], str) and len(h[k]) < 99]
        holder[key] = draw.choice([*texts, "", old + "x", old[:-1], "\0", "\ud7ff", "../" + old])
    else:
        return _retype(tree, holder, key, draw)
    return "change"


def _other_blob(blob: Any, draw: random.Random) -> str:
    data = bytearray(base64.b64decode(blob))
    if data and draw.random() < 0.7:
        data[draw.randrange(len(data))] = draw.randrange(256)
    else:
        data = data[: draw.randrange(len(data) + 1)] + bytes(draw.randrange(3))
    return base64.b64encode(bytes(data)).decode()


_CHANGES = (
    *(_drop, _double, _swap, _reorder, _from_elsewhere, _from_elsewhere, _rename, _retype),
    *(_scalar,) * 6,
)


def _bytes(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Change the bytes; says how."""
    place, length = draw.randrange(len(data)), draw.randrange(1, 40)
    kind = draw.choice(("flip", "flip", "cut", "end", "double", "noise", "digit"))
    if kind == "flip":
        flipped = bytes([data[place] ^ (1 << draw.randrange(8))])
        return kind, data[:place] + flipped + data[place + 1 :]
    if kind == "digit":
        digits = [k for k, byte in enumerate(data) if 48 <= byte < 58]
        place = draw.choice(digits)
        number = draw.choice((b"0", b"7", b"-1", b"99999999999"))
        return kind, data[:place] + number + data[place + 1 :]
    parts = {
        "cut": data[:place] + data[place + length :],
        "end": data[:place],
        "double": data[: place + length] + data[place:],
        "noise": data[:place] + draw.randbytes(length) + data[place + length :],
    }
    return kind, parts[kind]


# --- running ---------------------------------------------------------------------------------


def run(folder: Path, data: bytes) -> list[Tensor]:
    """What the product makes of a file: two calls, or two steps. Raises what it raises."""
    pipeline = Pipeline.from_json(data, directory=folder)
    if pipeline.training is None or pipeline.training.microbatches is None:
        with sw.Runner(pipeline, in_process=True) as runner:
            return [*_tensors([runner(inputs(k)) for k in range(2)])]
    with sw.Session(pipeline, in_process=True) as session:
        return [*_tensors([session.step(inputs(k), **_rates(pipeline)) for k in range(2)])]


def _rates(pipeline: Pipeline) -> dict[str, Tensor]:
    """The learning rate, where the file takes one."""
    names = [name for name in pipeline.metadata.tensors.inputs if name != "x"]
    return {name: torch.tensor(1e-2, dtype=torch.float64) for name in names if name == "lr"}


def _tensors(tree: Any) -> Iterator[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return (leaf.detach() for leaf in leaves if isinstance(leaf, Tensor))
