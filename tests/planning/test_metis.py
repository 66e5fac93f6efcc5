"""METIS's parts as stages, with weights of one's own."""

import math
import textwrap
from random import Random

import numpy as np
import pytest

import shardwright as sw
from shardwright.errors import PlanError
from shardwright.planning import metis
from shardwright.planning.partitioners import (
    METIS_partition,
    metis_partition,
    partition_by_memory,
)
from shardwright.planning.stages import contiguous
from shardwright.planning.workload import SentValue, Workload
from tests.clean_process import printed_by
from tests.graphs import language_model
from tests.planning.projections import transformer
from tests.planning.workloads import is_acyclic, random_parts, random_workload
from tests.steps import language_step

# --- metis's parts as stages, with weights of one's own -------------------------------------------


@pytest.fixture(scope="module")
def model():
    return language_model(layers=6)


def sizes(partition):
    return [share.nodes for share in partition.shares]


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_have_equal_numbers_of_nodes_by_default(model, parts):
    found = metis_partition(model, parts)
    assert len(found.stages) == len(model.nodes)
    assert set(found.stages) == set(range(parts))
    assert max(sizes(found)) <= 1.1 * len(model.nodes) / parts + 1
    assert list(found.stages) == sorted(found.stages)


def test_it_reads_at_a_glance(model):
    lines = str(metis_partition(model, 2)).splitlines()
    assert lines[0].startswith("partition of language_model: metis, 2 stages, 0.0")
    assert lines[1].startswith("  stage 0: ")
    assert lines[1].endswith(" MB stored")


def test_parts_have_equal_weights_of_ones_own(model):
    """The first layer is worth ten of the others."""

    def weight(node):
        return 10 if node.scope == "layers.0" else 1

    found = metis_partition(model, 2, node_weight_function=weight)
    assert sizes(found)[0] < sizes(found)[1] / 2


def test_parts_are_cut_where_edges_weigh_little():
    graph = transformer(4)

    def weight(one, other):
        return 1 if one.name == "add" else 50

    found = metis_partition(graph, 2, edge_weight_function=weight)
    borders = {
        graph.nodes[maker].op
        for reader, node in enumerate(graph.nodes)
        for v in node.inputs
        for maker in [next((i for i, n in enumerate(graph.nodes) if v in n.outputs), reader)]
        if found.stages[maker] != found.stages[reader]
    }
    assert borders == {"aten.add.Tensor"}


def test_the_seeds_name_and_positions(model):
    assert METIS_partition(model, 2, None, None, seed=3, ufactor=30).policy == "metis"
    assert METIS_partition is metis_partition


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "much", None, True])
def test_what_is_no_weight_is_refused_with_the_nodes_name(model, weight):
    message = r"node_weight_function gives .* for node 2 \(layer_norm in layers.0\); a weight is"
    with pytest.raises(PlanError, match=message):
        metis_partition(model, 2, lambda node: weight if node.number == 2 else 1)


def test_what_is_no_weight_of_an_edge_is_refused_with_both_names(model):
    message = r"edge_weight_function gives -1 for the edge from node 0 \(embedding\) to node 1"
    with pytest.raises(PlanError, match=message):
        metis_partition(model, 2, None, lambda one, other: -1)


def test_what_metis_does_not_know_is_refused(model):
    with pytest.raises(PlanError, match="METIS has no option 'speed'; known are compress, contig"):
        metis_partition(model, 2, speed=9)
    for name, value, expected in (
        ("ufactor", -5, "a number from 1 up, found -5"),
        ("niter", 0, "a number from 1 up, found 0"),
        ("contig", 2, "0 or 1, found 2"),
    ):
        with pytest.raises(PlanError, match=f"METIS's option '{name}' is {expected}"):
            metis_partition(model, 2, **{name: value})
    with pytest.raises(PlanError, match=r"METIS's option 'seed' is a whole number, found 0\.5"):
        metis_partition(model, 2, seed=0.5)


@pytest.mark.parametrize("partition", [metis_partition, partition_by_memory])
def test_more_parts_than_nodes_are_refused(partition):
    graph = language_model(layers=1)
    with pytest.raises(PlanError, match="100 stages, but the graph 'language_model' has only 13"):
        partition(graph, 100)
    with pytest.raises(PlanError, match="a partition has 1 stage or more, found 0"):
        partition(graph, 0)
    assert sizes(partition(graph, 13)) == [1] * 13


def test_weights_that_are_all_zero_weigh_the_same(model):
    assert metis_partition(model, 2, lambda node: 0).stages == metis_partition(model, 2).stages


def test_parts_by_memory_hold_equal_bytes():
    """Most bytes of this model are in its table and its output layer, at its two ends."""
    model = language_model(layers=6, vocabulary=600)
    for graph in (model, language_step(layers=6, vocabulary=600)):
        found = partition_by_memory(graph, 3)
        stored = [share.stored_bytes for share in found.shares]
        assert max(stored) < 0.6 * sum(stored)
    by_nodes = [share.stored_bytes for share in metis_partition(model, 3).shares]
    assert max(share.stored_bytes for share in partition_by_memory(model, 3).shares) < max(by_nodes)


def test_a_partition_by_memory_takes_weights_of_edges(model):
    found = partition_by_memory(model, 2, lambda one, other: 1.5, niter=20)
    assert found.policy == "memory"
    with pytest.raises(PlanError, match="edge_weight_function gives nan"):
        partition_by_memory(model, 2, lambda one, other: math.nan)


def test_they_are_exported():
    assert sw.metis_partition is metis_partition


def test_weights_may_be_numbers_of_numpy(model):
    found = metis_partition(model, 2, node_weight_function=lambda node: np.float32(1))
    assert found.stages == metis_partition(model, 2).stages


def test_values_that_metis_refuses_are_named(model):
    with pytest.raises(PlanError, match="METIS's option 'ncuts' is a number from 1 up, found 0"):
        metis_partition(model, 2, ncuts=0)


def test_every_fix_of_metis_is_told():
    """Parts that were numbered anew and cut anew."""
    graph = language_model(layers=6, width=64)
    notes = [
        note
        for seed in range(6)
        for note in (
            *metis_partition(graph, 3, seed=seed).notes,
            *sw.plan(graph, 3, "metis").notes,
            *partition_by_memory(graph, 3, seed=seed).notes,
        )
    ]
    for told in ("parts numbered anew, as data flows", "the best contiguous cut"):
        assert any(told in note for note in notes), (told, notes)


# --- any parts become stages that nothing goes back in, none of them empty ------------------------


def stages_near(monkeypatch, workload, parts, count):
    """The stages and notes where these are METIS's parts."""
    monkeypatch.setattr(metis, "_parts", lambda *_: parts)
    return metis.metis_stages(
        workload,
        count,
        workload.seconds,
        {},
        {},
        lambda nodes: contiguous(nodes, count),
        lambda shares: max(shares.seconds),
    )


@pytest.mark.parametrize("seed", range(40))
def test_any_parts_become_stages(monkeypatch, seed):
    workload, count = random_workload(Random(seed), 6, 12), 1 + seed % 6
    parts = random_parts(Random(seed), workload, count)
    stages, _ = stages_near(monkeypatch, workload, parts, count)
    assert len(stages) == len(workload)
    assert set(stages) == set(range(count))
    assert is_acyclic(workload, stages)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([0, 0, 1, 2], []),
        ([2, 2, 0, 1], ["parts numbered anew, as data flows: 2, 0, 1"]),
        ([0, 1, 1, 2], ["moved 1 node (n1) to where the best contiguous cut has them"]),
    ],
)
def test_what_is_done_to_parts_is_told(monkeypatch, parts, expected):
    sent = tuple(SentValue(i, (i + 1,), 0.1, 1) for i in range(3))
    chain = Workload(("n0", "n1", "n2", "n3"), (1.0, 1.0, 2.0, 2.0), sent)
    assert stages_near(monkeypatch, chain, parts, 3) == ([0, 0, 1, 2], expected)


# --- what c code prints to the standard output is not heard, what python prints is ----------------


def output_of(program: str) -> str:
    """What a Python program prints, down to the file descriptor."""
    return printed_by("python", "-c", textwrap.dedent(program))


def test_what_c_code_prints_is_not_heard() -> None:
    program = """
        import ctypes
        from shardwright.planning.metis import unheard

        library = ctypes.CDLL(None)
        library.puts(b"before")
        try:
            with unheard():
                library.puts(b"within")
                raise ValueError
        except ValueError:
            library.puts(b"after")
        library.fflush(None)
        print("end")
    """
    assert output_of(program) == "before\nafter\nend\n"


def test_metis_says_nothing_of_parts_that_it_finds_empty() -> None:
    program = """
        import sys
        import shardwright as sw

        builder = sw.Builder("tiny")
        x = builder.input("x", (4,), "f32")
        for _ in range(4):
            x = builder.call("aten.relu.default", x)
        weights = iter([1000.0, 1.0, 1.0, 1.0])
        found = sw.metis_partition(
            builder.finish([x]), 4, node_weight_function=lambda node: next(weights)
        )
        print(max(found.stages))
    """
    assert output_of(program) == "3\n"


def test_a_closed_output_stays_closed() -> None:
    program = """
        import os, sys
        os.close(1)
        from shardwright.planning.metis import unheard

        with unheard():
            pass
        try:
            os.fstat(1)
        except OSError:
            sys.exit(0)
        sys.exit(1)
    """
    assert output_of(program) == ""
