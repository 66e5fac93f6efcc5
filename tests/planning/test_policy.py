"""Policies decide; what they decide computes what the graph computes."""

import pytest
import torch

import shardwright as sw
from shardwright.errors import AnnotationError, PlanError
from shardwright.ops import register_op
from shardwright.planner import plan
from shardwright.planning.plan import assignments
from shardwright.planning.policy import PolicyGraph, Resource
from tests.graphs import language_model, tokens


def policy_graph(slots: int = 2, graph=None) -> PolicyGraph:
    graph = graph or language_model(layers=1)
    return PolicyGraph(graph, Resource(tuple(f"d{i}" for i in range(slots))))


def first(graph: PolicyGraph, name: str):
    return next(node for node in graph.nodes() if node.name == name)


def computes_the_same(policy, devices: int, graph=None) -> sw.Plan:
    graph = graph or language_model(layers=2)
    made = plan(graph, devices, policy)
    pipeline = sw.build(graph, made)
    expected = graph.run(tokens())
    found = sw.run(pipeline, tokens(), in_process=True)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
    return made


class Matmul(torch.nn.Module):
    """One call of an operator of a user's own."""

    def __init__(self) -> None:
        super().__init__()

        @register_op("(h^ m^) kd+, kd+ n -> h^ m^ n", name="policy_matmul")
        def operator(x: torch.Tensor, w: torch.Tensor, h: float) -> torch.Tensor:
            out = torch.matmul(x, w)
            out = out.view(h, out.size(0) // h, out.size(1))
            return out

        self.operator = operator
        self.w = torch.nn.Parameter(torch.randn(16, 4, dtype=torch.float64))

    def forward(self, x):
        return self.operator(x, self.w, 2)


def test_nodes_are_a_list_that_may_be_called():
    graph = language_model(layers=1)
    seen = policy_graph(graph=graph)
    for one in (graph, seen):
        assert one.nodes() is one.nodes
        assert list(one.nodes) == [*one.nodes()]
    graph.nodes = [node for node in graph.nodes if node.op]
    assert graph.nodes() is graph.nodes


def test_parts_print_in_a_line():
    graph = policy_graph()
    node = first(graph, "linear")
    parts = graph.partition(node, node.algorithm("dim"), idx=1, dim=0, num=2)
    assert repr(parts[1]) == f"<part 1 of 2 of {node}>"
    assert repr([node]) == f"[<{node}>]"
    assert "\n" not in repr(node.algorithm("dim"))


# --- what a policy sees ---------------------------------------------------------------------------


def test_nodes_say_what_they_are():
    node = first(policy_graph(), "linear")
    assert node.op == "aten.linear.default"
    assert node.scope == "layers.0"
    assert [value.shape for value in node.inputs] == [(2, 3, 8), (8, 8)]
    assert [value.shape for value in node.outputs] == [(2, 3, 8)]
    assert str(node) == "node 3 (linear in layers.0)"


def test_the_ways_to_split_print_one_a_line():
    assert str(first(policy_graph(), "linear").algorithm("dim")) == (
        "aten.linear.default: a b k+, n k+ -> a b n\n"
        "  idx=0, dim=0: a, up to 2 parts\n"
        "  idx=0, dim=1: b, up to 3 parts\n"
        "  idx=0, dim=2: k, up to 8 parts, partial sums\n"
        "  idx=1, dim=0: n, up to 8 parts\n"
        "  idx=1, dim=1: k, up to 8 parts, partial sums"
    )


def test_a_node_that_cannot_be_split_has_no_algorithm():
    builder = sw.Builder("one")
    x = builder.call("aten.add.Tensor", builder.input("x", (1,), "f32"), 1)
    graph = policy_graph(graph=builder.finish(x))
    (node,) = graph.nodes()
    assert node.algorithm("dim") is None
    with pytest.raises(
        PlanError, match=r"node 0 \(add\) cannot be split: aten.add.Tensor.*: no dim"
    ):
        graph.partition(node, None, idx=0, dim=0, num=1)


def test_there_is_one_kind_of_algorithm():
    with pytest.raises(PlanError, match=r"node 3 \(linear.*no algorithm 'time'; there is 'dim'"):
        first(policy_graph(), "linear").algorithm("time")


def test_resources_are_slots():
    resource = Resource(("d0", "d1", "d2"))
    assert (resource.ngpus, resource.devices[-1]) == (3, "d2")


def test_parts_name_their_slices_and_partial_sums():
    graph = policy_graph(slots=4)
    node = first(graph, "linear")
    rows = graph.partition(node, node.algorithm("dim"), idx=0, dim=-1, num=2)
    assert [part.inputs[1].ranges for part in rows] == [((0, 8), (0, 4)), ((0, 8), (4, 8))]
    assert [part.outputs[0].partial for part in rows] == [(0, 2), (1, 2)]
    batch = graph.partition(rows[1], rows[1].algorithm("dim"), idx=0, dim=1, num=2)
    assert [part.inputs[0].ranges[1:] for part in batch] == [((0, 2), (4, 8)), ((2, 3), (4, 8))]
    assert str(batch[0]) == "part 1 of 2, 0 of 2 of node 3 (linear in layers.0)"


# --- what comes of it -----------------------------------------------------------------------------


def test_what_is_not_decided_on_is_done_by_every_slot():
    made = sw.plan(language_model(layers=1), 3, lambda graph, resource: graph)
    (assignment,) = set(assignments(made, len(made.nodes)))
    assert assignment.mesh.devices == ("d0", "d1", "d2")
    assert assignment.splits == (None,)


def split_linear(graph, resource):
    for node in graph.nodes():
        if node.name == "linear":
            algo = node.algorithm("dim")
            graph.partition(node, algo, idx=0, dim=-1, num=resource.ngpus)
    return graph


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_partition_over_all_slots(devices):
    made = computes_the_same(split_linear, devices)
    assert made.policy == "split_linear"
    assert made.notes == ("nodes: 7 split, 0 on one slot, 15 done whole by every slot",)


def test_columns_then_rows_then_a_sum_is_one_all_reduce():
    """Megatron's block, written as a policy."""

    def policy(graph, resource):
        for node in graph.nodes():
            if node.name in ("linear", "gelu"):
                up = node.name == "linear" and node.outputs[0].shape[-1] == 32
                down = node.name == "linear" and node.inputs[0].shape[-1] == 32
                if up or down or node.name == "gelu":
                    idx, dim = (1, 0) if up else (0, -1)
                    algo = node.algorithm("dim")
                    graph.partition(node, algo, idx=idx, dim=dim, num=resource.ngpus)
        return graph

    graph = language_model(layers=1)
    pipeline = sw.build(graph, computes_the_same(policy, 2, graph))
    kinds = [
        task.kind for task in pipeline.supertasks.values() if task.group and not task.device_idx
    ]
    assert kinds == ["all_reduce"]


def test_fewer_parts_than_slots_go_to_the_first():
    def policy(graph, resource):
        node = first(graph, "linear")
        graph.partition(node, node.algorithm("dim"), idx=1, dim=0, num=2)
        return graph

    made = sw.plan(language_model(layers=1), 3, policy)
    assert [a.mesh.devices for a in made.assignments] == [("d0", "d1", "d2"), ("d0", "d1")]


def test_parts_and_nodes_can_be_put_on_slots():
    def policy(graph, resource):
        linear, gelu = first(graph, "linear"), first(graph, "gelu")
        parts = graph.partition(linear, linear.algorithm("dim"), idx=1, dim=0, num=3)
        graph.assign(parts[0], "d2")
        graph.assign(parts[2], 0)
        graph.assign(gelu, resource.devices[1])
        graph.replicate(first(graph, "softmax"))
        return graph

    made = computes_the_same(policy, 3)
    by_node = list(assignments(made, len(made.nodes)))
    assert by_node[3].mesh.devices == ("d2", "d1", "d0")
    assert by_node[8].mesh.devices == ("d1",)


def test_parts_of_parts_make_a_grid():
    def policy(graph, resource):
        for node in graph.nodes():
            if node.name == "linear":
                for part in graph.partition(node, node.algorithm("dim"), idx=0, dim=-1, num=2):
                    graph.partition(part, part.algorithm("dim"), idx=1, dim=0, num=2)
        return graph

    made = computes_the_same(policy, 4)
    assert {assignment.mesh.sizes for assignment in made.assignments} == {(2, 2)}


def test_one_identifier_can_be_split_twice():
    def policy(graph, resource):
        node = first(graph, "linear")
        algo = node.algorithm("dim")
        for part in graph.partition(node, algo, idx=1, dim=0, num=2):
            graph.partition(part, algo, idx=1, dim=0, num=2)
        return graph

    computes_the_same(policy, 4)


def test_a_registered_operator_goes_by_its_name():
    """The partition of a summed dimension: partial sums, and one all_reduce."""

    def PAS(graph, resource):
        for node in graph.nodes():
            if node.name == "policy_matmul":
                algo = node.algorithm("dim")
                # partition kd+
                config = {"idx": 0, "dim": 1, "num": resource.ngpus}
                subnodes = graph.partition(node, algo, **config)
                assert [part.outputs[0].partial for part in subnodes] == [(0, 2), (1, 2)]
        return graph

    model = Matmul()
    x = torch.randn(6, 16, dtype=torch.float64)
    with torch.no_grad():
        graph = sw.capture(model, (x,))
    pipeline = sw.build(graph, plan(graph, 2, PAS))
    kinds = [task.kind for task in pipeline.supertasks.values()]
    assert kinds == ["input", "FX", "FX", "all_reduce", "all_reduce", "output"]
    sw.verify(pipeline, model, (x,), tolerance=1e-12)


# --- what is refused ------------------------------------------------------------------------------


def partition(graph, name="linear", *, idx=1, dim=0, num=2):
    node = first(graph, name)
    return graph.partition(node, node.algorithm("dim"), idx=idx, dim=dim, num=num)


def twice(graph):
    partition(graph)
    partition(graph)


def replicated_then_split(graph):
    graph.replicate(first(graph, "linear"))
    partition(graph)


def split_then_assigned(graph):
    partition(graph)
    graph.assign(first(graph, "linear"), "d0")


def two_parts_on_one_slot(graph):
    parts = partition(graph)
    graph.assign(parts[0], "d1")
    graph.assign(parts[1], "d1")


def one_part_on_two_slots(graph):
    part = partition(graph)[0]
    graph.assign(part, "d1")
    graph.assign(part, "d0")


def another_nodes_algorithm(graph):
    algo = first(graph, "gelu").algorithm("dim")
    graph.partition(first(graph, "linear"), algo, idx=0, dim=0, num=2)


def parts_split_differently(graph):
    part = partition(graph)[1]
    graph.partition(part, part.algorithm("dim"), idx=0, dim=0, num=2)
    graph.assignments()


@pytest.mark.parametrize(
    ("decide", "message"),
    [
        (twice, r"node 3 \(linear in layers.0\) is partitioned in 2 by 'n' already"),
        (replicated_then_split, r"node 3 .* is replicated already; decide on it once"),
        (split_then_assigned, r"node 3 .* is partitioned in 2 by 'n' already"),
        (two_parts_on_one_slot, r"part 1 of 2 of node 3 .*: part 0 of 2 .* is on d1; give each"),
        (one_part_on_two_slots, r"part 0 of 2 of node 3 .* is assigned to d1 already"),
        (another_nodes_algorithm, r"node 3 .*: the algorithm is that of node 8 \(gelu"),
        (parts_split_differently, r"part 0 .* is split not at all, but part 1 in 2 by 'a'; split"),
        (lambda g: partition(g, num=5), r"node 3 .* in 5 parts, but there are 4 slots"),
        (
            lambda g: g.partition(first(g, "linear"), None, idx=0, dim=0, num=2),
            "cannot be split: no algorithm was given",
        ),
        (lambda g: g.assign(first(g, "linear"), "d9"), r"node 3 .*: there is no slot 'd9'; there"),
        (lambda g: g.assign(first(g, "linear"), 4), r"no slot 4; there are d0, d1, d2, d3"),
        (lambda g: g.replicate(partition(g)[0]), r"part 0 of 2 of node 3 .* cannot be replicated"),
        (lambda g: g.replicate("linear"), r"expected a node of graph.nodes\(\).*found 'linear'"),
        (lambda g: g.replicate(first(policy_graph(), "linear")), r"node 3 .* is of another graph"),
    ],
)
def test_what_cannot_be_is_refused(decide, message):
    with pytest.raises(PlanError, match=message):
        decide(policy_graph(slots=4))


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ({"name": "softmax", "dim": 2, "idx": 0}, r"node 4 \(softmax.*; it can be split by idx=0"),
        ({"idx": 2}, r"node 3 .*: idx=2 is none of its 2 inputs; it can be split by idx=0, dim=0"),
        ({"dim": 3}, r"node 3 .*: dim=3 is none of the 2 dimensions of input 1"),
        ({"num": 0}, r"node 3 .*: num is 0; expected the number of parts, 1 or more"),
        ({"num": 9}, r"node 3 .*: a length of 8 does not give 9 parts"),
    ],
)
def test_a_dimension_that_cannot_be_split_so_is_refused(way, message):
    with pytest.raises(AnnotationError, match=message):
        partition(policy_graph(slots=4), **way)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda graph, resource: None, r"returned None; expected the graph that it was given"),
        (lambda graph, resource: policy_graph(), "returned another graph"),
    ],
)
def test_a_policy_returns_the_graph_that_it_was_given(policy, message):
    with pytest.raises(PlanError, match=message):
        plan(language_model(), 2, policy)


def test_what_a_policy_raises_comes_out_as_it_is():
    def policy(graph, resource):
        raise KeyError("linear")

    with pytest.raises(KeyError, match="linear"):
        plan(language_model(), 2, policy)


def test_a_policy_makes_its_own_meshes():
    with pytest.raises(PlanError, match="give devices instead of mesh"):
        plan(language_model(), policy=split_linear, mesh={"tensor": 2})
