"""Operators that torch does not bring."""

import pytest
import torch

import shardwright as sw
from shardwright.launch.operators import OperatorSources, load_operators, sources_for_workers
from tests.runtime import operators
from tests.runtime.custom_matmul import Model
from tests.runtime.sketch import chain

X = torch.randn(4, 6, dtype=torch.float64)


def by_kd(graph, resource):
    """The seed's policy: split the dimension that is summed over."""
    for node in graph.nodes():
        if node.name == "test_matmul_custom":
            algo = node.algorithm("dim")
            graph.partition(node, algo, idx=0, dim=1, num=resource.ngpus)
    return graph


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def pipeline(model):
    graph = sw.capture(model, (X,))
    return sw.build(graph, sw.plan(graph, devices=2, policy=by_kd))


def test_a_registered_operator_is_required_by_name(pipeline):
    assert pipeline.requires == ("shardwright.test_matmul_custom.default",)
    kinds = [task.kind for task in pipeline.supertasks.values()]
    assert kinds.count("all_reduce") == 2


def test_it_runs_split_in_one_process(pipeline, model):
    assert sw.verify(pipeline, model, (X,), tolerance=1e-12).equal


@pytest.mark.workers
def test_workers_import_the_module_that_registered_it(pipeline, model):
    assert sources_for_workers(pipeline, ()) == OperatorSources(("tests.runtime.custom_matmul",))
    assert sw.verify(pipeline, model, (X,), in_process=False, tolerance=1e-12).equal


def test_an_operator_that_nothing_registers_is_named(pipeline):
    document = sw.Pipeline.from_json(
        pipeline.to_json().replace(b"test_matmul_custom", b"somebody_elses")
    )
    with pytest.raises(sw.RunError, match=r"somebody_elses.*modules="):
        load_operators(document, ())
    with pytest.raises(sw.RunError, match="module 'no_such_module' cannot be imported"):
        load_operators(document, ("no_such_module",))


@pytest.mark.workers
def test_workers_of_a_graph_of_this_process_need_no_modules():
    """An operator of torch's library, whose module this process has imported."""
    pipeline = chain(2, op="runtime_tests.refuse_nan.default")
    assert sources_for_workers(pipeline, ()) == OperatorSources((operators.__name__,))
    x = torch.ones(3, 4)
    assert torch.equal(sw.run(pipeline, x), sw.run(pipeline, x, in_process=True))


@pytest.mark.zoo
@pytest.mark.workers
def test_workers_know_the_operators_of_mixtures_of_experts():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=20,
        num_local_experts=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval()
    tokens = torch.arange(4)[None]
    graph = sw.capture(model, (tokens,))
    pipeline = sw.build(graph, sw.plan(graph, devices=2))
    assert sources_for_workers(pipeline, ()).modules == ("transformers.integrations.moe",)
    assert sw.verify(pipeline, model, (tokens,), in_process=False, tolerance=1e-6).equal
