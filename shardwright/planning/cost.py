"""What a node costs as a planner balances it, estimated from its shapes alone.

`work` is in floating-point operations, a multiply and an add being two. Contractions have theirs;
every other operator is counted as the bytes it reads and writes, each worth `WORK_PER_BYTE`
operations, since memory, not arithmetic, is what it takes time for. What operators do is known by
`costs.operations`; seconds on a device are in `costs.cost`.
"""

from __future__ import annotations

from collections.abc import Collection

from shardwright.costs.operations import ELEMENTS, FORMULAS, FREE, LOOKUP, TABLE_PASSES, arithmetic
from shardwright.ir import IRGraph, IRNode

WORK_PER_BYTE = 4
"""Operations a core does in the time in which it moves a byte; a CPU core does 3 to 10."""


def node_work(graph: IRGraph, node: IRNode) -> int:
    """Estimated floating-point operations of a node, memory traffic counted as such."""
    if node.op in FREE:
        return 0
    found = arithmetic(graph, node)
    if found is not None:
        return found
    outputs = [graph.values[value_id].nbytes for value_id in node.outputs]
    if node.op == LOOKUP:
        return 2 * WORK_PER_BYTE * outputs[0]
    return WORK_PER_BYTE * sum((*outputs, *(graph.values[v].nbytes for v in node.inputs)))


def training_work(graph: IRGraph, node: IRNode, needing: Collection[int]) -> int:
    """The same of a node's forward and backward, where the values ``needing`` want gradients.

    A backward takes as much as the forward again for each matrix of a contraction that needs a
    gradient, and once for what is no contraction, but for what `ELEMENTS` knows better.
    """
    wanted = [graph.values[v] for v in node.inputs if v in needing]
    once = node_work(graph, node)
    if not wanted:
        return once
    if node.op in FORMULAS:
        return once * (1 + sum(len(value.shape) > 1 for value in wanted))
    if node.op == LOOKUP:
        return once + WORK_PER_BYTE * TABLE_PASSES * wanted[0].nbytes
    if node.op in ELEMENTS:
        return ELEMENTS[node.op] * graph.values[node.inputs[0]].numel
    return 2 * once
