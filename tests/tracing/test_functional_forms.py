"""Functional forms: the same numbers as the operator that writes, for those that models use."""

from typing import Any

import pytest
import torch

from shardwright.tracing.functionalize import functional_form

aten = torch.ops.aten
ROWS, COLUMNS = torch.tensor([0, 2]), torch.tensor([[0, 1, 2, 0]])
ROW = torch.arange(4.0)

IN_PLACE: dict[str, tuple[Any, ...]] = {
    "add_.Tensor": (ROW,),
    "add_.Scalar": (2,),
    "sub_.Tensor": (ROW,),
    "mul_.Tensor": (ROW,),
    "div_.Tensor": (ROW + 1,),
    "div_.Tensor_mode": (ROW + 1,),
    "pow_.Scalar": (2,),
    "relu_.default": (),
    "sigmoid_.default": (),
    "silu_.default": (),
    "leaky_relu_.default": (0.1,),
    "elu_.default": (),
    "hardtanh_.default": (),
    "clamp_.default": (-0.5, 0.5),
    "clamp_min_.default": (0.0,),
    "exp_.default": (),
    "neg_.default": (),
    "zero_.default": (),
    "fill_.Scalar": (3,),
    "fill_.Tensor": (torch.tensor(3.0),),
    "tril_.default": (),
    "masked_fill_.Scalar": (ROW > 1, 0.0),
    "masked_scatter_.default": (ROW > 1, torch.randn(12)),
    "index_put_.default": ([ROWS], ROW),
    "index_fill_.int_Scalar": (0, ROWS, 1.0),
    "index_add_.default": (0, ROWS, torch.randn(2, 4)),
    "index_copy_.default": (0, ROWS, torch.randn(2, 4)),
    "scatter_.src": (0, COLUMNS, torch.randn(1, 4)),
    "scatter_.value": (0, COLUMNS, 2.0),
    "scatter_add_.default": (0, COLUMNS, torch.randn(1, 4)),
    "addcmul_.default": (ROW, ROW),
    "lerp_.Scalar": (torch.ones(3, 4), 0.3),
    "addmm_.default": (torch.randn(3, 5), torch.randn(5, 4)),
    "uniform_.default": (),
    "normal_.default": (),
    "bernoulli_.float": (0.4,),
    "exponential_.default": (),
    "random_.to": (9,),
    "dropout_.default": (0.5, True),
}


def overload(name: str) -> Any:
    packet, _, kind = name.partition(".")
    return getattr(getattr(aten, packet), kind)


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name: str) -> None:
    op, args = overload(name), IN_PLACE[name]
    kwargs = {"rounding_mode": "floor"} if name.endswith("_mode") else {}
    form = functional_form(op)
    assert form is not None
    assert form.writes == ("self",)
    assert not form.overload._schema.is_mutable
    x = torch.randn(3, 4)
    torch.manual_seed(0)
    found = form.overload(x, *args, **kwargs)
    torch.manual_seed(0)
    assert torch.equal(found, op(x.clone(), *args, **kwargs))


def test_out_variants() -> None:
    form = functional_form(aten.topk.values)
    assert form is not None
    assert (form.overload, form.writes) == (aten.topk.default, ("values", "indices"))
    form = functional_form(aten.arange.start_out)
    assert form is not None
    assert form.takes_dtype


def test_lists() -> None:
    form = functional_form(aten._foreach_add_.List)
    assert form is not None
    assert form.overload is aten._foreach_add.List


def test_most_of_torch_has_a_functional_form() -> None:
    mutable = [
        getattr(packet, name)
        for packet in (getattr(aten, name) for name in dir(aten))
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for name in packet.overloads()
        if getattr(packet, name)._schema.is_mutable
    ]
    known = [op for op in mutable if functional_form(op) is not None]
    assert len(known) > 0.9 * len(mutable)


def test_what_has_none() -> None:
    assert functional_form(aten.fill_diagonal_.default) is None
