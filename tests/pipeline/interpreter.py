"""A naive interpreter of pipeline files: the specification read once more, to tell mutants by.

It knows JSON, safetensors and torch; of the package only what torch computes for each kind of a
lowered call, which it gives values of its own, in no planned memory. It believes nothing: whatever
a file says of a tensor is compared with what there is. `Illegal` says where they differ.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.kernels.lowered import BY_NAME, kind_of
from tests.pipeline.weights_mutants import read_plainly

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8": torch.float8_e4m3fn,
    "bool": torch.bool,
    **{f"i{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"u{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    "c64": torch.complex64,
    "c128": torch.complex128,
}
MICROBATCH = ("forward", "backward", "backward_weight")


class Illegal(Exception):
    """The file does not say what it does."""


def need(right: bool, *what: object) -> None:
    if not right:
        raise Illegal(" ".join(map(str, what)))


def interpret(data: bytes, folder: Path, calls: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """The results of calls, or of steps, one after the other, by ``idx`` each."""
    file = Interpreter(json.loads(data), folder)
    return [tensor for call in calls for tensor in file.call(call)]


class Interpreter:
    """One file with its state."""

    def __init__(self, document: dict[str, Any], folder: Path) -> None:
        self.document = document
        self.tensors = document["tensors"]
        self.tasks: dict[str, dict[str, Any]] = document["supertasks"]
        training = document.get("training") or {}
        self.replaces: dict[str, str] = training.get("replaces") or {}
        self.microbatches = training.get("microbatches")
        self.state: dict[str, Tensor] = {}
        for name, info in self.tensors.items():
            if info.get("value") is not None:
                value = info["value"]
                whole = read_plainly(folder / value["path"], value["format"])[value["name"]]
                part = whole[tuple(slice(*ends) for ends in value["placements"])]
                self.state[name] = self.checked(name, part)
            elif info.get("init") == "zeros":
                self.state[name] = torch.zeros(info["shape"], dtype=DTYPES[info["dtype"]])

    def checked(self, name: str, tensor: Tensor) -> Tensor:
        info = self.tensors[name]
        found = (list(tensor.shape), tensor.dtype)
        need(found == (info["shape"], DTYPES[info["dtype"]]), name, info, "is", found)
        return tensor

    # --- calls and steps ----------------------------------------------------------------------

    def call(self, given: dict[str, Tensor]) -> list[Tensor]:
        if self.microbatches is None:
            values = self.sliced(given, 0, 1)
            self.work(values, [*self.tasks])
            self.replace(values, [*self.replaces])
            return self.joined([values])
        return self.step(given)

    def step(self, given: dict[str, Tensor]) -> list[Tensor]:
        n = self.microbatches["n"]
        of = {
            phase: [t for t in self.tasks if self.tasks[t].get("phase") == phase]
            for phase in ("prepare", "update")
        }
        again = [t for t in self.tasks if self.tasks[t].get("phase") in MICROBATCH]
        made = {
            new: next(t for t in self.tasks if new in self.tasks[t]["outputs"])
            for new in self.replaces
        }
        often = [new for new in self.replaces if made[new] in again]
        for new in often:
            if "init" in self.tensors[self.replaces[new]]:
                self.state[self.replaces[new]] = torch.zeros_like(self.state[self.replaces[new]])
        first = self.sliced(given, 0, n)
        self.work(first, of["prepare"])
        each = []
        for k in range(n):
            values = {**first, **self.sliced(given, k, n)}
            self.work(values, again)
            self.replace(values, often)
            each.append(values)
        last = each[-1]
        self.work(last, of["update"])
        self.replace(last, [new for new in self.replaces if new not in often])
        return self.joined(each)

    def replace(self, values: dict[str, Tensor], news: Sequence[str]) -> None:
        for new in news:
            self.state[self.replaces[new]] = self.checked(self.replaces[new], values[new])

    def sliced(self, given: dict[str, Tensor], k: int, n: int) -> dict[str, Tensor]:
        found = {}
        originals = self.document["metadata"]["tensors"]["inputs"]
        for name, piece in self.document["metadata"]["tensor_slices"]["inputs"].items():
            whole = given[piece["origin"]]
            original = originals[piece["origin"]]
            lacking = original["shape"][0] - whole.shape[0] if whole.dim() else 0
            if lacking > 0 and n == 1:  # of rows that do not mix, a call may give fewer
                whole = torch.cat([whole, whole.new_zeros(lacking, *whole.shape[1:])])
            whole_is = (list(whole.shape), whole.dtype)
            need(whole_is == (original["shape"], DTYPES[original["dtype"]]), "input", original)
            ranges = [list(ends) for ends in piece["placements"]]
            dim = (self.microbatches or {}).get("dim", {}).get(piece["origin"])
            if dim is not None:
                ranges[dim] = [end + k * whole.shape[dim] // n for end in ranges[dim]]
            part = whole[tuple(slice(*ends) for ends in ranges)]
            found[name] = self.checked(name, part.to(DTYPES[piece["dtype"]]))
        return found

    def joined(self, each: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        metadata = self.document["metadata"]
        wholes = {}
        for name, original in metadata["tensors"]["outputs"].items():
            wholes[name] = torch.zeros(original["shape"], dtype=DTYPES[original["dtype"]])
        for name, piece in metadata["tensor_slices"]["outputs"].items():
            whole = wholes[piece["origin"]]
            dim = (self.microbatches or {}).get("dim", {}).get(piece["origin"])
            for k, values in enumerate(each) if dim is not None else [(0, each[-1])]:
                ranges = [list(ends) for ends in piece["placements"]]
                if dim is not None:
                    size = whole.shape[dim] // len(each)
                    ranges[dim] = [end + k * size for end in ranges[dim]]
                place = tuple(slice(*ends) for ends in ranges)
                need(whole[place].shape == values[name].shape, "output", name)
                whole[place] = values[name]
        if metadata.get("structure") is not None:
            return [wholes[name] for name in _leaves(metadata["structure"]["outputs"])]
        by_idx = sorted(metadata["tensors"]["outputs"].items(), key=lambda item: item[1]["idx"])
        return [wholes[name] for name, _ in by_idx]

    # --- tasks --------------------------------------------------------------------------------

    def work(self, values: dict[str, Tensor], names: Sequence[str]) -> None:
        """Do tasks as soon as what they read is there."""
        waiting = [name for name in names if self.tasks[name]["kind"] not in ("input", "output")]
        while waiting:
            ready = [
                n for n in waiting if all(self.has(values, t) for t in self.tasks[n]["inputs"])
            ]
            done = self.do(values, ready)
            need(bool(done), "nothing can be done of", waiting)
            waiting = [name for name in waiting if name not in done]

    def has(self, values: dict[str, Tensor], name: str) -> bool:
        return name in self.state or name in values

    def do(self, values: dict[str, Tensor], ready: Sequence[str]) -> list[str]:
        for name in ready:
            task = self.tasks[name]
            if task["kind"] in ("FX", "fx", "dfg"):
                results = self.compute(task, [self.value(values, t) for t in task["inputs"]])
                need(len(results) == len(task["outputs"]), name)
                for tensor, result in zip(task["outputs"], results, strict=True):
                    values[tensor] = self.checked(tensor, result)
                return [name]
            group = sorted(
                (t for t in self.tasks if self.tasks[t].get("group") == task["group"]),
                key=lambda t: self.tasks[t]["device_idx"],
            )
            if set(group) <= set(ready):
                self.communicate(values, [self.tasks[member] for member in group])
                return group
        return []

    def value(self, values: dict[str, Tensor], name: str) -> Tensor:
        return self.state[name] if name in self.state else values[name]

    def communicate(self, values: dict[str, Tensor], members: list[dict[str, Any]]) -> None:
        given = [self.value(values, t) for m in members for t in m["inputs"]]
        sizes = [self.tensors[t]["shape"] for m in members for t in m["outputs"]]
        options = members[0]["metadata"]
        made = COMMUNICATIONS[members[0]["kind"]](given, options, sizes)
        outputs = [t for m in members for t in m["outputs"]]
        for tensor, result in zip(outputs, made, strict=True):
            values[tensor] = self.checked(tensor, result)

    def compute(self, task: dict[str, Any], inputs: Sequence[Tensor]) -> list[Tensor]:
        text = task.get("data") or self.document["blobs"][task["data_blob"]]
        if task["kind"] == "dfg":
            return lowered(json.loads(text), inputs)
        graph = json.loads(text)
        need(len(graph["inputs"]) == len(inputs), "inputs of a graph")
        known: dict[tuple[str, int | None], Tensor] = {
            (name, None): value for name, value in zip(graph["inputs"], inputs, strict=True)
        }
        for node in graph["nodes"]:
            namespace, name, overload = node["op"].split(".")
            function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
            args = [argument(item, known) for item in node["args"]]
            kwargs = {key: argument(item, known) for key, item in node["kwargs"].items()}
            results = function(*args, **kwargs)
            results = flat(results)
            need(len(results) == len(node["outputs"]), node["op"], "results")
            for k, (result, said) in enumerate(zip(results, node["outputs"], strict=True)):
                if said is None:
                    continue
                alike = _is(result, said)
                need(alike, node["op"], said, "is", result.shape, result.dtype, result.stride())
                known[(node["name"], None if len(results) == 1 else k)] = result
        return [known[(ref["ref"], ref.get("index"))] for ref in graph["outputs"]]


def lowered(task: dict[str, Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results of a lowered task; every call computes values with the strides that it says."""
    need(len(inputs) == task["inputs"], "inputs of a task")
    values: dict[int, Tensor | None] = {-1: None}

    def blank(number: int) -> Tensor:
        info = task["values"][number]
        room = torch.empty(info["shape"], dtype=DTYPES[info["dtype"]])
        strides = info.get("strides")
        return (
            room if strides is None else torch.empty_strided(room.shape, strides, dtype=room.dtype)
        )

    for number, tensor in enumerate(inputs):
        values[number] = blank(number)
        need((tensor.shape, tensor.dtype) == (blank(number).shape, blank(number).dtype), number)
        values[number].copy_(tensor)
    for call in task["calls"]:
        row = kind_of(call["kind"])
        attrs = row.unpack(call["schema"], base64.b64decode(call.get("blob", "")))
        given = [values[number] for number in call["inputs"]]
        if row is BY_NAME["view"]:
            (x,) = given
            place = x.storage_offset() + attrs["offset"]
            values[call["outputs"][0]] = x.as_strided(attrs["shape"], attrs["strides"], place)
            continue
        outs = [None if number == -1 else blank(number) for number in call["outputs"]]
        row.torch(attrs, given, outs)()
        values.update(zip(call["outputs"], outs, strict=True))
    return [values[number] for number in task["outputs"]]


def flat(results: Any) -> list[Any]:
    """What a call returns, lists in it opened."""
    if isinstance(results, tuple | list):
        return [one for part in results for one in flat(part)]
    return [results]


def _leaves(tree: Any) -> Iterator[str]:
    """The names of a structure's leaves, in its order."""
    if isinstance(tree, dict) and tree.get("type") == "tensor":
        yield tree["name"]
    elif isinstance(tree, dict | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(part)


def _is(result: Tensor, said: dict[str, Any]) -> bool:
    if (list(result.shape), result.dtype) != (said["shape"], DTYPES[said["dtype"]]):
        return False
    expected = said.get("strides")
    if expected is None:
        return result.is_contiguous() or result.numel() == 0
    triples = zip(result.shape, result.stride(), expected, strict=True)
    return result.numel() == 0 or all(size == 1 or a == b for size, a, b in triples)


def argument(item: Any, known: dict[tuple[str, int | None], Tensor]) -> Any:
    if isinstance(item, list):
        return [argument(one, known) for one in item]
    if not isinstance(item, dict):
        return item
    if "ref" in item:
        return known[(item["ref"], item.get("index"))]
    ((tag, value),) = item.items()
    return TAGS[tag](value)


TAGS: dict[str, Callable[[Any], Any]] = {
    "dtype": DTYPES.__getitem__,
    "layout": lambda name: getattr(torch, name),
    "memory_format": lambda name: getattr(torch, name),
    "device": lambda name: torch.device("cpu"),
    "float": float,
    "complex": lambda parts: complex(*parts),
}


def _reduced(given: list[Tensor], options: dict[str, Any]) -> Tensor:
    fold = {"max": torch.maximum, "min": torch.minimum}.get(options["reduce_op"], torch.add)
    total = given[0]
    for tensor in given[1:]:
        total = fold(total, tensor)
    return total / len(given) if options["reduce_op"] == "avg" else total


Made = Sequence[Tensor]
COMMUNICATIONS: dict[str, Callable[[list[Tensor], dict[str, Any], list[list[int]]], Made]] = {
    "send": lambda given, options, sizes: given,
    "broadcast": lambda given, options, sizes: given * len(sizes),
    "reduce": lambda given, options, sizes: [_reduced(given, options)],
    "all_reduce": lambda given, options, sizes: [_reduced(given, options)] * len(sizes),
    "all_gather": lambda given, options, sizes: [torch.cat(given, options["dim"])] * len(sizes),
    "reduce_scatter": lambda given, options, sizes: _reduced(given, options).split(
        [size[options["dim"]] for size in sizes], options["dim"]
    ),
    "all_to_all": lambda given, options, sizes: [
        torch.cat(row, options["dst_dim"])
        for row in zip(
            *(
                tensor.split([size[options["src_dim"]] for size in sizes], options["src_dim"])
                for tensor in given
            ),
            strict=True,
        )
    ],
}
