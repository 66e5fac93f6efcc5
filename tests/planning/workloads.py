"""Random workloads, and what their stages carry, worked out from the definitions."""

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

from hypothesis import strategies as st

from shardwright.planning.workload import SentValue, StoredValue, Workload


def workloads(most=8, least=1):
    """Random nodes, each reading some of those before it."""
    seeds = st.integers(0, 2**32 - 1)
    return st.builds(lambda seed: random_workload(Random(seed), least, most), seeds)


def random_workload(random: Random, least: int, most: int) -> Workload:
    count = random.randint(least, most)
    nodes = range(count)
    sent = []
    for maker in range(count - 1):
        for _ in range(random.randint(0, 2)):
            later = range(maker + 1, count)
            readers = random.sample(later, random.randint(1, min(3, len(later))))
            price, kept = random.randint(0, 20), random.randint(0, 20)
            sent.append(SentValue(maker, tuple(sorted(readers)), price, price * 10, kept, kept))
    stored = [
        StoredValue(
            tuple(sorted(random.sample(nodes, random.randint(1, min(3, count))))),
            random.randint(0, 20),
        )
        for _ in range(random.randint(0, 3))
    ]
    return Workload(
        tuple(f"node {i}" for i in nodes),
        tuple(random.randint(0, 20) for _ in nodes),
        tuple(sent),
        tuple(stored),
    )


def random_parts(random: Random, workload: Workload, count: int) -> list[int]:
    """A number below ``count`` for each node."""
    return [random.randrange(count) for _ in range(len(workload))]


def members(stages: Sequence[int], ranks: Sequence[int]) -> list[set[int]]:
    """The nodes of each rank."""
    found: list[set[int]] = [set() for _ in range(max(ranks) + 1)]
    for node, stage in enumerate(stages):
        found[ranks[stage]].add(node)
    return found


def seconds_of(workload: Workload, nodes: set[int]) -> float:
    """What a set of nodes carries: its work, what arrives, and what leaves, each value once."""
    total = sum(workload.seconds[node] for node in nodes)
    for value in workload.sent:
        arrives = value.maker not in nodes and not nodes.isdisjoint(value.readers)
        leaves = value.maker in nodes and not nodes.issuperset(value.readers)
        total += value.seconds * (arrives or leaves)
    return total


def sent_to(workload: Workload, nodes: set[int]) -> float:
    """The seconds of what arrives."""
    return sum(
        value.seconds
        for value in workload.sent
        if value.maker not in nodes and not nodes.isdisjoint(value.readers)
    )


def stored_by(workload: Workload, nodes: set[int]) -> float:
    return sum(value.nbytes for value in workload.stored if not nodes.isdisjoint(value.readers))


def kept_by(workload: Workload, nodes: set[int]) -> float:
    total = 0
    for value in workload.sent:
        if value.maker in nodes:
            total += value.kept
        elif not nodes.isdisjoint(value.readers):
            total += value.arrived
    return total


def merit(workload: Workload, stages: Sequence[int], ranks: Sequence[int]) -> tuple[float, float]:
    """The most seconds of any rank, and the seconds of all messages."""
    found = members(stages, ranks)
    return (
        max(seconds_of(workload, nodes) for nodes in found),
        sum(sent_to(workload, nodes) for nodes in found),
    )


def is_acyclic(workload: Workload, stages: Sequence[int]) -> bool:
    return all(
        stages[value.maker] <= stages[reader] for value in workload.sent for reader in value.readers
    )


def acyclic_partitions(workload: Workload, count: int) -> Iterator[tuple[int, ...]]:
    """Every partition in so many stages, none empty, that nothing goes back in."""
    for stages in product(range(count), repeat=len(workload)):
        if set(stages) == set(range(count)) and is_acyclic(workload, stages):
            yield stages
