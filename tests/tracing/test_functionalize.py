"""Operators and regions: what stays, what is inlined, what is left out, what is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwright.errors import CaptureError
from shardwright.tracing import capture
from shardwright.tracing.functionalize import functional_form
from tests.tracing.equality import Module, assert_same, captured, operators


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4, requires_grad=True)


def test_control_flow_operators_are_refused(x: torch.Tensor) -> None:
    def chosen(m: Any, x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    with pytest.raises(CaptureError, match=r"`return torch.cond.*torch\.where"):
        captured(chosen, x.detach())
    with pytest.raises(CaptureError, match="vmap"):
        captured(lambda m, x: torch.vmap(torch.sum)(x), x)


def test_gradient_checkpoints_are_inlined(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(m.linear, x, use_reentrant=False)

    assert operators(assert_same(function, x)) == ["linear"]


def test_recurrent_network() -> None:
    assert_same(nn.LSTM(4, 3, num_layers=2, batch_first=True), torch.randn(2, 5, 4))


def test_transformer_layers() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert_same(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, 8))


def test_operators_of_other_libraries(x: torch.Tensor) -> None:
    @torch.library.custom_op("tracingtest::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    graph = assert_same(lambda m, x: twice(x.detach()), x)
    assert graph.nodes[-1].op == "tracingtest.twice.default"


def test_profiler_ranges_are_left_out(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.profiler.record_function("range"):
            return m.linear(x)

    assert operators(assert_same(function, x)) == ["linear"]


# --- operators that write: the tensor written to keeps its shape, dtype and strides ---------------


def test_dtype_is_that_of_the_tensor_written_to(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        half = x.half()
        half.mul_(x)
        whole = torch.zeros(3, 4, dtype=torch.int64)
        whole.copy_(x * 10)
        whole.add_(True)
        return half, whole

    assert_same(function, x)


def test_copy_of_another_shape_and_layout(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        y = torch.empty(3, 4)
        y.copy_(x[0])
        z = torch.empty(4, 3)
        z.copy_(x.t())
        w = torch.empty(3, 4)
        w[:] = x
        return y, z, z.view(-1), w

    assert_same(function, x)


def test_strides_stay_those_of_the_tensor_written_to(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        y = m.linear(x).t().clone(memory_format=torch.preserve_format)
        flat = y.t().view(-1)
        y.copy_(x.t().contiguous())
        return y, flat

    assert_same(function, x)


def test_out_arguments(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        out = torch.empty(3, 4)
        torch.add(x.detach(), 1, out=out)
        row = out[0]
        torch.mul(out[1], 2, out=row)
        values, indices = torch.empty(3, 2), torch.empty(3, 2, dtype=torch.int64)
        torch.topk(out, 2, out=(values, indices))
        torch.zeros(4, out=out[2])
        return out, row, values, indices

    assert_same(function, x)


def test_indexed_writes(x: torch.Tensor) -> None:
    index = torch.tensor([2, 0])

    def function(m: Any, x: Any) -> Any:
        y = m.linear(x)
        y[index] = x[:2]
        y[y > 0.5] = 0
        y[:, index] += 1
        y.masked_fill_(y < -1, -1.0)
        y.index_add_(0, index, x[:2]).scatter_(1, index[:, None], 7.0)
        return y

    assert_same(function, x)


def test_lists_of_tensors(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        parts = [x.detach() * 1, x.detach() * 2]
        torch._foreach_add_(parts, 3)
        torch._foreach_mul_(parts, [x.detach(), x.detach()])
        return parts

    assert_same(function, x)


def test_shape_changes_in_place(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        y = m.linear(x)
        before = y.view(-1)
        y.unsqueeze_(0)
        y.transpose_(1, 2)
        y.mul_(2)
        z = y.squeeze_().t_()
        return before, y, z

    assert_same(function, x)


def test_what_has_no_functional_form_is_refused(x: torch.Tensor) -> None:
    with pytest.raises(CaptureError, match=r"fill_diagonal_.*functional form"):
        captured(lambda m, x: (x * 1).fill_diagonal_(1), x)
    with pytest.raises(CaptureError, match=r"resize_.*functional form"):
        captured(lambda m, x: (x.detach() * 1).resize_(2, 2), x)
    with pytest.raises(CaptureError, match="out="):
        captured(lambda m, x: torch.add(x.detach(), 1, out=torch.empty(0)), x)


# --- norms in training ----------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm(affine: bool, layout: torch.memory_format) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4, affine=affine), nn.ReLU())
    x = torch.randn(2, 3, 5, 5).contiguous(memory_format=layout)
    graph = assert_same(model, x)
    names = sorted(graph.values[old].name for old in graph.updates)
    assert names == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]


def test_batch_norm_twice_in_one_forward() -> None:
    norm = nn.BatchNorm1d(4)
    assert_same(nn.Sequential(norm, nn.Linear(4, 4), norm), torch.randn(6, 4))


def test_batch_norm_without_statistics_or_in_eval_updates_nothing() -> None:
    x = torch.randn(6, 4)
    for model in (nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4).eval()):
        graph = assert_same(model, x)
        assert not graph.updates
        assert [node.op for node in graph.nodes] == ["aten.batch_norm.default"]


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm(affine: bool) -> None:
    model = nn.InstanceNorm2d(3, affine=affine, track_running_stats=True)
    graph = assert_same(model, torch.randn(2, 3, 4, 4))
    assert len(graph.updates) == 2
    assert not assert_same(nn.InstanceNorm2d(3), torch.randn(2, 3, 4, 4)).updates


def test_batch_norm_in_lower_precision() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y: torch.Tensor = self.norm(self.conv(x))
            return y

    assert len(assert_same(Model(), torch.randn(2, 3, 5, 5)).updates) == 3


# --- functional forms -----------------------------------------------------------------------------


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


# --- gradients flow in the graph where they do in the program -------------------------------------


def test_no_grad_regions_are_inlined_and_stop_gradients(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.no_grad():
            scale = m.linear(x).abs() + 1
            with torch.enable_grad():
                inner = x * 3
        return m.linear(x) / scale + inner

    assert operators(assert_same(function, x)).count("detach") == 1


def test_no_detach_where_there_is_no_gradient(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.no_grad():
            angles = torch.arange(4.0) * m.average
        return x * angles.cos()

    assert operators(assert_same(function, x)) == ["arange", "mul", "cos", "mul"]


def test_buffers_are_written_without_gradient(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.no_grad():
            m.average.lerp_(x.mean(0), 0.1)
        m.steps += x.detach().sum()
        return m.linear(x) + m.average

    assert len(assert_same(function, x).updates) == 2


def test_detach(x: torch.Tensor) -> None:
    assert_same(lambda m, x: m.linear(x).detach() * x + x.detach().detach_(), x)


def test_writing_without_gradient_to_what_has_one_is_refused(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        y = m.linear(x)
        with torch.no_grad():
            y.mul_(2)
        return y

    with pytest.raises(CaptureError, match=r"`y.mul_\(2\)`.*another gradient"):
        captured(function, x)
    with pytest.raises(CaptureError, match="another gradient"):
        captured(lambda m, x: m.linear(x).detach().mul_(2), x)
    with torch.no_grad():
        assert_same(function, x)


def test_capture_without_gradient_needs_no_detach(x: torch.Tensor) -> None:
    with torch.no_grad():
        graph = captured(lambda m, x: m.linear(x).detach(), x)
    assert operators(graph) == ["linear"]
    model = Module(lambda m, x: m.linear(x).detach())
    with torch.inference_mode():
        assert operators(capture(model, (x,))) == ["linear"]
