"""Orders of work in which weight gradients fill what would be waiting.

Only the gradients of a stage's inputs are waited for by others; those of its weights can come at
any time before the update. Each function gives one rank's actions. F, B and W are the durations of
a rank's whole forward, input gradients and weight gradients, p and n the ranks and microbatches.
Activations are held from a forward until the weight gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shardwright.schedules.schedule import Action, Work


def zb_h1(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Action]:
    """1F1B whose rank r does weight gradients r microbatches later.

    "Zero Bubble Pipeline Parallelism" (Qi et al., 2023). Every rank holds at most p microbatches,
    as the first rank of 1F1B does. Where W <= F <= B and n is at least p, it waits
    (p - 1) (F + B - W) a step; in 1F1B that is (p - 1) (F + B + W).
    """
    ahead = min(ranks - rank - 1, microbatches)
    yield from (Action("F", rank, microbatch) for microbatch in range(ahead))
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            yield Action("F", rank, microbatch + ahead)
        yield Action("B", rank, microbatch)
        if microbatch >= rank:
            yield Action("W", rank, microbatch - rank)
    late = range(max(0, microbatches - rank), microbatches)
    yield from (Action("W", rank, microbatch) for microbatch in late)


def zb_v(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Action]:
    """Two chunks a rank, down the ranks and up again, so that the first rank has the loss.

    "Pipeline Parallelism with Controllable Memory" (Qi et al., 2024). Every rank holds at most 2p
    chunks' activations, which are p microbatches of the whole rank, as in 1F1B; where F = B = W
    and n is at least 2p - 1, it waits only (p - 1) chunks' F a step.
    With fewer microbatches the order is that of 2p - 1, less those that are not there.
    """
    down, up = rank, 2 * ranks - 1 - rank
    rest = ranks - rank
    phases: tuple[tuple[int, list[tuple[Work, int]]], ...] = (
        (2 * rest - 1, [("F", down)]),
        (rank, [("F", up), ("F", down)]),
        (rest, _all(up)),
        (max(microbatches - ranks, ranks - 1), [*_all(down), *_all(up)]),
        (rank, [("B", down), ("B", up)]),
        (rest, [("B", down), ("W", down)]),
        (rank, [("W", up)]),
        (rank, [("W", down)]),
    )
    done: Counter[tuple[Work, int]] = Counter()
    for times, works in phases:
        for work in works * times:
            if done[work] < microbatches:
                yield Action(*work, done[work])
            done[work] += 1


def _all(stage: int) -> list[tuple[Work, int]]:
    return [("F", stage), ("B", stage), ("W", stage)]
