"""Views are found by trial: the same offsets and strides that torch gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir import resolve
from shardwright.ir.operators import allow_namespace, split_call
from shardwright.ir.tensor_meta import TensorMeta
from shardwright.kernels.emitters import find_views
from shardwright.kernels.lowered import BaseView

BASE = torch.arange(24.0).reshape(2, 3, 4)
CALLS = {
    "view": ("aten.view.default", [6, 4]),
    "reshape": ("aten.reshape.default", [-1]),
    "permute": ("aten.permute.default", [2, 0, 1]),
    "transpose": ("aten.transpose.int", 0, 2),
    "expand": ("aten.expand.default", [5, 2, 3, 4]),
    "select": ("aten.select.int", 1, -1),
    "slice": ("aten.slice.Tensor", 2, 1, 4, 2),
    "unsqueeze": ("aten.unsqueeze.default", 1),
    "squeeze": ("aten.squeeze.default",),
    "flatten": ("aten.flatten.using_ints", 1, 2),
    "unbind": ("aten.unbind.int", 1),
    "split": ("aten.split.Tensor", 2, 1),
    "chunk": ("aten.chunk.default", 2, 2),
    "narrow": ("aten.narrow.default", 1, 1, 2),
    "unfold": ("aten.unfold.default", 2, 2, 1),
    "diagonal": ("aten.diagonal.default", 0, 0, 1),
    "detach": ("aten.detach.default",),
    "_unsafe_view": ("aten._unsafe_view.default", [24]),
    "movedim": ("aten.movedim.int", 0, 2),
    "a cast that changes nothing": ("aten.to.dtype", torch.float32),
}
NONE = {
    "relu": ("aten.relu.default",),
    "a cast": ("aten.to.dtype", torch.float64),
    "bytes": ("aten.view.dtype", torch.int32),
    "clone": ("aten.clone.default",),
}


def found(call, base):
    op, *args = call
    tensors, attrs = split_call(resolve(op), [base, *args], {})
    described = [TensorMeta(tuple(t.shape), "f32", t.stride()) for t in tensors]
    return find_views(resolve(op), described, attrs)


def shown(view, base):
    return base.as_strided(view.shape, view.strides, base.storage_offset() + view.offset)


@pytest.mark.parametrize("name", CALLS)
def test_views_show_what_the_operator_gives(name):
    op, *args = CALLS[name]
    made = resolve(op)(BASE, *args)
    made = list(made) if isinstance(made, (list, tuple)) else [made]
    views = found(CALLS[name], BASE)
    assert len(views) == len(made)
    for view, wanted in zip(views, made, strict=True):
        assert torch.equal(shown(view, BASE), wanted)
        assert view.strides == wanted.stride()


@pytest.mark.parametrize("name", NONE)
def test_what_makes_memory_of_its_own_is_no_view(name):
    assert found(NONE[name], BASE) is None


def test_a_reshape_is_a_view_where_strides_allow():
    turned = BASE.permute(2, 0, 1)
    assert found(("aten.reshape.default", [4, 6]), turned) is None or torch.equal(
        shown(found(("aten.reshape.default", [4, 6]), turned)[0], turned), turned.reshape(4, 6)
    )
    assert found(("aten.reshape.default", [24]), turned) is None


def test_lazy_conjugates_are_no_views():
    described = [TensorMeta((3,), "c64", (1,))]
    assert find_views(resolve("aten.conj.default"), described, {}) is None
    assert find_views(resolve("aten.real.default"), described, {}) is None


@given(st.permutations([0, 1, 2]), st.integers(0, 2), st.integers(0, 1))
def test_views_of_views_count_from_their_own_first_element(order, dim, index):
    base = BASE.permute(order)
    (view,) = found(("aten.select.int", dim, index), base)
    assert torch.equal(shown(view, base), base.select(dim, index))


def test_what_does_not_run_without_contents_is_no_view():
    torch.library.define("views_test::peek", "(Tensor(a) x) -> Tensor(a)")
    torch.library.impl("views_test::peek", "cpu", lambda x: x.view(-1))
    allow_namespace("views_test")
    described = [TensorMeta((2, 3), "f32", (3, 1))]
    assert find_views(resolve("views_test.peek.default"), described, {}) is None
    torch.library.impl("views_test::peek", "meta", lambda x: x.view(-1))
    assert find_views(resolve("views_test.peek.default"), described, {}) == [
        BaseView(0, 0, (6,), (1,))
    ]
