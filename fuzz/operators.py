"""Rules of the grammar that bring operators: pointwise, views, writes in place, reductions."""

from __future__ import annotations

from fuzz.draft import Draft, Var
from fuzz.layers import divisors, need

POINTWISE = (
    "{x}.relu()", "{x}.sin()", "{x}.tanh()", "F.gelu({x})", "F.silu({x})", "{x}.clamp(-1, 1.5)",
    "{x}.abs().sqrt()", "{x}.abs().add(0.1).log()", "{x}.sigmoid()", "{x}.square()", "-{x}",
    "{x}.clamp(max=2).exp()", "{x}.sign() * {x}", "{x}.floor() + {x}", "1 / ({x}.abs() + 0.5)",
    "{x} ** 3", "F.softplus({x})", "F.leaky_relu({x}, 0.1)", "{x}.erf()", "{x} / 3", "2 - {x}",
    "torch.where({x} > 0, {x}, {x} * 0.1)", "{x}.masked_fill({x} < -1, -1.0)", "{x}.atan()",
    "{x}.remainder(1.7)", "torch.nan_to_num({x})", "F.hardswish({x})", "F.logsigmoid({x})",
    "{x}.float().to({x}.dtype)", "{x}.rsqrt().nan_to_num(0, 1, -1).clamp(-3, 3)", "{x}.round()",
    "F.gelu({x}, approximate='tanh')", "{x}.clone()", "{x} * torch.tensor(0.5)",
    "torch.zeros_like({x}) + {x}", "{x}.contiguous()", "{x}.expm1().clamp(max=3)",
)  # fmt: skip
PAIRED = (
    "{x} + {y}", "{x} * {y}", "{x} - 0.5 * {y}", "torch.maximum({x}, {y})",
    "torch.where({x} > {y}, {x}, {y} * 0.5)", "torch.atan2({x}, {y}.abs() + 1)",
    "torch.lerp({x}, {y}, 0.25)", "torch.addcmul({x}, {x}, {y}, value=0.3)",
    "torch.add({x}, {y}, alpha=2)", "{x} / ({y}.square() + 1)", "torch.hypot({x}, {y})",
    "F.cosine_similarity({x}, {y} + 0.1, dim=-1)", "torch.minimum({x}, {y})",
    "torch.rsub({x}, {y}, alpha=0.5)", "(x_ := {x} * 2) + x_ * {y}",
)  # fmt: skip


SIZED = (
    "{x} / {n}", "{x} * (2 if {n} < {least} else 1)", "{x} * (2 if {n} % 2 else 1)",
    "{x} * float(len({x}))", "{x} + torch.ones({n}, dtype={x}.dtype).sum()",
    "{x} + torch.zeros({n}, dtype={x}.dtype).{along}", "{x} - torch.tensor({n})",
    "{x} + 0.1 * torch.arange({n}).{along}", "{x} + 0.1 * torch.arange({n}).flip(0).{along}",
    "{x} * torch.linspace(0, 1, {n}, dtype={x}.dtype).{along}", "{x}[: {n}].view({x}.shape)",
    "{x} + {x}.new_full(({n},), 0.3).{along}.expand({x}.shape)", "{x} * {n} / (1 + {n})",
)  # fmt: skip


def pointwise(d: Draft, x: Var) -> None:
    """An elementwise operator of one tensor."""
    d.let(d.pick(POINTWISE).format(x=x.name), x.batched)


def sized(d: Draft, x: Var) -> None:
    """Something that is made from the number of rows, or chosen by it."""
    need(x.batched and x.tensor.is_floating_point())
    along = f"view(-1{', 1' * (x.tensor.dim() - 1)})"
    form = d.pick(SIZED).format(x=x.name, n=f"{x.name}.shape[0]", least=d.number(1, 8), along=along)
    d.let(form, True)


def paired(d: Draft, x: Var) -> None:
    """An elementwise operator of two tensors, perhaps the same one twice."""
    y = d.alike(x)
    need(y.batched == x.batched or x.batched)
    d.let(d.pick(PAIRED).format(x=x.name, y=y.name), x.batched)


def broadcast(d: Draft, x: Var) -> None:
    """Two tensors of other shapes that go together."""
    y = d.pick(d.tensors())
    need(x.tensor.dim() >= 1)
    if x.batched and y.batched and y.tensor.dim() != x.tensor.dim():
        extra = x.tensor.dim() - y.tensor.dim()
        need(extra > 0 and y.tensor.dim() >= 1)
        view = f"{y.name}[(slice(None), *[None] * {extra})]"
        d.let(f"{x.name} * {view}", True)
        return
    need(x.batched or not y.batched)
    made = d.let(f"{x.name} {d.pick(['+', '*', '-'])} {y.name}", x.batched)
    need(not x.batched or made.tensor.shape[0] == d.rows)
    if not y.batched and y.tensor.dim() == made.tensor.dim() and x.batched:
        need(y.shape[0] == 1)  # rows of something that is no batch


def view(d: Draft, x: Var) -> None:
    """A view, or a copy that is one in spirit."""
    a, b = d.dim(x), d.dim(x)
    size = x.shape[a]
    first = d.first_dim(x)
    dims = list(range(first, x.tensor.dim()))
    d.chance.shuffle(dims)
    order = [*range(first), *dims]
    part = d.pick(divisors(size)) if size else 1
    low = d.number(0, max(size - 1, 0))
    forms = [
        f".transpose({a}, {b})", f".permute({order})", f".unflatten({a}, ({part}, -1))",
        f".flatten({first})", f".narrow({a}, {low}, {d.number(0 if d.maybe(.1) else 1, max(size - low, 1))})",
        f".select({a}, {low})", f".unsqueeze({d.number(first, x.tensor.dim())})", f".squeeze({a})",
        f".roll({d.number(-2, 3)}, {a})", f".flip({a})", f".movedim({a}, {b})", ".mT",
        f".chunk({d.pick([2, 3])}, {a})[{d.pick([0, -1])}]", f".unbind({a})[0]",
        f".split({d.number(1, max(size, 1))}, {a})[-1]", f".repeat_interleave(2, {a})",
        f".diagonal(dim1={a}, dim2={b})", f".unfold({a}, 2, 1)", ".tril()", ".triu(1)",
        f".unsqueeze({x.tensor.dim()}).expand({[-1] * x.tensor.dim() + [3]})",
        f".reshape({list(x.shape[:first]) + [-1]})", f".swapaxes({a}, {b}).contiguous()",
        f".rot90(1, ({a}, {b}))", f".index_select({a}, torch.tensor([0, {low}, 0]))",
    ]  # fmt: skip
    if first:
        keep = ", ".join(":" for _ in range(first))
        forms += [f"[{keep}, ::2]", f"[{keep}, 1:]", f"[{keep}, -1]", f"[{keep}, ..., ::3]",
                  f"[{keep}, None]", f"[{keep}, [0, 0]]"]  # fmt: skip
    else:
        forms += ["[::2]", "[1:]", "[-1]", "[..., ::2]", "[[0, -1]]"]
        d.mixed(x, 0)
    d.let(f"{x.name}{d.pick(forms)}", x.batched)


def joined(d: Draft, x: Var) -> None:
    """Concatenation, stacking, padding, several parts of one."""
    y = d.alike(x)
    a = d.dim(x)
    d.mixed(x, a)
    form = d.number(0, 4)
    if form == 0:
        d.let(f"torch.cat([{x.name}, {y.name}], {a})", x.batched)
    elif form == 1:
        need(y.batched == x.batched)
        at = d.number(1 if x.batched else 0, x.tensor.dim())
        d.let(f"torch.stack([{x.name}, {y.name}], {at})", x.batched)
    elif form == 2:
        d.let(f"F.pad({x.name}, ({d.number(-1, 2)}, {d.number(0, 2)}), value=0.5)", x.batched)
    elif form == 3:
        p, q = d.fresh("v"), d.fresh("v")
        need(x.shape[a] % 2 == 0 and x.shape[a])
        d.do(f"{p}, {q} = {x.name}.chunk(2, {a})")
        d.let(f"torch.cat([-{q}, {p}], {a})", x.batched)
    else:
        p, q = d.fresh("v"), d.fresh("v")
        need(x.shape[a] >= 2)
        d.do(f"{p}, {q} = {x.name}.split([1, {x.shape[a] - 1}], {a})")
        d.let(f"{p} * {q}", x.batched)


def written(d: Draft, x: Var) -> None:
    """A copy that is then written in place, whole, in part, or through a view of it."""
    y = d.let(d.pick(["{}.clone()", "{} * 1.5", "{} + 0", "torch.zeros_like({})"]).format(x.name),
              x.batched)  # fmt: skip
    n, z = y.name, d.alike(x).name
    keep = ":, " * d.first_dim(x)
    if not d.first_dim(x):
        d.mixed(x, 0)
    last = x.shape[-1] if x.tensor.dim() else 0
    lines = [
        f"{n}.add_({z})", f"{n}.mul_(0.5)", f"{n} += {z}", f"{n}[{keep}0] = 0.25",
        f"{n}[{keep}..., :1].copy_({z}[{keep}..., :1])", f"{n}.masked_fill_({z} > 0.3, 0.1)",
        f"{n}[{keep}..., ::2] *= 2", f"{n}.clamp_(-0.5, 0.9)", f"{n}.transpose(-1, -2).add_(0.3)",
        f"{n}.copy_({z}.sin())", f"{n}[{keep}..., -1] = {z}[{keep}..., 0]", f"{n}.tanh_()",
        f"{n}.select(-1, 0).zero_()", f"{n}.narrow(-1, 0, 1).fill_(2.0)",
        f"{n}.index_fill_(-1, torch.tensor([0]), 0.7)", f"F.relu({n}, inplace=True)",
        f"{n}.index_add_(-1, torch.tensor([0, 0]), {z}[..., [0, {max(last - 1, 0)}]])",
        f"{n}.scatter_(-1, torch.zeros({list(x.shape[:-1]) + [1]}, dtype=torch.long), 0.4)",
        f"{n}.diagonal(dim1=-2, dim2=-1).mul_(3)", f"{n}[{keep}..., [0]] = {z}[{keep}..., [0]] * 2",
        f"{n}.addcmul_({z}, {z}, value=0.1)", f"{n}.flatten()[0:1].add_(0)", f"{n}[...] = {z}",
        f"{n}.unsqueeze(0).squeeze(0).sub_(0.2)", f"{n}[{n} > 0.5] = 0.5",
        f"torch.add({z}, 1, out={n})", f"{n}.detach().mul_(1.1)",
        f"{n}.index_put_((torch.arange({x.shape[0] if x.tensor.dim() else 0}),), {z}, accumulate=True)",
    ]  # fmt: skip
    for _ in range(d.number(1, 2)):
        d.do(d.pick(lines))
    if d.maybe(0.3):
        view = d.let(f"{n}.transpose(-1, -2)" if d.maybe() else f"{n}[..., 1:]", False)
        d.variables.remove(view)
        d.do(f"{view.name}.mul_(0.7)")
        d.let(f"{n} + {z}", x.batched)


def reduction(d: Draft, x: Var) -> None:
    """A reduction, a scan, or what sorts."""
    a = d.dim(x)
    d.mixed(x, a)
    keep = f", keepdim={d.maybe()}"
    forms = [
        f".sum({a}{keep})", f".mean({a}{keep})", f".amax({a}{keep})", f".logsumexp({a}{keep})",
        f".max({a}{keep})[0]", f".min({a}{keep}).values", f".var({a}{keep})", f".norm(dim={a}{keep})",
        f".std({a}, correction=0{keep})", f".prod({a}{keep})", f".cumsum({a})", f".softmax({a})",
        f".log_softmax({a})", f".cumprod({a})", f".logcumsumexp({a})", f".cummax({a})[0]",
        f".topk(1, {a})[0]", f".sort({a}, descending=True)[0]", f".median({a}{keep})[0]",
        f".flip({a}).cumsum({a}).flip({a})", f".diff(dim={a})", f".cummin({a}).values",
        f".var_mean({a}{keep})[1]", f".aminmax(dim={a}{keep})[1]", f".kthvalue(1, {a}{keep})[0]",
    ]  # fmt: skip
    form = d.pick(forms)
    text = (
        f"torch.var_mean({x.name}, {form[10:]}" if form.startswith(".var_mean(") else x.name + form
    )
    d.let(text, x.batched)


def whole_reduction(d: Draft, x: Var) -> None:
    """A number for all of a tensor, the batch included."""
    need(not d.rowwise or not x.batched)
    d.mixed(x, 0)
    d.let(x.name + d.pick([".sum()", ".mean()", ".max()", ".norm()", ".std()"]), False)


def chosen(d: Draft, x: Var) -> None:
    """Indices from the contents, and what they choose."""
    a = d.dim(x)
    d.mixed(x, a)
    form = d.number(0, 8)
    if form == 0:
        d.let(f"{x.name}.argmax({a})", x.batched)
    elif form == 1:
        i = d.let(f"{x.name}.argsort({a})", x.batched)
        d.let(f"{x.name}.gather({a}, {i.name})", x.batched)
    elif form == 2:
        values, places = d.fresh("v"), d.fresh("v")
        count = d.number(1, max(1, min(2, x.shape[a])))
        d.do(f"{values}, {places} = {x.name}.topk({count}, {a})")
        d.let(f"torch.zeros_like({x.name}).scatter({a}, {places}, {values})", x.batched)
    elif form == 3:
        d.let(f"torch.take_along_dim({x.name}, {x.name}.argmax({a}, keepdim=True), {a})", x.batched)
    elif form == 4:
        d.let(f"F.one_hot({x.name}.argmax(-1), {x.shape[-1]}).to({x.name}.dtype)", x.batched)
    elif form == 5:
        d.let(f"{x.name} > {d.pick(['0', '0.2', f'{x.name}.mean(-1, keepdim=True)'])}", x.batched)
    elif form == 6:
        d.let(f"torch.bucketize({x.name}, torch.tensor([-1.0, 0.0, 1.0]))", x.batched)
    elif form == 7:
        d.let(f"{x.name}.clamp(0, 5).long()", x.batched)
    else:
        d.let(f"({x.name} * 10).to(torch.{d.pick(['int32', 'int64', 'uint8', 'int16', 'float16', 'bfloat16'])})", x.batched)  # fmt: skip


def integers(d: Draft, x: Var) -> None:
    """Something with integers or truth values, back to floats mostly."""
    i = d.pick(d.tensors(lambda v: not v.is_float and not v.tensor.is_complex()))
    forms = ["({i} > 0)", "{i} % 3", "{i} == 1", "{i} + 1", "{i}.clamp(max=2)", "{i}.long() * 2",
             "{i} != 0", "{i}.bool().logical_not()", "{i}.to(torch.uint8)", "{i}.long().cumsum(-1)",
             "{i} // 2", "{i} & 1", "{i}.bool().any(-1)", "{i}.bool().all(-1, keepdim=True)"]  # fmt: skip
    made = i
    if d.maybe(0.5):
        made = d.let(d.pick(forms).format(i=i.name), i.batched)
    if d.maybe(0.7):
        made = d.let(f"{made.name}.to({d.dtype!s})", i.batched)
        if made.tensor.dim() and made.shape[-1] <= 12 and made.tensor.dim() >= 2:
            d.let(f"{made.name} * {d.parameter(made.shape[-1:])}", i.batched)
    elif made.shape == x.shape and x.batched == made.batched:
        d.let(f"torch.where({made.name}.bool(), {x.name}, 0.0)", x.batched)


def product(d: Draft, x: Var) -> None:
    """Products of activations."""
    y = d.alike(x)
    need(y.batched == x.batched and x.batched)
    x_, y_ = x.name, y.name
    if x.tensor.dim() == 2:
        forms = [f"torch.einsum('bi,bj->bij', {x_}, {y_})", f"torch.einsum('bi,bi->b', {x_}, {y_})",
                 f"({x_}.unsqueeze(-1) @ {y_}.unsqueeze(1)).flatten(1)"]  # fmt: skip
    elif x.tensor.dim() == 3:
        forms = [f"torch.bmm({x_}, {y_}.transpose(1, 2))", f"torch.einsum('bij,bkj->bik', {x_}, {y_})",
                 f"torch.einsum('bij,bij->bj', {x_}, {y_})", f"{x_}.mT @ {y_}",
                 f"torch.baddbmm({x_}, {x_} @ {x_}.mT, {y_}, beta=0.5)"]  # fmt: skip
    else:
        forms = [f"{x_} @ {y_}.transpose(-1, -2)", f"torch.einsum('b...i,b...i->b...', {x_}, {y_})"]
    d.let(f"{d.pick(forms)} * 0.3", True)


def constant(d: Draft, x: Var) -> None:
    """A tensor that is made in the forward, or depends on weights alone."""
    width = x.shape[-1] if x.tensor.dim() else 3
    forms = [f"torch.arange({width}, dtype={d.dtype})", f"torch.ones({width}, dtype={d.dtype})",
             f"torch.linspace(0, 1, {width}).to({d.dtype})", f"torch.full((), 0.5, dtype={d.dtype})",
             f"torch.eye({width}, dtype={d.dtype})", f"torch.empty({width}, 0, dtype={d.dtype})"]  # fmt: skip
    if d.linears:
        forms += [f"{d.pick(d.linears)[0]}.weight.square().mean(-1)"] * 2
    made = d.let(d.pick(forms), False)
    if x.tensor.dim() and made.tensor.dim() == 1:
        d.let(f"{x.name} + {made.name} * 0.1", x.batched)


def complex_numbers(d: Draft, x: Var) -> None:
    """A turn in the complex plane, or a Fourier transform."""
    need(x.tensor.dim() >= 2 and x.shape[-1] % 2 == 0 and x.shape[-1])
    half = x.shape[-1] // 2
    forms = [f"torch.view_as_real(torch.view_as_complex({x.name}.unflatten(-1, ({half}, 2)).contiguous()) "
             f"* torch.polar(torch.ones({half}, dtype={d.dtype}), torch.arange({half}, dtype={d.dtype}))).flatten(-2)",
             f"torch.fft.rfft({x.name}, dim=-1).abs()", f"torch.fft.fft({x.name}, dim=-1).real"]  # fmt: skip
    d.let(d.pick(forms), x.batched)


def write_of_an_input(d: Draft, x: Var) -> None:
    """A write that the caller of the model sees."""
    source = d.variables[0]
    need(source.is_float)
    d.do(f"{source.name}.mul_(0.9)")


OPERATORS = {
    pointwise: 8, sized: 2, paired: 5, broadcast: 4, view: 9, joined: 4, written: 7, reduction: 6,
    whole_reduction: 2, chosen: 4, integers: 3, product: 4, constant: 2, complex_numbers: 0.7,
    write_of_an_input: 0.2,
}  # fmt: skip
"""Rules and their weights."""
