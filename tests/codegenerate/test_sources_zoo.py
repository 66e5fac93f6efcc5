"""Programs of the zoo: stage by stage they give what eager gives, to the last bit.

That the files of all models do so, cut by the planner, is shown in `tests/zoo/test_zoo_codegen.py`.
"""

import pytest
import torch

import shardwright as sw
from shardwright.codegenerate.codegen import program_of
from tests.codegenerate.program_runs import ProgramRun, check_program, same
from tests.turns import rotated
from tests.zoo.captures import SHALLOW, single
from zoo.models import BY_NAME
from zoo.training import trained

pytestmark = pytest.mark.filterwarnings("ignore::Warning:transformers")

NAMES = tuple(BY_NAME)


def parts(name):
    """A model, the arguments of a call, and its graph."""
    found = single(name)
    return found.model, found.kwargs, found.graph


@pytest.mark.parametrize(("name", "devices"), [("gpt2", 2), ("t5", 4), ("resnet", 2)])
def test_stages_give_what_eager_gives(name, devices):
    model, kwargs, graph = parts(name)
    program = program_of(sw.plan(graph, devices), graph)
    check_program(program)
    assert len(program.partitions) == devices
    assert not program.training
    with torch.no_grad():
        assert same(ProgramRun(program, graph)(**kwargs), model(**kwargs))


@pytest.mark.zoo
@pytest.mark.parametrize(("name", "policy"), rotated(NAMES[::3], ("metis", "memory")))
def test_partitioners(name, policy):
    model, kwargs, graph = parts(name)
    program = program_of(sw.plan(graph, 3, policy), graph)
    check_program(program)
    with torch.no_grad():
        assert same(ProgramRun(program, graph)(**kwargs), model(**kwargs))


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "resnet", "vit", "llama"])
def test_the_forward_of_a_step(name):
    training = trained(name, layers=SHALLOW)
    first, second = training.microbatches(2)
    graph = sw.compile_ir(training.step, **first)
    planned = sw.plan(graph, 2, microbatches=2)
    program = program_of(planned, graph)
    check_program(program)
    assert program.training
    for batch in (first, second):
        loss = ProgramRun(program).flat([batch[name] for name in program.inputs])[0]
        with torch.no_grad():
            assert torch.allclose(loss, training.model(**batch).loss, rtol=1e-6)
