"""Inputs and outputs of a pipeline as tensors by name: read, drawn at random, shown in a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file

from shardwright.errors import InputError
from shardwright.ir.structure import CallArguments, describe_result, leaves, rebuild_call
from shardwright.ir.tensor_meta import dtype_name, tensor_text, torch_dtype
from shardwright.pipeline.schema import Document
from shardwright.reporting import new_table


def output_table(outputs: Mapping[str, torch.Tensor]) -> Table:
    """One row an output: its name, its type, and its least, mean and greatest number."""
    table = new_table("Outputs", ("output", "type"), ("least", "mean", "greatest"))
    for name, tensor in outputs.items():
        kind = tensor_text(dtype_name(tensor.dtype), tensor.shape)
        numbers = tensor.double()
        found = (numbers.min(), numbers.mean(), numbers.max()) if tensor.numel() else ()
        table.add_row(escape(name), escape(kind), *(f"{number.item():.4g}" for number in found))
    return table


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


def as_call(document: Document, tensors: Mapping[str, torch.Tensor]) -> CallArguments:
    """The arguments of the captured call that hold these tensors. Raises InputError."""
    wanted = sorted(document.metadata.tensors.inputs.items(), key=lambda item: item[1].idx)
    names = [name for name, _ in wanted]
    if set(names) != set(tensors):
        raise InputError(
            f"the inputs are {', '.join(names) or 'none'}; found {', '.join(tensors) or 'none'}"
        )
    structure = document.metadata.structure
    if structure is None:
        return CallArguments((), dict(tensors))
    return rebuild_call(structure.inputs, [tensors[name] for name in names])


def outputs_by_name(result: Any) -> dict[str, torch.Tensor]:
    """The tensors of a result, named as in the file's metadata."""
    tree, tensors = describe_result(result)
    return {leaf.name: tensors[leaf.index] for leaf in leaves(tree)}
