"""Calls that look up, or write, by indices."""

import torch

from tests.ops.case import Case, F, I, K, T, U, case, distinct, sorted_list

INDICES: list[Case] = [
    case("embedding.default", F("v d"), I("a b", "v")),
    case("embedding.default", F("v d"), I("a", "v"), 2),
    case("gather.default", F("a v c"), 1, I("a j c", "v")),
    case("gather.default", F("a v"), 1, I("3 j", "v")),
    case("index_select.default", F("a v c"), 1, I("j", "v")),
    case("index.Tensor", F("v d"), [I("j i", "v")]),
    case("index.Tensor", F("a v d"), [None, T("j", lambda s, z: torch.arange(s[0]) % 4 - 2)]),
    case("index.Tensor", F("a b c"), [I("j 1", "a"), I("i", "b")]),
    case("index.Tensor", F("a b c"), [I("j", "a"), None, I("j", "c")]),
    case("scatter.src", F("a v c"), 1, I("a 1 c", "v"), F("a 1 c")),
    case("scatter.value", F("a v"), 1, I("a j", "v"), 2.0),
    case("scatter.reduce", K("a v"), 1, I("a j", "v"), K("a j"), reduce="add"),
    case("scatter.value_reduce", K("a v"), 1, I("a j", "v"), 2.0, reduce="multiply"),
    case("scatter_add.default", F("a v"), 1, I("a j", "v"), F("a j")),
    case("scatter_reduce.two", F("a v"), 1, I("a j", "v"), F("a j"), "amax"),
    case("index_add.default", F("a v"), 1, I("j", "v"), F("a j")),
    case("index_copy.default", F("a v"), 1, distinct("3", 4), F("a 3")),
    case("index_fill.int_Scalar", F("a v"), 1, distinct("3", 4), 2.0),
    case("index_fill.int_Tensor", F("a v"), 1, distinct("3", 4), F("")),
    case("index_put.default", F("a b"), [I("j", "a")], F("j b"), True),
    case("index_put.default", F("a b c"), [None, I("3", "b")], F("c"), True),
    case("one_hot.default", I("a b", 7), 7),
    case("bucketize.Tensor", U("a b"), sorted_list("c")),
    case("isin.Tensor_Tensor", I("a b", 9), I("c", 9)),
    case("searchsorted.Tensor", sorted_list("c"), U("a b")),
    case("searchsorted.Tensor", sorted_list("a c"), U("a b")),
]
