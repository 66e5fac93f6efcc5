"""Updates on slots against torch's optimizers on one device.

Parameters and gradients lie on meshes in any way; the slots' programs are run in one process.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.building.holdings import PlacedValue
from shardwright.building.localize import Ends, empty_holdings
from shardwright.building.slots import Localized, PhaseStage
from shardwright.building.update import UpdateWriter, localize_step, split_further
from shardwright.clusters import Mesh
from shardwright.errors import PlanError
from shardwright.ir import Builder
from shardwright.planner import plan
from shardwright.planning import Plan, TrainingPlan, as_step
from shardwright.sharding import Layout, Partial, Replicate, Shard
from tests.building.slot_runs import SlotRun
from tests.sharding.simulation import draw_terms, fits, lay_out, reduce_terms
from tests.steps import backward, clip_norm, optimizer

ADAM = {"betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.1}
MARKERS = {
    "adamw_step": (torch.optim.AdamW, {**ADAM, "amsgrad": False, "maximize": False}),
    "adam_step": (torch.optim.Adam, {**ADAM, "amsgrad": True, "maximize": True}),
    "sgd_step": (
        torch.optim.SGD,
        {
            "momentum": 0.9,
            "dampening": 0.0,
            "weight_decay": 0.1,
            "nesterov": True,
            "maximize": False,
        },
    ),
    "plain": (
        torch.optim.SGD,
        {
            "momentum": 0.0,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": False,
            "maximize": False,
        },
    ),
}


def states(marker, attrs):
    if marker == "sgd_step":
        return ("momentum_buffer",) if attrs["momentum"] else ()
    return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if attrs["amsgrad"] else []), "step")


def step_graph(shapes, marker, norm=None):
    """A step of parameters of these shapes; the forward is a sum that nobody runs."""
    torch.manual_seed(0)
    builder = Builder("step")
    parameters = [
        builder.param(f"p{i}", torch.rand(shape, dtype=torch.float64))
        for i, shape in enumerate(shapes)
    ]
    loss = builder.call("aten.sum.default", parameters[0])
    for parameter in parameters[1:]:
        loss = builder.call("aten.add.Tensor", loss, builder.call("aten.sum.default", parameter))
    grads, outputs = backward(builder, loss, parameters), [loss]
    if norm is not None:
        total, grads = clip_norm(builder, grads, 0.5, norm)
        outputs.append(total)
    op = "sgd_step" if marker == "plain" else marker
    attrs = MARKERS[marker][1]
    updates = optimizer(builder, op, parameters, grads, None, attrs, states(op, attrs))
    return builder.finish(outputs, updates=updates)


class Terms:
    """Gradients that lie on meshes as they are told to."""

    def __init__(self, step, holdings, placed):
        self.holdings = holdings
        self.values = {}
        made = next(node for node in step.graph.nodes if node.op == "Backward").outputs
        for value_id, (mesh, layout) in zip(made, placed, strict=True):
            value = step.graph.values[value_id]
            term = holdings.derive(value)
            local = {
                device: holdings.slots[device]
                .builder.input(value.name, [b - a for a, b in box], "f64")
                .id
                for device, box in zip(mesh.devices, layout.slices(mesh, value.shape), strict=True)
            }
            holdings.add(term.id, PlacedValue(mesh, layout.normal(mesh, value.shape), local))
            self.values[value_id] = (term.id, local)

    def total(self, gradient, mesh, layout):
        return self.holdings.fetch(self.values[gradient][0], mesh, layout)


class Slots:
    """A step's update on slots: ``placed`` has the meshes and layouts that hold each parameter."""

    def __init__(self, graph, placed, gradients, zero=0):
        self.step = as_step(graph, 1)
        meshes = {mesh: None for held in placed for mesh, _ in held}
        devices = tuple(dict.fromkeys(d for mesh in meshes for d in mesh.devices))
        training = TrainingPlan(1, "1f1b", 1, (0,), (devices,), (), (1,), zero=zero)
        plan = Plan("step", "", "by hand", devices, (), (), training=training)
        holdings = empty_holdings(self.step.graph, plan)
        parameters = [v for v in self.step.graph.stored() if v.role == "param"]
        for parameter, held in zip(parameters, placed, strict=True):
            for mesh, layout in held:
                holdings.fetch(parameter.id, mesh, layout)
        for slot in holdings.slots.values():
            slot.go(PhaseStage("update"))
        self.terms = Terms(self.step, holdings, gradients)
        self.gradients = gradients
        update = UpdateWriter(self.step, plan, holdings, self.terms)
        for node in self.step.graph.nodes[self.step.forward :]:
            if node.op != "Backward":
                update.add(node)
        ends = Ends(self.step.graph, holdings)
        updates = ends.updates()
        for slot in holdings.slots.values():
            slot.note()
        self.holdings = holdings
        self.localized = Localized(
            holdings.slots, holdings.communications, ends.inputs(), [], updates
        )
        self.run = SlotRun(self.localized)
        self.run.load(
            {v.name: self.step.graph.tensors[v.id] for v in self.step.graph.stored() if not v.init}
        )

    def advance(self, rate, grads):
        """One step, with these terms of gradients."""
        for (_, local), (mesh, layout), terms in zip(
            self.terms.values.values(), self.gradients, grads, strict=True
        ):
            shape = terms.shape[mesh.ndim :]
            held = lay_out(terms, layout, mesh, shape)
            for device, tensor in zip(mesh.devices, held, strict=True):
                self.run.held[device][local[device]] = tensor
        lr = next(v for v in self.step.graph.inputs)
        self.run.step([], {lr: torch.tensor(rate, dtype=torch.float64)})

    def copies(self, name):
        """What slots hold of a parameter, and the slice that each is of it."""
        for device, slot in self.localized.slots.items():
            for value in slot.builder.graph.stored():
                if value.names == (name,):
                    box = value.placements or [(0, size) for size in value.shape]
                    yield (
                        device,
                        tuple(slice(*span) for span in box),
                        self.run.held[device][value.id],
                    )


def check(graph, slots, marker, norm=None, steps=3):
    """Several steps on slots and on one device: all copies of all parameters are the same."""
    kind, attrs = MARKERS[marker]
    options = {key: value for key, value in attrs.items() if key != "betas"}
    if "betas" in attrs:
        options["betas"] = tuple(attrs["betas"])
    whole = [
        graph.tensors[v.id].clone().requires_grad_() for v in graph.stored() if v.role == "param"
    ]
    reference = kind(whole, lr=0.1, **options)
    for number in range(steps):
        grads = []
        for seed, (parameter, (mesh, layout)) in enumerate(
            zip(whole, slots.gradients, strict=True)
        ):
            terms = draw_terms(layout, mesh, parameter.shape, 100 * number + seed) / 7
            grads.append(terms)
            replicated = Layout.replicated(mesh)
            total = reduce_terms(terms, layout, replicated, mesh)
            parameter.grad = total.reshape(parameter.shape).clone()
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(whole, 0.5, norm)
        rate = 0.1 / (1 + number)
        reference.param_groups[0]["lr"] = rate
        slots.advance(rate, grads)
        reference.step()
    for i, parameter in enumerate(whole):
        copies = list(slots.copies(f"p{i}"))
        assert copies
        for _, box, found in copies:
            torch.testing.assert_close(found, parameter.detach()[box], rtol=1e-12, atol=1e-12)


@st.composite
def placed(draw, mesh, shape, partial=False):
    """A layout of a tensor on a mesh."""
    choices = [Replicate(), Shard(0), Partial() if partial else Shard(1)]
    drawn = [draw(st.sampled_from(choices)) for _ in mesh.axes]
    drawn = [p if not isinstance(p, Shard) or p.dim < len(shape) else Replicate() for p in drawn]
    layout = Layout(tuple(drawn))
    return layout if fits(layout, mesh, shape) else Layout.replicated(mesh)


SHAPES = st.sampled_from([(6, 4), (4,), (3, 2), (5, 3), (1, 8), (), (2, 2, 2)])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_updates_equal_torch_however_parameters_and_gradients_lie(data):
    sizes = data.draw(
        st.sampled_from([{"data": 2}, {"data": 2, "tensor": 2}, {"tensor": 3, "data": 2}, {}])
    )
    mesh = Mesh.of(sizes)
    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=3))
    marker = data.draw(st.sampled_from(sorted(MARKERS)))
    norm = data.draw(st.sampled_from([None, 2.0, math.inf, 1.0, 3.0]))
    graph = step_graph(shapes, marker, norm)
    held = [[(mesh, data.draw(placed(mesh, shape)))] for shape in shapes]
    gradients = [(mesh, data.draw(placed(mesh, shape, partial=True))) for shape in shapes]
    slots = Slots(graph, held, gradients, zero=data.draw(st.sampled_from([0, 1])))
    check(graph, slots, marker, norm)


@pytest.mark.parametrize("marker", sorted(MARKERS))
@pytest.mark.parametrize("zero", [0, 1])
def test_a_parameter_of_two_stages_is_updated_once_and_alike(marker, zero):
    """Tied: the mesh that read it first owns it, the other gets the new contents."""
    first, second = Mesh.of({"data": 2}, ["d0", "d1"]), Mesh.of({"data": 2}, ["d2", "d3"])
    whole = Layout.of(Replicate())
    graph = step_graph([(6, 4), (4,), (4,)], marker, 2.0)
    held = [[(first, whole), (second, whole)], [(first, whole)], [(second, whole)]]
    gradients = [(second, Layout.of(Partial())), (first, Layout.of(Partial())), (second, whole)]
    slots = Slots(graph, held, gradients, zero=zero)
    assert {device for device, _, _ in slots.copies("p0")} == {"d0", "d1", "d2", "d3"}
    state = {device for device, _, _ in slots.copies("optimizer.p0.exp_avg")}
    assert state <= {"d0", "d1"}
    check(graph, slots, marker, 2.0)


def test_zero_splits_state_and_needs_no_second_copy_of_parameters():
    mesh = Mesh.of({"data": 2})
    whole = Layout.of(Replicate())
    graph = step_graph([(6, 4), (5, 3), (1,)], "adamw_step")
    gradients = [(mesh, Layout.of(Partial()))] * 3
    slots = Slots(graph, [[(mesh, whole)]] * 3, gradients, zero=1)
    shapes = {
        name: [tuple(found.shape) for _, _, found in slots.copies(name)]
        for name in ("p0", "p1", "optimizer.p0.exp_avg", "optimizer.p1.exp_avg_sq")
    }
    assert shapes == {
        "p0": [(6, 4), (6, 4)],
        "p1": [(5, 3), (5, 3)],
        "optimizer.p0.exp_avg": [(3, 4), (3, 4)],
        "optimizer.p1.exp_avg_sq": [(3, 3), (2, 3)],
    }
    check(graph, slots, "adamw_step")


def test_each_slot_makes_one_call_for_all_its_parameters():
    mesh = Mesh.of({"data": 2})
    graph = step_graph([(4, 4)] * 5, "adamw_step", 2.0)
    whole = Layout.of(Replicate())
    slots = Slots(graph, [[(mesh, whole)]] * 5, [(mesh, whole)] * 5)
    for slot in slots.localized.slots.values():
        ops = [node.op for node in slot.builder.graph.nodes]
        assert ops.count("aten._fused_adamw.tensor_lr") == 1
        assert ops.count("aten._foreach_add.Scalar") == 1
        assert ops.count("aten._foreach_mul.Tensor") == 1
    assert [c.kind for c in slots.localized.communications] == ["all_reduce"]


def test_the_norm_counts_copies_once_on_all_slots():
    """One reduction over all slots, those of other stages included."""
    first, second = Mesh.of({"tensor": 2}, ["d0", "d1"]), Mesh.of({"tensor": 2}, ["d2", "d3"])
    graph = step_graph([(4,), (4,)], "plain", 2.0)
    whole, cut = Layout.of(Replicate()), Layout.of(Shard(0))
    slots = Slots(graph, [[(first, whole)], [(second, cut)]], [(first, whole), (second, cut)])
    (reduction,) = slots.localized.communications
    assert [member.device for member in reduction.members] == ["d0", "d1", "d2", "d3"]
    slots.advance(0.1, [torch.full((1, 4), 3.0).double(), torch.full((1, 4), 4.0).double()])
    norm = slots.holdings.held[slots.step.graph.outputs[1]][0]
    for device, value_id in norm.local.items():
        assert slots.run.held[device][value_id] == 10.0


def test_gradients_are_added_to_older_ones_and_changed_on_slices():
    """Elementwise operators work where the parameter lies, others on all of the tensor."""
    torch.manual_seed(0)
    builder = Builder("step")
    old, before = torch.rand(2, 4, 3, dtype=torch.float64)
    parameter, older = builder.param("p0", old), builder.state("grad.p0", before)
    loss = builder.call("aten.sum.default", parameter)
    (grad,) = backward(builder, loss, [parameter])
    summed = builder.call("aten.add.Tensor", older, grad)
    flipped = builder.call("aten.flip.default", summed, [0])
    halved = builder.call("aten.mul.Scalar", flipped, 0.5)
    attrs = MARKERS["plain"][1]
    updates = optimizer(builder, "sgd_step", [parameter], [halved], None, attrs, ())
    graph = builder.finish([loss], updates={**updates, older.id: summed.id})
    mesh, cut = Mesh.of({"tensor": 2}), Layout.of(Shard(0))
    slots = Slots(graph, [[(mesh, cut)]], [(mesh, Layout.of(Partial()))])
    terms = torch.rand(2, 4, 3, dtype=torch.float64)
    slots.advance(0.1, [terms])
    total = before + terms.sum(0)
    for name, expected in (("grad.p0", total), ("p0", old - 0.1 * 0.5 * total.flip(0))):
        copies = list(slots.copies(name))
        assert [tuple(found.shape) for _, _, found in copies] == [(2, 3), (2, 3)]
        for _, box, found in copies:
            torch.testing.assert_close(found, expected[box], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("sizes", "layout", "shape", "expected"),
    [
        ({"data": 2}, [Replicate()], (5, 4), [Shard(1)]),
        ({"data": 2}, [Replicate()], (5, 3), [Shard(0)]),
        ({"data": 2}, [Replicate()], (1,), [Replicate()]),
        ({"data": 2}, [Replicate()], (), [Replicate()]),
        ({"data": 2, "tensor": 2}, [Replicate(), Shard(0)], (4, 4), [Shard(1), Shard(0)]),
        ({"data": 2, "tensor": 2}, [Replicate(), Shard(0)], (4,), [Replicate(), Shard(0)]),
        ({"tensor": 2}, [Replicate()], (4,), [Replicate()]),
    ],
)
def test_the_dimension_that_zero_splits(sizes, layout, shape, expected):
    mesh = Mesh.of(sizes)
    assert split_further(Layout.of(*layout), mesh, shape) == Layout.of(*expected)


def test_a_norm_below_one_is_refused():
    graph = step_graph([(4,)], "plain", 0.5)
    mesh, whole = Mesh.of({"data": 2}), Layout.of(Replicate())
    with pytest.raises(PlanError, match=r"norm_type=0\.5; from 1 up, or infinity"):
        Slots(graph, [[(mesh, whole)]], [(mesh, whole)])


def test_a_graphics_card_reads_the_learning_rate_in_single_precision():
    graph = step_graph([(4,)], "adamw_step")
    step = as_step(graph, 1)
    made = plan(graph, 1)
    found = {
        kind: [
            slot.value(node.inputs[0]).dtype
            for slot in localize_step(step, made, kind).slots.values()
            for node in slot.builder.graph.nodes
            if node.op == "aten._fused_adamw.tensor_lr"
        ]
        for kind in ("cpu", "cuda")
    }
    assert found == {"cpu": ["f64"], "cuda": ["f32"]}
