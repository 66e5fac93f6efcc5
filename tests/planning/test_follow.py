"""What follows from one beginning, on graphs of a few nodes."""

from shardwright.ir import Builder
from shardwright.planning import Split
from shardwright.planning.follow import Sharded, follow
from shardwright.planning.plan import Terms
from tests.planning.projections import linear, rand


def at(op, identifier):
    """A seed that begins at an operator."""

    def seed(following, node, bound):
        fits = node.op == op and following.fits(node, bound, identifier)
        return identifier if fits else None

    return seed


LINEAR = "aten.linear.default"


def test_a_shard_goes_on_where_annotations_let_it():
    builder = Builder()
    x = builder.input("x", (2, 6, 8), "f64")
    y = linear(builder, x, "up", 32)
    y = builder.call("aten.relu.default", y)
    y = builder.call("aten.view.default", y, [2, 6, 4, 8])
    y = builder.call("aten.transpose.int", y, 1, 2)
    y = builder.call("aten.softmax.int", y, -1)
    following = follow(builder.finish(y), 2, seeds=[at(LINEAR, "n")])
    assert following.splits() == [
        Split("n", 8),
        Split("c", 8),
        Split("c", 1),
        Split("c", 1),
        Split("b", 1),
    ], "all are cut at heads, of which there are four"


def test_a_shard_is_gathered_where_it_cannot_go_on():
    builder = Builder()
    y = linear(builder, builder.input("x", (6, 8), "f64"), "up", 32)
    y = builder.call("aten.softmax.int", y, -1)
    following = follow(builder.finish(y), 2, seeds=[at(LINEAR, "n")])
    assert following.splits() == [Split("n"), None]
    assert following.gathered == {following.graph.nodes[0].outputs[0]}


def test_a_region_with_fewer_units_than_slots_ends():
    builder = Builder()
    y = linear(builder, builder.input("x", (6, 8), "f64"), "up", 32)
    y = builder.call("aten.view.default", y, [6, 4, 8])
    following = follow(builder.finish(y), 5, seeds=[at(LINEAR, "n")])
    assert following.splits() == [Split("n"), None]


def test_shards_that_meet_are_cut_alike():
    builder = Builder()
    x = builder.input("x", (6, 8), "f64")
    heads = builder.call("aten.view.default", linear(builder, x, "left", 32), [6, 4, 8])
    flat = builder.call("aten.reshape.default", heads, [6, 32])
    y = builder.call("aten.mul.Tensor", flat, linear(builder, x, "right", 32))
    following = follow(builder.finish(y), 2, seeds=[at(LINEAR, "n")])
    assert {split.unit for split in following.splits() if split.identifier == "n"} == {8}


def summed(*after, users=1):
    """Rows of a linear layer that are summed, and operators on the sum."""
    builder = Builder()
    x = builder.input("x", (4, 6), "f64")
    total = y = builder.call("aten.linear.default", x, builder.param("w", rand(6, 6)))
    for op, *args in after:
        y = builder.call(op, y, *args)
    others = [builder.call("aten.relu.default", total) for _ in range(users - 1)]
    return builder.finish([*(y if isinstance(y, list) else [y]), *others])


def test_linear_operators_keep_terms_of_a_sum():
    graph = summed(
        ("aten.view.default", [2, 2, 6]), ("aten.mul.Scalar", 2.0), ("aten.relu.default",)
    )
    following = follow(graph, 2, seeds=[at(LINEAR, "k")])
    assert following.splits() == [Split("k"), Terms((0,)), Terms((0,)), None]
    assert following.state(graph.nodes[2].outputs[0]) is None, "reduced where relu reads it"


def test_terms_of_two_sums_are_added():
    builder = Builder()
    x = builder.input("x", (4, 6), "f64")
    one, other = linear(builder, x, "one", 6), linear(builder, x, "other", 6)
    y = builder.call("aten.add.Tensor", one, other)
    following = follow(builder.finish(y), 2, seeds=[at(LINEAR, "k")])
    assert following.splits()[2] == Terms((0, 1))


def test_a_sum_that_two_nodes_read_is_reduced_at_once():
    graph = summed(("aten.view.default", [2, 2, 6]), users=2)
    following = follow(graph, 2, seeds=[at(LINEAR, "k")])
    assert following.splits() == [Split("k"), None, None]


def test_a_sum_beside_a_whole_is_reduced():
    builder = Builder()
    x = builder.input("x", (4, 6), "f64")
    y = builder.call("aten.add.Tensor", x, linear(builder, x, "one", 6))
    following = follow(builder.finish(y), 2, seeds=[at(LINEAR, "k")])
    assert following.splits() == [Split("k"), None]


def test_a_sum_that_is_taken_apart_is_reduced_first():
    following = follow(summed(("aten.chunk.default", 2, -1)), 2, seeds=[at(LINEAR, "k")])
    assert following.splits() == [Split("k"), None]


def test_a_scattered_sum_is_read_as_shards_by_all():
    graph = summed(("aten.relu.default",), users=3)
    relu = at("aten.relu.default", "a")
    following = follow(graph, 2, seeds=[at(LINEAR, "k")], scatters=[relu])
    assert following.splits() == [Split("k"), *[Split("a")] * 3]
    assert isinstance(following.state(graph.nodes[0].outputs[0]), Sharded)


def test_weights_are_computed_as_their_readers_want_them():
    builder = Builder()
    x = builder.input("x", (4, 6), "f64")
    weight = builder.call("aten.neg.default", builder.param("w", rand(8, 6)))
    weight = builder.call("aten.t.default", weight)
    y = builder.call("aten.mm.default", x, weight)
    following = follow(builder.finish(y), 2, seeds=[at("aten.mm.default", "n")])
    assert following.splits() == [Split("a"), Split("a"), Split("n")]
    assert following.whole_bytes() == 0


def test_a_way_leads_on_as_far_as_one_tensor_goes():
    builder = Builder()
    x = builder.input("x", (6, 8), "f64")
    free, stuck = linear(builder, x, "free", 8), linear(builder, x, "stuck", 8)
    both = builder.call("aten.mul.Tensor", builder.call("aten.gelu.default", free), x)
    normed = builder.call("aten.layer_norm.default", builder.call("aten.gelu.default", stuck), [8])
    following = follow(builder.finish([both, normed]), 2)
    leads = [
        following.leads_on(node, following.bound(node), "n")
        for node in following.graph.nodes
        if node.op == LINEAR
    ]
    assert leads == [True, False]


def test_what_has_no_annotation_is_done_whole():
    builder = Builder()
    y = linear(builder, builder.input("x", (6, 8), "f64"), "up", 8)
    y = builder.call("aten.dropout.default", y, 0.5, True)
    following = follow(builder.finish(y), 2, seeds=[at(LINEAR, "n")])
    assert following.splits() == [Split("n"), None]
    assert following.bound(following.graph.nodes[1]) is None
