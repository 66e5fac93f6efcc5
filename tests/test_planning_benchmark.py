"""The benchmark of planning: what it promises, and what it measures with."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import shardwright as sw
from benchmarks.models import GPT
from benchmarks.planning import CLUSTER, of_tokens, one_core, speed_up, step_graph, tokens
from shardwright.clusters import Cluster


def cores():
    return len(os.sched_getaffinity(0))


def test_eight_slots_are_predicted_to_be_nearly_eight_times_as_fast():
    with sw.empty_weights():
        model = GPT(4, 1024, 8, 1000, 512)
    ids = tokens(8, 512)
    graph = step_graph(model, of_tokens, {"ids": ids, "labels": ids})
    made, times = speed_up(graph, Cluster.load(CLUSTER), 32)
    assert 7.4 <= times <= 8
    assert made.prediction.microbatches == 32
    assert made.prediction.peak_memory <= 80 * 10**9


def test_planning_is_timed_on_one_core():
    before = cores()
    with one_core(), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        assert process.submit(cores).result() == 1
    assert cores() == before
