"""Where a program comes from: a plan with its graph, or a pipeline that was built here."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardwright as sw
from shardwright.codegenerate.codegen import program_of
from shardwright.errors import CodegenError, PlanError
from shardwright.planner import plan
from tests.codegenerate.program_runs import ProgramRun, check_program, stages
from tests.graphs import language_model, tokens


def classes(program):
    """The classes of the modules of a program's nodes."""
    return {node.scope_class for stage in stages(program) for node in stage.graph.nodes}


def test_a_plan_with_its_graph():
    graph = language_model()
    program = program_of(plan(graph, 2), graph)
    check_program(program)
    assert classes(program) == {"", "tests.Block"}


def test_a_plan_without_its_graph_is_refused():
    graph = language_model()
    with pytest.raises(CodegenError, match="give the graph that it was made for"):
        program_of(plan(graph, 2))


def test_something_else_is_refused():
    with pytest.raises(CodegenError, match="from a Pipeline or a Plan, found a str"):
        program_of("model.pipeline.json")


def test_a_pipeline_that_was_built_here_knows_its_modules():
    graph = language_model()
    pipeline = sw.build(graph, plan(graph, 2))
    program = program_of(pipeline)
    check_program(program)
    assert classes(program) == {"", "tests.Block"}
    assert torch.equal(ProgramRun(program)(tokens()), graph.run(tokens()))


def test_a_pipeline_that_was_built_of_another_graph_is_refused():
    graph = language_model()
    pipeline = sw.build(graph, plan(graph, 2))
    assert len(program_of(pipeline, graph).partitions) == 2
    with pytest.raises(PlanError, match="plan was made for the graph"):
        program_of(pipeline, language_model(layers=1))


def test_what_it_was_built_from_is_no_part_of_a_pipeline(tmp_path):
    graph = language_model()
    planned = plan(graph, 2)
    pipeline = sw.build(graph, planned)
    assert pipeline.origin == (graph, planned)
    pipeline.save(tmp_path / "model.pipeline.json")
    again = sw.Pipeline.load(tmp_path / "model.pipeline.json")
    assert again.origin is None
    assert again == pipeline
    assert again.to_json() == pipeline.to_json()
    assert str(again) == str(pipeline)
    assert repr(again) == repr(pipeline)


def test_a_pipeline_from_a_file_is_refused(tmp_path):
    graph = language_model()
    sw.build(graph, plan(graph, 2)).save(tmp_path / "model.pipeline.json")
    with pytest.raises(CodegenError, match="give codegen the plan and the graph"):
        program_of(sw.Pipeline.load(tmp_path / "model.pipeline.json"), graph)


def test_a_built_pipeline_keeps_the_models_names_whatever_its_files_say(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    graph = sw.capture(model, (x,))
    file = tmp_path / "weights.safetensors"
    save_file({f"model.{name}": t for name, t in model.state_dict().items()}, file)
    pipeline = sw.build(graph, plan(graph, 2), weights=file, rename=lambda name: f"model.{name}")
    program = program_of(pipeline)
    names = {v.names[0] for stage in stages(program) for v in stage.graph.stored()}
    assert names == model.state_dict().keys()
    assert torch.equal(ProgramRun(program)(x), model(x))
