"""Reasons: what a split costs alone, and the next best."""

import re

import pytest
import torch

from shardwright.clusters import Cluster, Link, Links
from shardwright.costs.cost import Analytic
from shardwright.ir import Builder
from shardwright.planning.plan import Split, Terms
from shardwright.planning.splitting.layouts import best_splits, price_splits, says
from tests.planning.projections import linear, stacked, transformer

QUICK = Links.of(Link(1e-6, 20e9), Link(1e-6, 20e9), 5e-6)
AXES = {"tensor": 2}


def options():
    cluster = Cluster.of(2, inside=QUICK)
    return {"cluster": cluster, "costs": Analytic(cluster.device), "training": False}


def test_what_axes_do_in_words():
    assert says((Split("n"), None), ("data", "tensor")) == "n over data"
    assert says((Split("n", 64), Terms((0, 1))), ("a", "b")) == "n by 64 over a, terms over b"
    assert says((None,), ("a",)) == "whole"


def test_the_next_best_costs_what_it_says():
    """In a chain of two products, the one that is split otherwise is walked as such."""
    torch.manual_seed(0)
    builder = Builder("chain")
    x = builder.input("x", (1, 256), "f32")
    for name in ("a", "b"):
        weight = builder.param(name, torch.randn(256, 256))
        x = builder.call("aten.linear.default", x, weight)
    view = builder.finish(x)
    best = best_splits(view, AXES, **options())
    found = re.fullmatch(r"(.+): ([\d.]+) µs; next best (.+): ([\d.]+) µs", best.reasons[1])
    assert found is not None
    own, spent, other, more = found.groups()
    assert says(best.splits[1], AXES) == own
    identifier = other.removesuffix(" over tensor")
    split = None if other == "whole" else Split(identifier)
    changed = price_splits(view, AXES, [best.splits[0], (split,)], **options())
    assert changed.seconds() - best.seconds() == pytest.approx(
        (float(more) - float(spent)) * 1e-6, abs=2e-7
    )


def test_no_split_alone_is_better():
    view = transformer(2, product=linear, taken=stacked, batch=4, width=64)
    for reason in best_splits(view, AXES, **options()).reasons:
        spent = [float(number) for number in re.findall(r"([\d.]+) µs", reason)]
        assert spent == sorted(spent)


def test_what_has_no_annotation_says_so():
    builder = Builder("cumulative")
    x = builder.input("x", (4, 4), "f32")
    view = builder.finish(builder.call("aten.nonzero_static.default", x, size=3))
    (reason,) = best_splits(view, AXES, **options()).reasons
    assert "nonzero_static" in reason
