"""All passes in order: from a captured graph to one that kernels exist for.

    norms           into the weights before them, in inference
    decompose       operators that have kinds of their own
    merge           what is computed twice
    channels last   wherever convolutions are, and their epilogues, in inference
    fold            what is the same in every run
    losses          cross entropy in one piece
    concatenations  in the order in which they are read
    products        with their epilogues
    chains          of elementwise operators, where there are kernels for them
    dead code       what nothing needs any more

Each takes a valid graph and gives one that computes the same.
"""

from __future__ import annotations

import torch

from shardwright.compiler.passes.channels_last import channels_last
from shardwright.compiler.passes.decompose import Composites, decompose
from shardwright.compiler.passes.epilogue import fold_norms, fuse_convolutions, fuse_gemms
from shardwright.compiler.passes.losses import fuse_losses
from shardwright.compiler.passes.pointwise import fuse_pointwise
from shardwright.compiler.passes.simplify import (
    fold_constants,
    merge_common_subexpressions,
    order_concatenations,
    remove_dead_code,
)
from shardwright.ir import IRGraph
from shardwright.ir.graph import without_collection
from shardwright.ir.inference import Inference


@without_collection()
def prepare(
    graph: IRGraph,
    *,
    inference: bool,
    constants: bool = True,
    device: str | torch.device = "cpu",
    chains: bool | None = None,
) -> IRGraph:
    """The graph as it is lowered: same inputs, stored values, outputs and updates.

    inference
        Nothing stored changes between runs: parameters may be folded, convolutions fused.
    constants
        Whether new stored values may come to be; not where a file already says which there are.
    device
        Where it is to run; composed operators become what torch's kernels there are.
    chains
        Whether elementwise operators become chains, for which there are native kernels alone: one
        that torch interprets is slower than the operators. Where not said, on the CPU.
    """
    if chains is None:
        chains = torch.device(device).type == "cpu"
    known = Inference()
    composites = Composites(torch.device(device).type)
    if inference and constants:
        graph = fold_norms(graph)
    graph = merge_common_subexpressions(decompose(graph, composites=composites, known=known))
    if inference:
        graph = fuse_convolutions(channels_last(graph))
    if constants:
        graph = fold_constants(graph, inference=inference, device=device)
    graph = fuse_losses(graph)
    graph = order_concatenations(graph, known)
    graph = fuse_gemms(graph)
    return remove_dead_code(fuse_pointwise(graph) if chains else graph)
