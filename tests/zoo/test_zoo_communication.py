"""Megatron's communication in real models: what one block of them takes."""

from collections import Counter

import pytest
import torch

import shardwright as sw
from benchmarks.models import GPT

pytest.importorskip("transformers")

from tests.zoo.captures import single
from zoo.models import LAYERS

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::Warning:transformers"),
]
TWO_HEADS = ("llama", "mistral", "qwen2", "qwen3", "gemma")
"""These have two heads of keys and values, to divide over two slots."""
CASES = [("gpt2", 2), ("gpt2", 4), ("opt", 3), ("bert", 4), *((name, 2) for name in TWO_HEADS)]


def communication(graph, policy, devices):
    """Collectives that each slot takes part in."""
    pipeline = sw.build(graph, sw.plan(graph, devices, policy=policy))
    kinds = Counter(task.kind for task in pipeline.supertasks.values())
    return {
        kind: n // devices for kind, n in kinds.items() if kind not in ("FX", "input", "output")
    }


def own_gpt(layers):
    torch.manual_seed(0)
    return sw.capture(GPT(layers), (torch.zeros(2, 64, dtype=torch.int64),))


@pytest.mark.parametrize(("name", "devices"), CASES)
def test_a_block_takes_two_reductions_or_two_gathers_and_two_scatters(name, devices):
    graph = single(name).graph
    steps = 2 * LAYERS + 1  # and the vocabulary of the embedding; gathered for that of the result
    assert communication(graph, "tensor", devices) == {"all_reduce": steps}
    assert communication(graph, "sequence", devices) == {
        "reduce_scatter": steps,
        "all_gather": steps,
    }


@pytest.mark.parametrize("devices", [2, 4])
def test_a_gpt_of_plain_modules_takes_the_same(devices):
    graph = own_gpt(3)
    assert communication(graph, "tensor", devices) == {"all_reduce": 7}
    assert communication(graph, "sequence", devices) == {"reduce_scatter": 7, "all_gather": 7}


def test_no_slot_of_four_holds_more_than_its_share_of_a_gpt():
    graph = own_gpt(3)
    pipeline = sw.build(graph, sw.plan(graph, 4, policy="tensor"))
    homes, held = pipeline.connections.devices, Counter()
    for name, info in pipeline.tensors.items():
        if info.value is not None:
            held[homes[name]] += info.nbytes
    assert max(held.values()) < 0.3 * sum(value.nbytes for value in graph.stored())
