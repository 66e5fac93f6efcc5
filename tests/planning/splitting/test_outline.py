"""Outlines: kept for searches, without keeping what they are of."""

import gc
import weakref

import torch

from shardwright.ir import Builder, IRGraph
from shardwright.planning.splitting import outline


def graph() -> IRGraph:
    builder = Builder("one")
    x = builder.input("x", (4, 8), "f32")
    weight = builder.param("w", torch.randn(8, 8))
    return builder.finish(builder.call("aten.linear.default", x, weight))


def test_an_outline_is_made_once() -> None:
    view = graph()
    assert outline.outline_of(view) is outline.outline_of(view)
    view.nodes.append(view.nodes[0])
    assert len(outline.outline_of(view).kinds) == 2


def test_an_outline_keeps_neither_graph_nor_weights() -> None:
    view = graph()
    (weight,) = view.tensors.values()
    found = weakref.ref(weight), weakref.ref(view)
    kept = outline.outline_of(view)
    del view, weight
    gc.collect()
    assert [ref() for ref in found] == [None, None]
    assert not kept.view.tensors


def test_another_graph_in_the_same_place_has_its_own() -> None:
    for _ in range(20):
        view = graph()
        assert outline.outline_of(view).view.nodes is view.nodes
