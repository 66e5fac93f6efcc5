"""The backward as it stands on slots: what it computes, and what it sends."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.building.update import localize_step
from shardwright.errors import PlanError
from shardwright.ir import Builder
from shardwright.planning.assemble import step_of
from tests.building.slot_runs import SlotRun
from tests.steps import finish

LENGTH, WIDTH, HEADS, VOCABULARY, ROWS = 6, 16, 4, 40, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        normed = self.norm1(x)
        query, key, value = (
            layer(normed).view(-1, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(-1, LENGTH, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Trained:
    """A model trained on slots, and the same trained by torch."""

    def __init__(self, mesh, microbatches, layers=2, **options):
        torch.manual_seed(0)
        model = Language(layers).double()
        self.eager = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = torch.optim.SGD(self.eager.parameters(), lr=0.1, momentum=0.9)

        def step(tokens, labels):
            optimizer.zero_grad()
            loss = loss_of(model, tokens, labels)
            loss.backward()
            optimizer.step()
            return loss

        self.microbatches = microbatches
        self.tokens, self.labels = torch.randint(VOCABULARY, (2, microbatches * ROWS, LENGTH))
        graph = sw.compile_ir(step, self.tokens[:ROWS], self.labels[:ROWS])
        plan = sw.plan(graph, mesh=mesh, microbatches=microbatches, **options)
        self.step = step_of(graph, plan)
        self.localized = localize_step(self.step, plan)
        self.run = SlotRun(self.localized)
        self.run.load({v.names[0]: graph.tensors[v.id] for v in graph.stored() if v.init is None})

    def on_slots(self):
        """The loss of a step."""
        graph = self.step.graph
        named = {graph.values[v].name: v for v in graph.inputs}
        given = {"tokens": self.tokens, "labels": self.labels}
        rate = {named["lr"]: torch.tensor(0.1, dtype=torch.float64)}
        microbatches = [
            {named[name]: tensor[i * ROWS : (i + 1) * ROWS] for name, tensor in given.items()}
            | rate
            for i in range(self.microbatches)
        ]
        whole = {w: given[graph.values[part].name] for w, part in self.step.whole.items()}
        self.run.step(microbatches, whole)
        (part,) = self.localized.outputs[0]
        return self.run.value(part)

    def by_torch(self):
        self.optimizer.zero_grad()
        loss = loss_of(self.eager, self.tokens, self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def kinds(self, phase):
        """How many communications of each kind are begun in a phase."""
        found = Counter()
        for communication in self.localized.communications:
            slot = self.localized.slots[communication.members[0].device]
            at = next(i for i, item in enumerate(slot.items) if item is communication)
            if slot.places[at].phase == phase:
                found[communication.kind] += 1
        return dict(found)


def loss_of(model, tokens, labels):
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [
        ({"pipeline": 1}, 1),
        ({"pipeline": 3}, 3),
        ({"tensor": 2}, 2),
        ({"data": 2}, 1),
        ({"sequence": 2}, 2),
        ({"pipeline": 2, "tensor": 2}, 3),
        ({"pipeline": 2, "data": 2}, 2),
        ({"data": 2, "tensor": 2}, 2),
    ],
    ids=str,
)
def test_steps_on_slots_are_those_of_one_device(mesh, microbatches):
    trained = Trained(mesh, microbatches)
    for _ in range(2):
        expected, found = trained.by_torch(), trained.on_slots()
        assert (found - expected).abs() <= 1e-12 * expected.abs()


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_several_stages_of_a_slot_go_backward_as_one(schedule):
    trained = Trained({"pipeline": 2}, 2, layers=4, schedule=schedule)
    for _ in range(3):
        expected, found = trained.by_torch(), trained.on_slots()
        assert (found - expected).abs() <= 1e-12 * expected.abs()


def test_each_message_has_its_answer():
    trained = Trained({"pipeline": 2}, 2)
    assert trained.kinds("forward") == trained.kinds("backward")
    assert trained.kinds("forward").keys() == {"send"}
    # The weight that two stages share: its gradient goes to its owner, new contents come back.
    assert trained.kinds("update") == {"send": 2}


def test_split_layers_are_reduced_twice_forward_and_twice_backward():
    shallow, deep = (Trained({"tensor": 2}, 1, layers=layers) for layers in (1, 3))
    for phase in ("forward", "backward"):
        few, many = shallow.kinds(phase), deep.kinds(phase)
        assert many["all_reduce"] - few["all_reduce"] == 2 * 2
        assert {k: n for k, n in many.items() if k != "all_reduce"} == {
            k: n for k, n in few.items() if k != "all_reduce"
        }


def test_a_split_batch_is_put_together_once_a_step():
    trained = Trained({"data": 2}, 2)
    assert trained.kinds("forward") == trained.kinds("backward") == {}
    parameters = len(list(trained.eager.parameters()))
    assert trained.kinds("update") == {"all_reduce": parameters + 1}


def test_a_split_state_is_scattered_and_gathered():
    trained = Trained({"data": 2}, 2, zero=1)
    parameters = len(list(trained.eager.parameters()))
    found = trained.kinds("update")
    assert found == {"reduce_scatter": parameters, "all_gather": parameters, "all_reduce": 1}


def test_gradients_through_a_largest_over_slots_are_refused():
    weight = nn.Parameter(torch.rand(8, 4, dtype=torch.float64))

    def step(x):
        loss = (x @ weight).amax(0).sum()
        loss.backward()
        return loss

    graph = sw.compile_ir(step, torch.rand(4, 8, dtype=torch.float64))
    plan = sw.plan(graph, mesh={"data": 2})
    with pytest.raises(PlanError, match="through which no gradient goes"):
        localize_step(step_of(graph, plan), plan)


def test_a_parameter_that_the_loss_does_not_depend_on_is_named():
    """A captured step updates no such parameter, but a graph written by hand may."""
    builder = Builder("by hand")
    x = builder.input("x", (2, 4), "f64")
    weights = (builder.param(name, torch.ones(4, 4).double()) for name in ("used", "idle"))
    used, idle = (builder.call("aten.linear.default", x, weight) for weight in weights)
    signs = builder.call("aten.sign.default", builder.call("aten.detach.default", idle))
    total = builder.call("aten.add.Tensor", used, signs)
    graph = finish(builder, builder.call("aten.sum.default", total))
    made = sw.plan(graph, 1)
    with pytest.raises(PlanError, match="the loss does not depend on parameter 'idle', so it has"):
        localize_step(step_of(graph, made), made, "cpu")
