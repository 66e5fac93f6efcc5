"""Random numbers that the slots of a partition draw.

Comes in: the stages of one partition. Goes out: notes for the file's reader. What always holds:
slots that train draw equally many, so that they agree in what they all hold if seeded alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shardwright.codegenerate.splitting.collectives import is_collective
from shardwright.codegenerate.stage import Stage
from shardwright.errors import CodegenError
from shardwright.ir import IRNode
from shardwright.ir.operators import is_random


def draw_notes(stages: Sequence[Stage], *, training: bool) -> Iterator[str]:
    """What is to be known of random numbers that slots draw.

    Raises CodegenError where slots that train draw different amounts.
    """
    drawn = [
        [stage.graph.values[node.outputs[0]].shape for node in stage.graph.nodes if _draws(node)]
        for stage in stages
    ]
    if not any(drawn):
        return
    if len({tuple(map(math.prod, shapes)) for shapes in drawn}) > 1:
        if training:
            raise CodegenError(
                f"the slots of {stages[0].name} hold parts of different sizes of what dropout is "
                "done to, and would then draw different random numbers for what they all hold: "
                "plan for a number of slots that divides it, or capture the model in eval mode"
            )
        yield (
            f"{stages[0].name} is for evaluation: in training its slots would draw different "
            "amounts of random numbers, and no longer agree in what they all hold."
        )
    else:
        yield (
            f"The slots of {stages[0].name} draw random numbers in training. Seed all of them "
            "alike (torch.manual_seed), so that they agree in what they all hold; what they hold "
            "parts of gets the same mask on each slot."
        )


def _draws(node: IRNode) -> bool:
    return not is_collective(node) and is_random(node, in_training=True)
