"""How much of the catalog discovery finds by itself: ``python -m benchmarks.discovery``.

Each row's operator is given to discovery as a function of tensors that nothing is known of. A row
is reproduced if every split that the row names was found. Left out of the comparison are splits
that no call of the operator on slices makes: those that the row writes a program for (a masked
lookup), those whose parts are told where they lie (dropout), and those that are put together by
max or min. What discovery finds beyond the row is
counted too: it ran, and gave the whole.
"""

import sys
from dataclasses import dataclass

import torch

from shardwright.ops.bound import BoundDimop, Carry, bind
from shardwright.ops.call import Direct
from shardwright.ops.catalog import ROWS, call_of, dimop_of
from shardwright.ops.discover import discover
from shardwright.ops.rows.views import RESHAPED
from shardwright.ops.trial import same, take
from tests.ops.calls import CASES
from tests.ops.case import Case


@dataclass(frozen=True)
class Outcome:
    """What discovery made of one case: descriptions of splits."""

    case: Case
    expected: frozenset
    found: frozenset

    @property
    def reproduced(self) -> bool:
        return self.expected <= self.found


def outcome(case: Case) -> Outcome:
    graph, inputs = case.make()
    inputs = [tensor.detach() for tensor in inputs]
    bound = dimop_of(graph, graph.nodes[-1])
    expected = {split_of(bound, name) for name in bound.identifiers if sayable(bound, name, inputs)}
    rule = discover(call_of(graph, graph.nodes[-1]), inputs)
    if isinstance(rule, str):
        return Outcome(case, frozenset(expected), frozenset())
    guess = bind(bound.call, rule, "inferred")
    return Outcome(
        case, frozenset(expected), frozenset(split_of(guess, name) for name in guess.identifiers)
    )


def split_of(bound: BoundDimop, identifier: str) -> tuple:
    """A split without names: which dimensions of what are cut, and what is added."""
    flow = bound.flow(identifier)
    whole = Carry("whole")
    return tuple(whole if carry.kind == "any" else carry for carry in flow.inputs), flow.outputs


def sayable(bound: BoundDimop, identifier: str, inputs: list[torch.Tensor]) -> bool:
    """Whether the operator itself, called on slices, makes the split."""
    if "offsets" in bound.call.attrs:
        return False
    parts = bound.split(identifier, 2)
    if parts[0].plain or bound.call.op in RESHAPED:
        summed = any(carry.kind == "partial" for carry in bound.flow(identifier).outputs)
        return bound.reduction == "sum" or not summed
    try:
        for part in parts:
            slices = [
                tensor if where is None else take(tensor, where)
                for tensor, where in zip(inputs, part.inputs, strict=True)
            ]
            made = Direct().emit(bound.call.op, slices, bound.call.attrs)
            made = made if isinstance(made, list) else [made]
            own = part.run(slices)
            if not all(same(one, other) for one, other in zip(made, own, strict=True)):
                return False
    except (RuntimeError, IndexError, ValueError):
        return False
    return True


def main() -> int:
    torch.set_num_threads(1)
    outcomes = [outcome(case) for case in CASES]
    rows = {row: [o for o in outcomes if o.case.op == row] for row in ROWS}
    missed = [row for row, cases in rows.items() if not all(o.reproduced for o in cases)]
    tried = [row for row, cases in rows.items() if cases]
    more = sum(len(o.found - o.expected) for o in outcomes)
    for row in missed:
        for o in rows[row]:
            for split in o.expected - o.found:
                print(f"missed  {row}: {split}")
    share = 1 - len(missed) / len(tried)
    print(f"{len(tried) - len(missed)} of {len(tried)} rows reproduced ({100 * share:.1f}%)")
    print(f"{sum(len(o.expected) for o in outcomes)} splits expected, {more} found beyond them")
    return 0 if share >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
