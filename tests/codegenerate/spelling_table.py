"""Sample calls, one or more for each row of the table of spelling: ``operator => text``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from shardwright.codegenerate.spelling.forms import words
from tests.codegenerate.spelling_samples import IMAGE, M, Sample, Spec, X, Y, b, f, i

SQUARE, RATES = f(3, 3), f(4)
LOGITS, CLASSES = f(4, 5), i(4, below=5)
SIGNAL, VOLUME, HEADS = f(2, 4, 8), f(1, 2, 4, 4, 4), f(2, 2, 3, 4)
NAMES = {"math": math, "torch": torch, "Spec": Spec, "b": b, "f": f, "i": i}
NAMES |= {"X": X, "Y": Y, "M": M, "IMAGE": IMAGE, "SQUARE": SQUARE}
NAMES |= {"RATES": RATES, "LOGITS": LOGITS, "CLASSES": CLASSES}
NAMES |= {"SIGNAL": SIGNAL, "VOLUME": VOLUME, "HEADS": HEADS}


def samples(table: str, **options: bool) -> Iterator[Sample]:
    """The rows of a table; lines that are indented continue the one before."""
    for row in table.strip().replace("\n    ", " ").splitlines():
        call, _, text = row.partition(" => ")
        op, _, given = call.partition("(")
        args, kwargs = eval(f"given({given}", NAMES | {"given": given_arguments})
        yield Sample(op, args, text, kwargs, **options)


def given_arguments(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What stands between the brackets of a row's call."""
    return args, kwargs


ELEMENTWISE = """
add.Tensor(X, Y) => a + b
add.Tensor(X, 2) => a + 2
add.Tensor(X, -1.5) => a + -1.5
add.Tensor(X, Y, alpha=2) => torch.add(a, b, alpha=2)
add.Tensor(X, math.inf) => a + float("inf")
add.Tensor(X, torch.finfo(torch.float32).min) => a + torch.finfo(torch.float32).min
add.Scalar(X, 2) => torch.ops.aten.add.Scalar(a, 2)
sub.Tensor(X, Y) => a - b
sub.Tensor(X, Y, alpha=0.5) => torch.sub(a, b, alpha=0.5)
rsub.Scalar(X, 1.0) => 1.0 - a
mul.Tensor(X, 0.125) => a * 0.125
mul.Tensor(X, Y) => a * b
div.Tensor(X, Y) => a / b
div.Tensor(X, 8) => a / 8
div.Tensor_mode(X, 2, rounding_mode="floor") => torch.div(a, 2, rounding_mode="floor")
floor_divide.default(i(4, below=9), 2) => a // 2
floor_divide.default(X, Y) => a // b
remainder.Scalar(i(4, below=9), 2) => a % 2
remainder.Tensor(X, Y) => a % b
fmod.Scalar(X, 2.0) => torch.fmod(a, 2.0)
fmod.Tensor(X, Y) => torch.fmod(a, b)
matmul.default(f(2, 3), f(3, 4)) => a @ b
pow.Tensor_Scalar(X, 2) => a ** 2
pow.Tensor_Scalar(X, -0.5) => a ** -0.5
pow.Tensor_Tensor(X, Y) => a ** b
pow.Scalar(2.0, X) => 2.0 ** a
__and__.Tensor(M, M) => a & b
__and__.Scalar(i(4), 1) => a & 1
__or__.Tensor(M, M) => a | b
__or__.Scalar(i(4), 1) => a | 1
__xor__.Tensor(M, M) => a ^ b
__xor__.Scalar(i(4), 1) => a ^ 1
__lshift__.Tensor(i(4), i(4)) => a << b
__lshift__.Scalar(i(4), 1) => a << 1
__rshift__.Tensor(i(4), i(4)) => a >> b
__rshift__.Scalar(i(4), 1) => a >> 1
bitwise_and.Tensor(M, M) => torch.bitwise_and(a, b)
bitwise_or.Tensor(M, M) => torch.bitwise_or(a, b)
bitwise_xor.Tensor(M, M) => torch.bitwise_xor(a, b)
bitwise_left_shift.Tensor(i(4), i(4)) => torch.bitwise_left_shift(a, b)
bitwise_right_shift.Tensor(i(4), i(4)) => torch.bitwise_right_shift(a, b)
neg.default(X) => -a
bitwise_not.default(M) => ~a
abs.default(X) => a.abs()
real.default(f(3, dtype="c64")) => torch.real(a)
imag.default(f(3, dtype="c64")) => torch.imag(a)
logit.default(X) => torch.logit(a)
logit.default(X, 1e-06) => torch.logit(a, eps=1e-06)
special_expit.default(X) => torch.special.expit(a)
round.decimals(X, decimals=2) => torch.round(a, decimals=2)
copysign.Tensor(X, Y) => torch.copysign(a, b)
xlogy.Tensor(X, Y) => torch.xlogy(a, b)
lerp.Scalar(X, Y, 0.5) => torch.lerp(a, b, 0.5)
lerp.Tensor(X, Y, X) => torch.lerp(a, b, c)
addcmul.default(X, Y, X, value=0.5) => torch.addcmul(a, b, c, value=0.5)
addcdiv.default(X, Y, X) => torch.addcdiv(a, b, c)
where.self(M, X, Y) => torch.where(a, b, c)
where.ScalarOther(M, X, 0.0) => torch.where(a, b, 0.0)
where.ScalarSelf(M, 1.0, X) => torch.where(a, 1.0, b)
where.Scalar(M, 1.0, 0.0) => torch.where(a, 1.0, 0.0)
clamp.default(X, 0.0) => a.clamp(min=0.0)
clamp.default(X, max=6) => a.clamp(max=6)
clamp.default(X, 0.0, 1.0) => a.clamp(min=0.0, max=1.0)
clamp.Tensor(X, Y) => a.clamp(b)
clamp_min.default(X, 0) => a.clamp_min(0)
clamp_max.default(X, 1.0) => a.clamp_max(1.0)
masked_fill.Scalar(X, M, -math.inf) => a.masked_fill(b, float("-inf"))
masked_fill.Tensor(X, M, f()) => a.masked_fill(b, c)
clone.default(X) => a.clone()
clone.default(X, memory_format=torch.contiguous_format)
    => a.clone(memory_format=torch.contiguous_format)
type_as.default(i(4), f(3)) => a.type_as(b)
detach.default(X) => a.detach()
positive.default(X) => a.positive()
contiguous.default(f(3, 2, turned=True)) => a.contiguous()
contiguous.default(X) => torch.ops.aten.contiguous.default(a)
to.dtype(X, torch.float64) => a.to(torch.float64)
to.dtype(X, torch.float32, copy=True) => a.to(torch.float32, copy=True)
to.device(X, "cpu", torch.float64) => a.to(a.device, torch.float64)
copy.default(X, Y) => torch.ops.aten.copy.default(a, b)
gelu.default(X, approximate="tanh") => F.gelu(a, approximate="tanh")
elu.default(X) => F.elu(a)
elu.default(X, 0.5) => F.elu(a, alpha=0.5)
celu.default(X, 0.5) => F.celu(a, alpha=0.5)
leaky_relu.default(X) => F.leaky_relu(a)
leaky_relu.default(X, 0.2) => F.leaky_relu(a, negative_slope=0.2)
hardtanh.default(X, 0.0, 6.0) => F.hardtanh(a, min_val=0.0, max_val=6.0)
softplus.default(X) => F.softplus(a)
softplus.default(X, 2) => F.softplus(a, beta=2)
log_sigmoid.default(X) => F.logsigmoid(a)
threshold.default(X, 0.5, 0.0) => F.threshold(a, 0.5, 0.0)
hardshrink.default(X) => F.hardshrink(a)
softshrink.default(X, 0.2) => F.softshrink(a, lambd=0.2)
glu.default(X) => F.glu(a)
glu.default(f(2, 4, 3), 1) => F.glu(a, dim=1)
prelu.default(X, f(3)) => F.prelu(a, b)
mT.default(X) => a.mT
mH.default(X) => a.mH
numpy_T.default(f(2, 3)) => a.T
matrix_H.default(f(2, 3)) => a.H
"""

REDUCTIONS = """
sum.default(X) => a.sum()
sum.default(b(3)) => a.sum()
sum.dim_IntList(X, [-1]) => a.sum(-1)
sum.dim_IntList(X, [0, 1], True) => a.sum((0, 1), keepdim=True)
sum.dim_IntList(X, [1], dtype=torch.float64) => a.sum(1, dtype=torch.float64)
mean.default(X) => a.mean()
mean.dim(X, [-1], True) => a.mean(-1, keepdim=True)
mean.dim(X, [-2, -1]) => a.mean((-2, -1))
amax.default(X, [-1], True) => a.amax(dim=-1, keepdim=True)
amin.default(X, [0, 1]) => a.amin(dim=(0, 1))
max.default(X) => a.max()
max.dim(X, 1) => a.max(1)
max.dim(X, 1, True) => a.max(1, keepdim=True)
max.other(X, Y) => torch.max(a, b)
min.default(X) => a.min()
min.dim(X, 1) => a.min(1)
min.other(X, Y) => torch.min(a, b)
argmax.default(X, -1) => a.argmax(dim=-1)
argmax.default(X) => a.argmax()
argmin.default(X, 0, True) => a.argmin(dim=0, keepdim=True)
prod.default(X) => a.prod()
prod.dim_int(X, 1) => a.prod(1)
any.default(M) => a.any()
any.dim(M, -1) => a.any(-1)
all.default(M) => a.all()
all.dim(M, -1, True) => a.all(-1, keepdim=True)
var.dim(X, [-1]) => a.var(-1)
var.dim(X, [-1], False) => a.var(-1, unbiased=False)
std.dim(X, [-1], True, True) => a.std(-1, keepdim=True)
var.correction(X, [-1], correction=0) => a.var(dim=-1, correction=0)
std.correction(X, [-1], correction=1, keepdim=True) => a.std(dim=-1, correction=1, keepdim=True)
var_mean.correction(X, [-1], correction=0) => torch.var_mean(a, dim=-1, correction=0)
std_mean.correction(X, [-1], correction=0) => torch.std_mean(a, dim=-1, correction=0)
logsumexp.default(X, [-1]) => a.logsumexp(-1)
cumsum.default(X, -1) => a.cumsum(-1)
cumsum.default(M, 1, dtype=torch.int64) => a.cumsum(1, dtype=torch.int64)
cumprod.default(X, -1) => a.cumprod(-1)
logcumsumexp.default(X, -1) => a.logcumsumexp(-1)
cummax.default(X, 1) => a.cummax(1)
cummin.default(X, 1) => a.cummin(1)
nansum.default(X) => a.nansum()
median.default(X) => a.median()
median.dim(X, 1) => a.median(1)
mode.default(X, 1) => a.mode(dim=1)
kthvalue.default(X, 2) => a.kthvalue(2)
topk.default(X, 2) => a.topk(2)
topk.default(X, 2, 1) => a.topk(2, dim=1)
sort.default(X) => a.sort()
sort.default(X, 1, True) => a.sort(dim=1, descending=True)
argsort.default(X) => a.argsort()
count_nonzero.default(X) => a.count_nonzero()
count_nonzero.dim_IntList(X, [1]) => a.count_nonzero((1,))
diff.default(X) => a.diff()
aminmax.default(X) => torch.aminmax(a)
histc.default(X, 4, max=3) => torch.histc(a, bins=4, max=3)
renorm.default(X, 2, 0, 1.0) => torch.renorm(a, 2, 0, 1.0)
softmax.int(X, -1) => F.softmax(a, dim=-1)
softmax.int(X, 1, torch.float64) => F.softmax(a, dim=1, dtype=torch.float64)
log_softmax.int(X, -1) => F.log_softmax(a, dim=-1)
linalg_vector_norm.default(X) => torch.linalg.vector_norm(a)
linalg_vector_norm.default(X, 2, [-1], True)
    => torch.linalg.vector_norm(a, dim=-1, keepdim=True)
cosine_similarity.default(X, Y, -1) => F.cosine_similarity(a, b, dim=-1)
"""

SHAPES = """
view.default(X, [6, 4]) => a.view(6, 4)
view.default(X, [-1]) => a.view(-1)
view.default(f(1), []) => a.view(())
view.dtype(X, torch.int32) => a.view(torch.int32)
reshape.default(X, [2, -1]) => a.reshape(2, -1)
permute.default(X, [0, 2, 1]) => a.permute(0, 2, 1)
transpose.int(X, 1, 2) => a.transpose(1, 2)
t.default(f(2, 3)) => a.t()
expand.default(f(1, 3, 4), [2, -1, -1]) => a.expand(2, -1, -1)
expand_as.default(f(1, 3, 4), X) => a.expand_as(b)
repeat.default(X, [2, 1, 1]) => a.repeat(2, 1, 1)
tile.default(X, [2, 1]) => a.tile(2, 1)
flip.default(X, [1, 2]) => a.flip(1, 2)
roll.default(X, [1], [2]) => a.roll(1, dims=2)
roll.default(X, [1, -1], [1, 2]) => a.roll((1, -1), dims=(1, 2))
rot90.default(X) => a.rot90()
flatten.using_ints(X, 1) => a.flatten(1)
flatten.using_ints(X) => a.flatten()
flatten.using_ints(X, 0, 1) => a.flatten(end_dim=1)
unflatten.int(X, 2, [2, 2]) => torch.unflatten(a, 2, (2, 2))
squeeze.default(f(1, 3, 1)) => a.squeeze()
squeeze.dim(f(1, 3, 1), -1) => a.squeeze(-1)
squeeze.dims(f(1, 3, 1), [0, 2]) => a.squeeze((0, 2))
unsqueeze.default(X, 1) => a.unsqueeze(1)
movedim.int(X, 0, 1) => a.movedim(0, 1)
movedim.intlist(X, [0, 1], [1, 2]) => a.movedim((0, 1), (1, 2))
swapaxes.default(X, 0, 1) => a.swapaxes(0, 1)
swapdims.default(X, 0, 1) => a.swapdims(0, 1)
narrow.default(X, 1, 0, 2) => a.narrow(1, 0, 2)
diagonal.default(X) => a.diagonal()
diagonal.default(X, 0, 1, 2) => a.diagonal(dim1=1, dim2=2)
unfold.default(X, 2, 2, 1) => a.unfold(2, 2, 1)
as_strided.default(X, [2, 2], [1, 2]) => a.as_strided((2, 2), (1, 2))
view_as.default(X, f(6, 4)) => a.view_as(b)
reshape_as.default(X, f(6, 4)) => a.reshape_as(b)
repeat_interleave.self_int(X, 2, 1) => a.repeat_interleave(2, dim=1)
tril.default(X) => a.tril()
triu.default(X, 1) => a.triu(diagonal=1)
diag_embed.default(X) => a.diag_embed()
unbind.int(X) => a.unbind()
unbind.int(X, 1) => a.unbind(dim=1)
chunk.default(X, 2, -1) => a.chunk(2, dim=-1)
split.Tensor(X, 2, 2) => torch.split(a, 2, dim=2)
split_with_sizes.default(X, [1, 3], 2) => torch.split(a, [1, 3], dim=2)
tensor_split.sections(X, 2, 1) => torch.tensor_split(a, 2, dim=1)
tensor_split.indices(X, [1, 2], 1) => torch.tensor_split(a, (1, 2), dim=1)
cat.default([X, Y]) => torch.cat([a, b])
cat.default([X, Y], -1) => torch.cat([a, b], dim=-1)
stack.default([X, Y], 1) => torch.stack([a, b], dim=1)
view_as_real.default(f(3, dtype="c64")) => torch.view_as_real(a)
view_as_complex.default(f(3, 2)) => torch.view_as_complex(a)
kron.default(f(2, 2), f(2, 2)) => torch.kron(a, b)
slice_scatter.default(X, f(2, 1, 4), 1, 0, 1)
    => torch.slice_scatter(a, b, dim=1, start=0, end=1)
select_scatter.default(X, f(2, 4), 1, 0) => torch.select_scatter(a, b, 1, 0)
diagonal_scatter.default(f(3, 3), f(3)) => torch.diagonal_scatter(a, b)
pixel_shuffle.default(IMAGE, 2) => torch.pixel_shuffle(a, 2)
pixel_unshuffle.default(IMAGE, 2) => torch.pixel_unshuffle(a, 2)
channel_shuffle.default(IMAGE, 2) => torch.channel_shuffle(a, 2)
pad.default(X, [1, 1]) => F.pad(a, (1, 1))
pad.default(X, [0, 1, 1, 0], "constant", 1.0) => F.pad(a, (0, 1, 1, 0), value=1.0)
pad.default(X, [1, 1], "reflect") => F.pad(a, (1, 1), mode="reflect")
meshgrid.indexing([f(2), f(3)], indexing="ij") => torch.meshgrid(a, b, indexing="ij")
"""

INDEXING = """
select.int(X, 0, 1) => a[1]
select.int(X, 1, 0) => a[:, 0]
select.int(X, 2, -1) => a[..., -1]
select.int(X, -1, 0) => a.select(-1, 0)
slice.Tensor(X, 0, 1, 2**63 - 1) => a[1:]
slice.Tensor(X, 1, 0, 2) => a[:, :2]
slice.Tensor(X, 1, 0, -1) => a[:, :-1]
slice.Tensor(X, 2, 1, 3) => a[..., 1:3]
slice.Tensor(X, 2, 0, 2**63 - 1, 2) => a[..., ::2]
slice.Tensor(f(2, 3, 4, 5), 2, -2, 2**63 - 1) => a[:, :, -2:]
slice.Tensor(X, -1, 0, 2) => torch.ops.aten.slice.Tensor(a, dim=-1, start=0, end=2)
slice.Tensor(X, 1, 0, 2**63 - 1)
    => torch.ops.aten.slice.Tensor(a, dim=1, start=0, end=9223372036854775807)
slice.Tensor(X, 1, None, 2) => torch.ops.aten.slice.Tensor(a, dim=1, end=2)
index.Tensor(X, [i(5)]) => a[b]
index.Tensor(X, [None, i(5)]) => a[:, b]
index.Tensor(X, [i(5), i(5)]) => a[b, c]
index.Tensor(X, [None, i(5, 1), i(6)]) => a[:, b, c]
index.Tensor(X, [i(), i(6)]) => torch.ops.aten.index.Tensor(a, [b, c])
index_put.default(X, [i(5)], f(5, 3, 4)) => a.index_put([b], c)
index_put.default(X, [i(5), i(5)], f(5, 4), True) => a.index_put([b, c], d, accumulate=True)
index_put.default(X, [None, i(5)], f(2, 5, 4))
    => torch.ops.aten.index_put.default(a, [None, b], c)
index_select.default(X, 1, i(2)) => a.index_select(1, b)
gather.default(X, 1, i(2, 2, 4)) => a.gather(1, b)
scatter.src(X, 1, i(2, 1, 4), Y) => a.scatter(1, b, c)
scatter.value(X, 1, i(2, 1, 4), 1.0) => a.scatter(1, b, 1.0)
scatter_add.default(X, 1, i(2, 1, 4), Y) => a.scatter_add(1, b, c)
scatter_reduce.two(X, 1, i(2, 1, 4), Y, "sum") => a.scatter_reduce(1, b, c, "sum")
index_add.default(X, 0, i(2), Y) => a.index_add(0, b, c)
index_copy.default(X, 0, Spec((2,), "i64", 1), Y) => a.index_copy(0, b, c)
index_fill.int_Scalar(X, 0, i(1), 0.5) => a.index_fill(0, b, 0.5)
index_fill.int_Tensor(X, 0, i(1), f()) => a.index_fill(0, b, c)
masked_scatter.default(X, M, Y) => a.masked_scatter(b, c)
take_along_dim.default(X, i(2, 1, 4), 1) => a.take_along_dim(b, dim=1)
take.default(X, i(3)) => torch.take(a, b)
searchsorted.Tensor(f(4), f(3)) => torch.searchsorted(a, b)
searchsorted.Tensor(f(4), f(3), right=True) => torch.searchsorted(a, b, right=True)
bucketize.Tensor(f(4), f(3)) => torch.bucketize(a, b)
one_hot.default(i(4, below=3), 3) => F.one_hot(a, 3)
embedding.default(f(5, 3), i(2, 4)) => F.embedding(b, a)
embedding.default(f(5, 3), i(2, 4), 1) => F.embedding(b, a, padding_idx=1)
"""

FACTORIES = """
arange.default(5, pin_memory=False) => torch.arange(5, device=self.place)
arange.start(1, 5, pin_memory=False) => torch.arange(1, 5, device=self.place)
arange.start_step(0, 8, 2, pin_memory=False) => torch.arange(0, 8, 2, device=self.place)
arange.default(5.0, pin_memory=False)
    => torch.arange(5.0, dtype=torch.float32, device=self.place)
arange.start_step(0, 8, 2, pin_memory=False, dtype=torch.float32)
    => torch.arange(0, 8, 2, dtype=torch.float32, device=self.place)
full.default([2, 3], 0.5, pin_memory=False)
    => torch.full((2, 3), 0.5, dtype=torch.float32, device=self.place)
eye.default(3, pin_memory=False) => torch.eye(3, dtype=torch.float32, device=self.place)
eye.m(3, 4, pin_memory=False) => torch.eye(3, 4, dtype=torch.float32, device=self.place)
linspace.default(0, 1, 5, pin_memory=False)
    => torch.linspace(0, 1, 5, dtype=torch.float32, device=self.place)
randint.low(0, 5, [3], pin_memory=False) => torch.randint(0, 5, (3,), device=self.place)
randint.default(5, [3], pin_memory=False) => torch.randint(5, (3,), device=self.place)
randperm.default(5, pin_memory=False) => torch.randperm(5, device=self.place)
tril_indices.default(3, 3, pin_memory=False) => torch.tril_indices(3, 3, device=self.place)
triu_indices.default(3, 3, pin_memory=False) => torch.triu_indices(3, 3, device=self.place)
zeros_like.default(X, pin_memory=False) => torch.zeros_like(a)
ones_like.default(X, pin_memory=False, dtype=torch.bool) => torch.ones_like(a, dtype=torch.bool)
full_like.default(X, 2.0, pin_memory=False) => torch.full_like(a, 2.0)
empty_like.default(X, pin_memory=False) => torch.empty_like(a)
rand_like.default(X, pin_memory=False) => torch.rand_like(a)
randn_like.default(X, pin_memory=False) => torch.randn_like(a)
new_zeros.default(X, [2, 3], pin_memory=False) => a.new_zeros(2, 3)
new_ones.default(X, [2], pin_memory=False) => a.new_ones(2)
empty.memory_format([2, 3], pin_memory=False)
    => torch.empty(2, 3, dtype=torch.float32, device=self.place)
new_empty.default(X, [2], pin_memory=False) => a.new_empty(2)
new_full.default(X, [2], 0.5, pin_memory=False) => a.new_full((2,), 0.5)
scalar_tensor.default(0.5, pin_memory=False)
    => torch.scalar_tensor(0.5, dtype=torch.float32, device=self.place)
bernoulli.default(f(3)) => torch.bernoulli(a)
bernoulli.p(X, 0.5) => torch.bernoulli(a, 0.5)
multinomial.default(f(4), 2) => torch.multinomial(a, 2)
poisson.default(X) => torch.poisson(a)
"""

CONTRACTIONS = """
mm.default(f(2, 3), f(3, 4)) => torch.mm(a, b)
bmm.default(f(5, 2, 3), f(5, 3, 4)) => torch.bmm(a, b)
mv.default(f(2, 3), f(3)) => torch.mv(a, b)
dot.default(f(3), f(3)) => torch.dot(a, b)
inner.default(f(2, 3), f(4, 3)) => torch.inner(a, b)
outer.default(f(3), f(4)) => torch.outer(a, b)
addmm.default(f(4), f(2, 3), f(3, 4)) => torch.addmm(a, b, c)
addmm.default(f(4), f(2, 3), f(3, 4), alpha=0.5) => torch.addmm(a, b, c, alpha=0.5)
addbmm.default(f(2, 4), f(5, 2, 3), f(5, 3, 4)) => torch.addbmm(a, b, c)
baddbmm.default(f(5, 2, 4), f(5, 2, 3), f(5, 3, 4), beta=0.5)
    => torch.baddbmm(a, b, c, beta=0.5)
addmv.default(f(2), f(2, 3), f(3)) => torch.addmv(a, b, c)
addr.default(f(2, 3), f(2), f(3)) => torch.addr(a, b, c)
trace.default(SQUARE) => torch.trace(a)
bilinear.default(f(5, 2), f(5, 3), f(4, 2, 3), f(4)) => torch.bilinear(a, b, c, d)
einsum.default("ij,jk->ik", [f(2, 3), f(3, 4)]) => torch.einsum("ij,jk->ik", a, b)
tensordot.default(f(2, 3), f(3, 4), [1], [0]) => torch.tensordot(a, b, dims=([1], [0]))
linalg_inv.default(SQUARE) => torch.linalg.inv(a)
linalg_cholesky.default(f(1, 1)) => torch.linalg.cholesky(a)
linalg_det.default(SQUARE) => torch.linalg.det(a)
linalg_solve.default(SQUARE, f(3, 2)) => torch.linalg.solve(a, b)
linalg_qr.default(SQUARE) => torch.linalg.qr(a)
linalg_norm.default(SQUARE) => torch.linalg.norm(a)
"""

CONVOLUTIONS = """
linear.default(X, f(5, 4)) => F.linear(a, b)
linear.default(X, f(5, 4), f(5)) => F.linear(a, b, c)
conv1d.default(SIGNAL, f(6, 4, 3), f(6)) => F.conv1d(a, b, c)
conv1d.default(SIGNAL, f(4, 1, 3), None, [1], [2], [1], 4)
    => F.conv1d(a, b, padding=2, groups=4)
conv2d.default(IMAGE, f(6, 4, 3, 3), f(6), [2, 2], [1, 1])
    => F.conv2d(a, b, c, stride=2, padding=1)
conv2d.default(IMAGE, f(6, 4, 3, 3), None, [2, 1]) => F.conv2d(a, b, stride=(2, 1))
conv2d.padding(IMAGE, f(6, 4, 3, 3), None, [1, 1], "same") => F.conv2d(a, b, padding="same")
conv1d.padding(SIGNAL, f(6, 4, 3), None, [1], "same") => F.conv1d(a, b, padding="same")
conv3d.padding(VOLUME, f(3, 2, 3, 3, 3), None, [1, 1, 1], "same")
    => F.conv3d(a, b, padding="same")
conv3d.default(VOLUME, f(3, 2, 3, 3, 3)) => F.conv3d(a, b)
conv_transpose1d.default(SIGNAL, f(4, 6, 3), f(6), [2]) => F.conv_transpose1d(a, b, c, stride=2)
conv_transpose2d.input(IMAGE, f(4, 6, 3, 3), None, [2, 2], [1, 1], [1, 1])
    => F.conv_transpose2d(a, b, stride=2, padding=1, output_padding=1)
conv_transpose3d.input(VOLUME, f(2, 3, 3, 3, 3)) => F.conv_transpose3d(a, b)
convolution.default(IMAGE, f(6, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    => torch.convolution(a, b, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
max_pool1d.default(SIGNAL, [2]) => F.max_pool1d(a, 2)
max_pool2d.default(IMAGE, [3, 3], [2, 2], [1, 1]) => F.max_pool2d(a, 3, stride=2, padding=1)
max_pool3d.default(VOLUME, [2, 2, 2]) => F.max_pool3d(a, 2)
max_pool2d_with_indices.default(IMAGE, [2, 2]) => F.max_pool2d(a, 2, return_indices=True)
max_pool1d_with_indices.default(SIGNAL, [2]) => F.max_pool1d(a, 2, return_indices=True)
max_pool3d_with_indices.default(VOLUME, [2, 2, 2]) => F.max_pool3d(a, 2, return_indices=True)
avg_pool1d.default(SIGNAL, [2]) => F.avg_pool1d(a, 2)
avg_pool2d.default(IMAGE, [2, 2], [2, 2]) => F.avg_pool2d(a, 2, stride=2)
avg_pool3d.default(VOLUME, [2, 2, 2]) => F.avg_pool3d(a, 2)
adaptive_avg_pool1d.default(SIGNAL, [1]) => F.adaptive_avg_pool1d(a, 1)
adaptive_avg_pool2d.default(IMAGE, [1, 1]) => F.adaptive_avg_pool2d(a, 1)
adaptive_avg_pool2d.default(IMAGE, [2, 4]) => F.adaptive_avg_pool2d(a, (2, 4))
adaptive_avg_pool3d.default(VOLUME, [2, 2, 2]) => F.adaptive_avg_pool3d(a, 2)
adaptive_max_pool1d.default(SIGNAL, [2]) => F.adaptive_max_pool1d(a, 2, return_indices=True)
adaptive_max_pool2d.default(IMAGE, [2, 2]) => F.adaptive_max_pool2d(a, 2, return_indices=True)
adaptive_max_pool3d.default(VOLUME, [2, 2, 2])
    => F.adaptive_max_pool3d(a, 2, return_indices=True)
"""

FUNCTIONAL = """
layer_norm.default(X, [4]) => F.layer_norm(a, (4,))
layer_norm.default(X, [4], f(4), f(4)) => F.layer_norm(a, (4,), b, c)
layer_norm.default(X, [3, 4], f(3, 4), None, 1e-06) => F.layer_norm(a, (3, 4), b, eps=1e-06)
layer_norm.default(X, [4], None, f(4)) => F.layer_norm(a, (4,), bias=b)
rms_norm.default(X, [4], f(4), 1e-06) => F.rms_norm(a, (4,), b, eps=1e-06)
group_norm.default(IMAGE, 2, f(4), f(4)) => F.group_norm(a, 2, b, c)
batch_norm.default(IMAGE, f(4), f(4), f(4), f(4), False, 0.1, 1e-05, False)
    => F.batch_norm(a, d, e, b, c, training=self.training)
batch_norm.default(IMAGE, None, None, None, None, True, 0.1, 1e-05, False)
    => F.batch_norm(a, None, None, training=True)
instance_norm.default(IMAGE, f(4), f(4), None, None, True, 0.1, 1e-05, False)
    => F.instance_norm(a, weight=b, bias=c)
native_layer_norm.default(X, [4], f(4), f(4), 1e-05)
    => torch.native_layer_norm(a, (4,), b, c, 1e-05)
scaled_dot_product_attention.default(HEADS, HEADS, HEADS)
    => F.scaled_dot_product_attention(a, b, c)
scaled_dot_product_attention.default(HEADS, HEADS, HEADS, None, 0.0, True)
    => F.scaled_dot_product_attention(a, b, c, is_causal=True)
scaled_dot_product_attention.default(HEADS, HEADS, HEADS, b(2, 1, 3, 3), 0.0, scale=0.5)
    => F.scaled_dot_product_attention(a, b, c, attn_mask=d, scale=0.5)
scaled_dot_product_attention.default(f(2, 4, 3, 4), HEADS, HEADS, enable_gqa=True)
    => F.scaled_dot_product_attention(a, b, c, enable_gqa=True)
scaled_dot_product_attention.default(HEADS, HEADS, HEADS, None, 0.1)
    => F.scaled_dot_product_attention(a, b, c, dropout_p=0.1)
dropout.default(X, 0.1, True) => F.dropout(a, 0.1)
lstm.input(f(3, 2, 4), [f(1, 2, 5), f(1, 2, 5)], [f(20, 4), f(20, 5)], False, 1, 0.0, False,
    False, False) => torch.lstm(a, [b, c], [d, e], False, 1, 0.0, self.training, False, False)
gru.input(f(3, 2, 4), f(1, 2, 5), [f(15, 4), f(15, 5)], False, 1, 0.0, False, False, False)
    => torch.gru(a, b, [c, d], False, 1, 0.0, self.training, False, False)
"""

RESIZING = """
upsample_nearest1d.vec(SIGNAL, [16], None) => F.interpolate(a, size=(16,))
upsample_nearest2d.vec(IMAGE, None, [2.0, 2.0]) => F.interpolate(a, scale_factor=(2.0, 2.0))
_upsample_nearest_exact2d.vec(IMAGE, [4, 4], None)
    => F.interpolate(a, size=(4, 4), mode="nearest-exact")
_upsample_nearest_exact1d.vec(SIGNAL, None, [2.0])
    => F.interpolate(a, scale_factor=(2.0,), mode="nearest-exact")
_upsample_nearest_exact3d.vec(VOLUME, [2, 2, 2], None)
    => F.interpolate(a, size=(2, 2, 2), mode="nearest-exact")
upsample_nearest3d.vec(VOLUME, [2, 2, 2], None) => F.interpolate(a, size=(2, 2, 2))
upsample_linear1d.vec(SIGNAL, [16], False, None) => F.interpolate(a, size=(16,), mode="linear")
upsample_bilinear2d.vec(IMAGE, [4, 4], True, None)
    => F.interpolate(a, size=(4, 4), align_corners=True, mode="bilinear")
upsample_bicubic2d.vec(IMAGE, [4, 4], False, None)
    => F.interpolate(a, size=(4, 4), mode="bicubic")
upsample_trilinear3d.vec(VOLUME, None, False, [2.0, 2.0, 2.0])
    => F.interpolate(a, scale_factor=(2.0, 2.0, 2.0), mode="trilinear")
_upsample_bilinear2d_aa.vec(IMAGE, [4, 4], False, None)
    => F.interpolate(a, size=(4, 4), mode="bilinear", antialias=True)
_upsample_bicubic2d_aa.vec(IMAGE, [4, 4], False, None)
    => F.interpolate(a, size=(4, 4), mode="bicubic", antialias=True)
grid_sampler.default(IMAGE, f(2, 3, 3, 2), 0, 0, False)
    => F.grid_sample(a, b, align_corners=False)
grid_sampler.default(IMAGE, f(2, 3, 3, 2), 1, 1, True)
    => F.grid_sample(a, b, mode="nearest", padding_mode="border", align_corners=True)
"""

LOSSES = """
cross_entropy_loss.default(LOGITS, CLASSES) => F.cross_entropy(a, b)
cross_entropy_loss.default(LOGITS, CLASSES, None, 2) => F.cross_entropy(a, b, reduction="sum")
cross_entropy_loss.default(LOGITS, CLASSES, f(5), 0, 3, 0.1)
    => F.cross_entropy(a, b, weight=c, reduction="none", ignore_index=3, label_smoothing=0.1)
nll_loss_nd.default(LOGITS, CLASSES) => F.nll_loss(a, b)
nll_loss_nd.default(LOGITS, CLASSES, None, 2) => F.nll_loss(a, b, reduction="sum")
binary_cross_entropy.default(f(4), f(4)) => F.binary_cross_entropy(a, b)
binary_cross_entropy_with_logits.default(RATES, RATES, None, RATES)
    => F.binary_cross_entropy_with_logits(a, b, pos_weight=c)
kl_div.default(X, Y, 2) => F.kl_div(a, b, reduction="sum")
kl_div.default(X, Y, 0, log_target=True) => F.kl_div(a, b, reduction="none", log_target=True)
hinge_embedding_loss.default(X, Y) => F.hinge_embedding_loss(a, b)
margin_ranking_loss.default(RATES, RATES, RATES) => F.margin_ranking_loss(a, b, c)
soft_margin_loss.default(X, Y) => F.soft_margin_loss(a, b)
mse_loss.default(X, Y, 2) => torch.ops.aten.mse_loss.default(a, b, reduction=2)
"""

IN_TRAINING = """
batch_norm.default(IMAGE, None, None, f(4), f(4), False, 0.2, 0.001, True)
    => F.batch_norm(a, b, c, momentum=0.2, eps=0.001)
scaled_dot_product_attention.default(HEADS, HEADS, HEADS, None, 0.1)
    => F.scaled_dot_product_attention(a, b, c, dropout_p=0.1 if self.training else 0.0)
dropout.default(X, 0.1, True) => F.dropout(a, 0.1, training=self.training)
feature_dropout.default(X, 0.1, True) => F.dropout1d(a, 0.1, training=self.training)
feature_dropout.default(IMAGE, 0.1, True) => F.dropout2d(a, 0.1, training=self.training)
feature_dropout.default(f(2, 3), 0.1, True)
    => torch.ops.aten.feature_dropout.default(a, 0.1, True)
"""

NOT_CAPTURED = """
to.dtype_layout(X, dtype=torch.int64) => torch.ops.aten.to.dtype_layout(a, dtype=torch.int64)
"""

FAMILIES = [
    *(
        Sample(f"{name}.{kind}", (X, other), f"a {symbol} {text}")
        for name, symbol in zip(words("eq ne lt le gt ge"), words("== != < <= > >="), strict=True)
        for kind, other, text in (("Tensor", Y, "b"), ("Scalar", 0.5, "0.5"))
    ),
    *(
        Sample(f"{name}.default", (X,), f"torch.{name}(a)")
        for name in words(
            """
            exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin
            cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma
            sigmoid ceil floor round trunc frac sign
            sgn logical_not isnan isinf isfinite nan_to_num deg2rad rad2deg angle conj_physical
        """
        )
    ),
    *(
        Sample(f"{name}.default", (X, Y), f"torch.{name}(a, b)")
        for name in words(
            """
            maximum minimum fmax fmin atan2 hypot polar complex logaddexp logaddexp2
            logical_and logical_or logical_xor heaviside nextafter isclose
        """
        )
    ),
    *(
        Sample(f"{name}.default", (X,), f"F.{name}(a)")
        for name in ["relu", "relu6", "gelu", "silu", "mish", "selu", "hardswish", "hardsigmoid"]
    ),
    *(
        Sample(f"{name}.default", ([X, Y],), f"torch.{name}([a, b])")
        for name in ["hstack", "vstack", "dstack", "column_stack", "concat", "concatenate"]
    ),
    *(
        Sample(
            f"{name}.default",
            ([2, 3],),
            f"torch.{name}(2, 3, dtype=torch.float32, device=self.place)",
            {"pin_memory": False},
        )
        for name in words("zeros ones rand randn")
    ),
    *(
        Sample(
            f"{name}.default",
            (X, 0.1, True),
            f"F.{name}(a, 0.1, training={flag})",
            training=training,
        )
        for name in ("alpha_dropout", "feature_alpha_dropout")
        for training, flag in ((True, "self.training"), (False, "True"))
    ),
    *(
        Sample(
            f"{name}.input",
            (f(3, 2, 4), f(1, 2, 5), [f(5, 4), f(5, 5)], False, 1, 0.0, False, False, False),
            f"torch.{name}(a, b, [c, d], False, 1, 0.0, self.training, False, False)",
        )
        for name in ("rnn_tanh", "rnn_relu")
    ),
]

SAMPLES = [
    *FAMILIES,
    *samples(ELEMENTWISE),
    *samples(REDUCTIONS),
    *samples(SHAPES),
    *samples(INDEXING),
    *samples(FACTORIES),
    *samples(CONTRACTIONS),
    *samples(CONVOLUTIONS),
    *samples(FUNCTIONAL),
    *samples(RESIZING),
    *samples(LOSSES),
    *samples(IN_TRAINING, training=True),
    *samples(NOT_CAPTURED, captured=False),
]
