"""Calls that a file might hold, drawn to do harm: wrong sizes, strides and indices.

Comes in: an operator's name and a seed. Goes out: what became of the call, in a process of its own:
refused by the proof, an error of the run, or run. Whatever ends the process is a finding.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardwright.errors import ShardwrightError
from shardwright.ir.inference import Inference
from shardwright.ir.operators import join_call, resolve, signature, split_call
from shardwright.ir.overloads import callable_of
from shardwright.ir.tensor_meta import TensorMeta, contiguous_strides, dtype_name
from shardwright.ir.trusting import check_shapes
from shardwright.ir.values import SLOT, IRValue
from tests.ops.guarded import Guarded

SHAPES = (
    *((), (1,), (2,), (4,), (0,), (2, 4), (4, 2), (4, 4), (3, 4, 4), (2, 4, 4), (1, 2, 4, 4)),
    *((1, 2, 2, 2), (2, 2, 4, 4), (2, 4, 4, 4), (1, 2, 4, 4, 4), (1, 2, 2, 2, 2), (300,)),
)
NUMBERS = (*(-1, 0, 1, 2, 3, 4) * 4, -2, 8, 64, -(2**40), 2**40, 2**62)
INDICES = (-(2**40), -100_000, -1, 0, 1, 3, 100, 100_000, 2**33, 2**40)
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.int64, torch.bool)


def draw(op: str, seed: int) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a call, some of them such as no capture makes."""
    rng = random.Random(f"{op} {seed}")
    shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
    overload = resolve(op)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in signature(overload).parameters:
        value = _argument(rng, parameter.type, parameter.name, shape, dtype)
        if parameter.keyword_only:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return args, kwargs


def _argument(rng: random.Random, kind: str, name: str, shape: Any, dtype: torch.dtype) -> Any:
    if kind.startswith("Optional["):
        inner = kind.removeprefix("Optional[").removesuffix("]")
        given = rng.random() < (0.3 if inner in ("ScalarType", "MemoryFormat") else 0.5)
        return _argument(rng, inner, name, shape, dtype) if given and inner != "Generator" else None
    if kind.startswith("List["):
        inner = kind.removeprefix("List[").removesuffix("]")
        count = 3 if name == "output_mask" else rng.choice((1, 2, 2, 3, 4))
        if inner in ("int", "float") and rng.random() < 0.3:
            return list(shape)
        return [_argument(rng, inner, name, shape, dtype) for _ in range(count)]
    if kind == "Tensor":
        return _tensor(rng, name, shape, dtype)
    return {
        "int": lambda: rng.choice(NUMBERS),
        "float": lambda: rng.choice((0.0, 0.5, 1.0, 2.0, -1.0, 1e30)),
        "number": lambda: rng.choice((0, 1, 2, 0.5, -1, 2**62)),
        "bool": lambda: rng.random() < 0.5,
        "str": lambda: rng.choice(("mean", "sum", "none", "prod", "amax", "tanh", "floor", "ij")),
        "ScalarType": lambda: rng.choice(DTYPES),
        "MemoryFormat": lambda: torch.contiguous_format,
        "Layout": lambda: torch.strided,
        "Device": lambda: SLOT,
    }.get(kind, lambda: None)()


_INTEGERS = ("ind", "target", "pivots", "offsets", "lengths", "sorter", "boundaries", "mask")


def _tensor(rng: random.Random, name: str, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    if rng.random() < 0.4:
        shape = rng.choice(SHAPES)
    if any(word in name for word in _INTEGERS) or (name == "index"):
        dtype = rng.choice((torch.int64, torch.int64, torch.int64, torch.int32, torch.bool))
    elif rng.random() < 0.05:
        dtype = rng.choice(DTYPES)
    if dtype in (torch.int64, torch.int32):
        mild = rng.random() < 0.3
        limit = 2**31 - 1
        values = [rng.choice((0, 1) if mild else INDICES) for _ in range(_count(shape))]
        if dtype == torch.int32:
            values = [max(-limit, min(limit, value)) for value in values]
        tensor = torch.tensor(values, dtype=dtype).reshape(shape)
    else:
        tensor = torch.rand(shape).to(dtype)
    return tensor


def _count(shape: Any) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _laid(tensor: torch.Tensor, rng: random.Random, memory: Guarded) -> torch.Tensor:
    """The same numbers in guarded memory, often with other strides, in which elements may meet."""
    shape, strides = tuple(tensor.shape), list(contiguous_strides(tensor.shape))
    how = rng.choice(("contiguous", "contiguous", "expanded", "permuted", "last", "any"))
    if how == "expanded" and shape:
        strides[rng.randrange(len(shape))] = 0
    elif how == "permuted":
        order = rng.sample(range(len(shape)), len(shape))
        inner = contiguous_strides([shape[dim] for dim in order])
        for dim, step in zip(order, inner, strict=True):
            strides[dim] = step
    elif how == "last" and len(shape) in (4, 5):
        inner = contiguous_strides((shape[0], *shape[2:], shape[1]))
        strides = [inner[0], inner[-1], *inner[1:-1]]
    elif how == "any":
        strides = [rng.choice((0, 1, 2, 5, step)) for step in strides]
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    room = memory.zeros(0 if 0 in shape else reach, tensor.dtype)
    laid = room.as_strided(shape, strides)
    for place in itertools.product(*map(range, shape)):
        laid[place] = tensor[place]
    return laid


def attempt(op: str, seed: int, inference: Inference) -> str:
    """Prove the call and, where that holds, run it: ``refused``, ``error`` or ``ran``."""
    rng = random.Random(seed)
    with Guarded(before=rng.random() < 0.5) as memory:
        return _attempt(op, seed, inference, lambda tensor: _laid(tensor, rng, memory))


def _attempt(op: str, seed: int, inference: Inference, laid: Callable[[Any], Any]) -> str:
    args, kwargs = draw(op, seed)
    overload = resolve(op)
    tensors, attrs = split_call(overload, args, kwargs)
    tensors = [laid(tensor) for tensor in tensors]
    values = [
        IRValue(i, f"x{i}", TensorMeta(tuple(t.shape), dtype_name(t.dtype), _strides(t)))
        for i, t in enumerate(tensors)
    ]
    try:
        check_shapes(op, values, attrs, inference)
        made = inference.outputs(op, values, attrs)
    except ShardwrightError:
        return "refused"
    if sum(item.numel() for item in made if item is not None) > 1 << 22:
        return "large"
    try:
        by_place, by_name = join_call(overload, tensors, attrs, torch.device("cpu"))
        callable_of(overload)(*by_place, **by_name)
    except Exception:
        return "error"
    return "ran"


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return None if tensor.stride() == contiguous_strides(tensor.shape) else tensor.stride()


def findings(op: str, seeds: range, seconds: int = 20) -> Iterator[tuple[int, str]]:
    """Seeds whose call ends a process, and by which signal."""
    start = seeds.start
    while start < seeds.stop:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            _child(op, range(start, seeds.stop), writer, seconds)
        os.close(writer)
        with os.fdopen(reader, "rb") as told:
            reached = len(told.read())
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            return
        last = start + reached - 1
        yield last, signal.Signals(os.WTERMSIG(status)).name
        start = last + 1


def _child(op: str, seeds: range, writer: int, seconds: int) -> None:
    """One byte as each call begins; a call that takes long ends the process too."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    inference = Inference()
    for seed in seeds:
        os.write(writer, b".")
        signal.alarm(seconds)
        try:
            attempt(op, seed, inference)
        except BaseException:
            os.abort()  # What no caller expects is a finding too.
    os._exit(0)
