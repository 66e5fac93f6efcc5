"""Run a split call part by part and put the outputs together again."""

from collections.abc import Sequence
from functools import reduce

import torch

from shardwright.ir import Builder, IRGraph, compile_graph
from shardwright.ops.bound import BoundDimop, BoundPart
from shardwright.ops.call import Direct
from shardwright.ops.dimop import Slice

FOLDS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def sliced(tensor: torch.Tensor, where: Slice | None) -> torch.Tensor | None:
    """The slice of a whole; None for a partial slice that is not the first."""
    if where is None:
        return tensor
    if where.partial is not None and where.partial[0] > 0:
        return None
    for dim, (start, end) in enumerate(where.ranges):
        tensor = tensor.narrow(dim, start, end - start)
    return tensor


def run_whole(graph: IRGraph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a graph of one call, given the inputs of its node."""
    node = graph.nodes[-1]
    made = Direct().emit(node.op, inputs, node.attrs)
    return made if isinstance(made, list) else [made]


def run_graph_of_parts(
    parts: Sequence[BoundPart], inputs: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """The outputs of each part, all made by one graph."""
    builder, arguments, results, counts = Builder("parts"), [], [], []
    for part in parts:
        values = []
        for idx, where in enumerate(part.inputs):
            piece = sliced(inputs[idx], where)
            if piece is None:
                values.append(None)
                continue
            arguments.append(piece)
            dtype = part.bound.call.dtypes[idx]
            name = f"x{len(arguments)}"
            values.append(builder.input(name, piece.shape, dtype, strides=piece.stride()))
        made = part.emit(builder, values)
        results += made
        counts.append(len(made))
    program = compile_graph(builder.finish(results))
    outputs = iter(program(arguments))
    return [[next(outputs) for _ in range(count)] for count in counts]


def join(bound: BoundDimop, parts: Sequence[BoundPart], made: Sequence[Sequence[torch.Tensor]]):
    """The outputs of the whole."""
    joined = []
    for index, shape in enumerate(bound.call.outputs):
        pieces: dict[tuple, list[torch.Tensor]] = {}
        for part, outputs in zip(parts, made, strict=True):
            where = part.outputs[index]
            assert where.shape == tuple(outputs[index].shape), f"{bound}: {part}"
            pieces.setdefault(where.ranges, []).append(outputs[index])
        whole = torch.zeros(shape, dtype=made[0][index].dtype)
        for ranges, terms in pieces.items():
            place = tuple(slice(*range_) for range_ in ranges)
            whole[place] = reduce(FOLDS[bound.reduction], terms)
        joined.append(whole)
    return joined


def gradients(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Of a fixed random combination of the outputs, by each input that may have one."""
    wanted = [x for x in inputs if x.requires_grad]
    total = torch.zeros((), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for output in outputs:
        if output.requires_grad and output.dtype == torch.float64:
            total = total + (output * torch.randn(output.shape, generator=generator)).sum()
    if not total.requires_grad or not wanted:
        return []
    return list(torch.autograd.grad(total, wanted, allow_unused=True))


def check(bound: BoundDimop, parts: Sequence[BoundPart], inputs, whole, whole_gradients):
    """The parts' joined outputs and gradients are the whole's."""
    made = join(bound, parts, [part.run(list(map(sliced, inputs, part.inputs))) for part in parts])
    for got, expected in zip(made, whole, strict=True):
        torch.testing.assert_close(got, expected.to(got.dtype), rtol=1e-10, atol=1e-10)
        assert got.dtype == expected.dtype
    if whole_gradients:
        for got, expected in zip(gradients(made, inputs), whole_gradients, strict=True):
            if expected is None:
                assert got is None or not got.any()
            else:
                torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
