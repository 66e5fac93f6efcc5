"""Fake results are what kernels make, however the arguments lie."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from shardwright.ir.inference import as_kernels_make
from shardwright.torch_internals import FakeTensorMode


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fake_results_are_made_what_kernels_make(dtype):
    def made(mode):
        with mode:
            x = torch.ones(3, 4, 5, dtype=dtype).transpose(0, 1)
            mean = torch.ones(4, 3, 1, dtype=dtype)
            heads = torch.ones(2, 2, 4, 8, dtype=dtype)
            norm = torch.ops.aten.native_layer_norm_backward.default
            given = (x, x, [5], mean, mean, x[0, 0], x[0, 0], [True, True, True])
            attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
            yield from as_kernels_make(norm, norm(*given), given)
            yield from as_kernels_make(attention, attention(heads, heads, heads), ())

    kinds = [
        [(t.shape, t.dtype, t.stride()) for t in made(mode)]
        for mode in (FakeTensorMode(), nullcontext())
    ]
    assert kinds[0] == kinds[1]


ELEMENTWISE = {
    "elu_backward": lambda g, x: (g, 1.0, 1.0, 1.0, False, x),
    "glu_backward": lambda g, x: (g[:, :2], x, 1),
    "hardsigmoid_backward": lambda g, x: (g, x),
    "hardswish_backward": lambda g, x: (g, x),
    "hardtanh_backward": lambda g, x: (g, x, -1.0, 1.0),
    "huber_loss_backward": lambda g, x: (g, x, g, 0, 1.0),
    "leaky_relu_backward": lambda g, x: (g, x, 0.1, False),
    "log_sigmoid_backward": lambda g, x: (g, x, x),
    "log_sigmoid_forward": lambda g, x: (x,),
    "logit_backward": lambda g, x: (g, x),
    "mse_loss_backward": lambda g, x: (g, x, g, 0),
    "native_dropout_backward": lambda g, x: (g, x > 0.5, 2.0),
    "rrelu_with_noise_backward": lambda g, x: (g, x, x, 0.1, 0.3, True, False),
    "smooth_l1_loss_backward": lambda g, x: (g, x, g, 0, 1.0),
    "softplus_backward": lambda g, x: (g, x, 1.0, 20.0),
    "threshold_backward": lambda g, x: (g, x, 0),
    "_log_softmax_backward_data": lambda g, x: (g, x, 1, torch.float64),
    "_prelu_kernel_backward": lambda g, x: (g, x, x[:1, :1, :1, :1].clone()),
    "_softmax_backward_data": lambda g, x: (g, x, 1, torch.float64),
    "pow": lambda g, x: (2.0, x),
    "xlogy": lambda g, x: (g, x),
    "replication_pad2d_backward": lambda g, x: (F.pad(g, (1, 1, 1, 1)), x, [1, 1, 1, 1]),
    "reflection_pad2d_backward": lambda g, x: (F.pad(g, (1, 1, 1, 1)), x, [1, 1, 1, 1]),
}
LIE = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "reversed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_fake_results_lie_as_those_of_kernels(name):
    overload = getattr(torch.ops.aten, name)
    overload = getattr(overload, {"pow": "Scalar", "xlogy": "Tensor"}.get(name, "default"))

    def strides(mode, *ways):
        with mode:
            given = ELEMENTWISE[name](*(way(torch.ones(3, 4, 5, 6).double()) for way in ways))
            made = overload(*given)
            made = made if isinstance(made, tuple) else (made,)
            if isinstance(mode, FakeTensorMode):
                made = as_kernels_make(overload, made, given)
            return [tensor.stride() for tensor in made if tensor.numel()]

    for gradient, of in product(LIE, LIE):
        ways = LIE[gradient], LIE[of]
        kernels = strides(nullcontext(), *ways)
        assert strides(FakeTensorMode(), *ways)[: len(kernels)] == kernels, (gradient, of)
