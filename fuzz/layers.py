"""Rules of the grammar that bring layers: modules, parameters, buffers, what owns state."""

from __future__ import annotations

from fuzz.draft import Draft, UnfitError, Var

ACTIVATIONS = ("ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "ELU", "Softplus", "Mish", "Hardtanh")


def need(condition: object) -> None:
    """Leave the rule where it does not apply."""
    if not condition:
        raise UnfitError


def divisors(number: int) -> list[int]:
    """The numbers that divide it."""
    return [n for n in range(1, number + 1) if number % n == 0]


def linear(d: Draft, x: Var) -> None:
    """A linear layer, new, used again, or with the weight of another."""
    need(x.tensor.dim() >= (2 if x.batched else 1))
    width = x.shape[-1]
    again = [name for name, inside, _ in d.linears if inside == width]
    if again and d.maybe(0.25):
        d.let(f"{d.pick(again)}({x.name})", x.batched)
        return
    tied = [(name, inside) for name, inside, outside in d.linears if outside == width]
    if tied and d.maybe(0.2):
        name, _ = d.pick(tied)
        d.let(f"F.linear({x.name}, {name}.weight.T)", x.batched)
        return
    out = d.width()
    bias = "" if d.maybe(0.7) else ", bias=False"
    name = d.stored(f"nn.Linear({width}, {out}{bias})")
    same = [n for n, i, o in d.linears if (i, o) == (width, out)]
    if same and d.maybe(0.5):
        d.initialize(f"{name}.weight = {d.pick(same)}.weight")
    if d.maybe(0.12):
        d.initialize(f"{name}{d.pick(['', '.weight'])}.requires_grad_(False)")
    d.linears.append((name, width, out))
    d.let(f"{name}({x.name})", x.batched)


def raw_product(d: Draft, x: Var) -> None:
    """A product with a parameter of its own."""
    need(x.tensor.dim() >= (2 if x.batched else 1))
    width, out = x.shape[-1], d.width()
    form = d.pick(["{x} @ {p}", "torch.einsum('...i,io->...o', {x}, {p})", "F.linear({x}, {p}.T)",
                   "torch.matmul({x}, {p}).tanh()", "({p}.T @ {x}.unsqueeze(-1)).squeeze(-1)"])  # fmt: skip
    d.let(form.format(x=x.name, p=d.parameter((width, out))), x.batched)


def parameter(d: Draft, x: Var) -> None:
    """Elementwise with a parameter, broadcast."""
    need(x.tensor.dim() >= 1)
    shape = list(x.shape[d.number(1 if x.batched else 0, x.tensor.dim()) :])
    shape = [1 if d.maybe(0.2) else size for size in shape]
    form = d.pick(["{x} * {p}", "{x} + {p}", "{p} - {x}", "torch.lerp({x}, {p}, 0.3)",
                   "torch.addcmul({x}, {x}, {p}, value=0.5)", "torch.maximum({x}, {p})",
                   "{x} / (1 + {p}.exp())", "torch.where({x} > {p}, {x}, {p})"])  # fmt: skip
    d.let(form.format(x=x.name, p=d.parameter(shape)), x.batched)


def norm(d: Draft, x: Var) -> None:
    """Layer, root mean square, group, instance norms."""
    need(x.tensor.dim() >= 2)
    width = x.shape[-1]
    forms = [f"nn.LayerNorm({width})", f"nn.LayerNorm({width}, elementwise_affine=False)",
             f"nn.RMSNorm({width}, eps=1e-6)", f"nn.LayerNorm({width}, bias=False)"]  # fmt: skip
    if x.tensor.dim() >= 3:
        forms.append(f"nn.LayerNorm({list(x.shape[-2:])})")
    if x.batched:
        rest = x.tensor[0, 0].numel()
        groups = d.pick([n for n in divisors(x.shape[1]) if x.shape[1] // n * rest > 1])
        forms += [f"nn.GroupNorm({groups}, {x.shape[1]})"] * 2
        if x.tensor.dim() in (3, 4) and x.tensor[0, 0].numel() > 1:
            affine = d.maybe()
            kind = x.tensor.dim() - 2
            forms += [f"nn.InstanceNorm{kind}d({x.shape[1]}, affine={affine})"] * 2
    d.let(f"{d.stored(d.pick(forms))}({x.name})", x.batched)


def batch_norm(d: Draft, x: Var) -> None:
    """Batch norm in any number of dimensions."""
    need(x.batched and not d.rowwise and x.tensor.dim() in (2, 3, 4))
    kind = max(x.tensor.dim() - 2, 1)
    options = d.pick(["", ", affine=False", ", momentum=0.3", ", track_running_stats=False"])
    d.mixes, d.writes = True, True
    d.let(f"{d.stored(f'nn.BatchNorm{kind}d({x.shape[1]}{options})')}({x.name})", True)


def convolution(d: Draft, x: Var) -> None:
    """Convolutions of one and two dimensions, transposed ones too."""
    need(x.batched and x.tensor.dim() in (3, 4))
    kind, channels = x.tensor.dim() - 2, x.shape[1]
    kernel, out = d.number(1, 3), d.pick([2, 3, 4, 6])
    groups = d.pick([n for n in divisors(channels) if out % n == 0]) if d.maybe(0.3) else 1
    options = [f"padding={d.number(0, kernel - 1)}", f"stride={d.pick([1, 1, 2])}"]
    options += [f"groups={groups}"] if groups > 1 else []
    options += ["dilation=2"] if d.maybe(0.15) else []
    options += ["bias=False"] if d.maybe(0.3) else []
    options += ['padding_mode="circular"'] if d.maybe(0.08) else []
    transposed = "Transpose" if d.maybe(0.2) and len(options) < 4 else ""
    made = f"nn.Conv{transposed}{kind}d({channels}, {out}, {kernel}, {', '.join(options)})"
    d.let(f"{d.stored(made)}({x.name})", True)


def pooling(d: Draft, x: Var) -> None:
    """Pooling and resampling of images and sequences."""
    need(x.batched and x.tensor.dim() in (3, 4))
    kind = x.tensor.dim() - 2
    forms = [f"F.max_pool{kind}d({{x}}, 2)", f"F.avg_pool{kind}d({{x}}, 2)",
             f"F.adaptive_avg_pool{kind}d({{x}}, {d.pick([1, 2])})",
             f"F.adaptive_max_pool{kind}d({{x}}, 2)",
             f"F.max_pool{kind}d({{x}}, 3, stride=1, padding=1)",
             f"F.avg_pool{kind}d({{x}}, 3, stride=2, padding=1, count_include_pad=False)",
             'F.interpolate({x}, scale_factor=2, mode="nearest")',
             f"F.pad({{x}}, (1, {d.number(0, 2)}))", 'F.pad({x}, (1, 1), mode="replicate")']  # fmt: skip
    if kind == 2:
        forms += ['F.interpolate({x}, size=(3, 5), mode="bilinear", align_corners=False)',
                  "F.unfold({x}, 2)", "F.pixel_shuffle(F.pad({x}, (0, 0, 0, 0)), 2)",
                  "F.pixel_unshuffle({x}, 2)"]  # fmt: skip
    d.let(d.pick(forms).format(x=x.name), True)


def attention(d: Draft, x: Var) -> None:
    """Attention: torch's layers, or written by hand, causal, masked, grouped."""
    need(x.batched and x.tensor.dim() == 3)
    width = x.shape[-1]
    heads = d.pick([h for h in divisors(width) if h <= 4])
    form = d.number(0, 4)
    if form == 0:
        m = d.stored(f"nn.MultiheadAttention({width}, {heads}, batch_first=True)")
        d.let(f"{m}({x.name}, {x.name}, {x.name}, need_weights=False)[0]", True)
    elif form == 1:
        first = d.pick(["", ", norm_first=True"])
        m = d.stored(f"nn.TransformerEncoderLayer({width}, {heads}, {d.width()}, dropout=0.0, "
                     f"batch_first=True{first})")  # fmt: skip
        d.let(f"{m}({x.name})", True)
    elif form == 2:
        m = d.stored(f"nn.Linear({width}, {3 * width})")
        q, k, v = (d.fresh("v") for _ in range(3))
        d.do(f"{q}, {k}, {v} = {m}({x.name}).unflatten(-1, (3, {heads}, -1))"
             ".permute(2, 0, 3, 1, 4)")  # fmt: skip
        causal = d.maybe()
        d.let(f"F.scaled_dot_product_attention({q}, {k}, {v}, is_causal={causal})"
              ".transpose(1, 2).flatten(2)", True)  # fmt: skip
    elif form == 3:
        groups = d.pick(divisors(heads))
        size = width // heads
        names = [d.stored(f"nn.Linear({width}, {n * size}, bias=False)")
                 for n in (heads, groups, groups)]  # fmt: skip
        q, k, v = (d.fresh("v") for _ in range(3))
        for name, m in zip((q, k, v), names, strict=True):
            d.do(f"{name} = {m}({x.name}).unflatten(-1, (-1, {size})).transpose(1, 2)")
        d.let(f"F.scaled_dot_product_attention({q}, {k}, {v}, enable_gqa=True)"
              ".transpose(1, 2).reshape({}.shape)".format(x.name), True)  # fmt: skip
    else:
        scores = d.fresh("v")
        d.do(f"{scores} = {x.name} @ {x.name}.transpose(-1, -2) / {width**0.5:.3f}")
        if d.maybe():
            length = x.shape[1]
            d.do(f"{scores} = {scores}.masked_fill(torch.ones({length}, {length}, "
                 f"dtype=torch.bool).triu(1), -torch.inf)")  # fmt: skip
        d.let(f"{scores}.softmax(-1) @ {x.name}", True)


def mlp(d: Draft, x: Var) -> None:
    """A feed-forward layer, gated or not, with a residual or not."""
    need(x.tensor.dim() >= (2 if x.batched else 1))
    width, inside = x.shape[-1], d.width()
    if d.maybe(0.35):
        gate, up, down = (d.stored(f"nn.Linear({a}, {b}, bias=False)")
                          for a, b in ((width, inside), (width, inside), (inside, width)))  # fmt: skip
        made = f"{down}(F.silu({gate}({x.name})) * {up}({x.name}))"
    elif d.maybe(0.3) and width % 2 == 0:
        made = f"{d.stored(f'nn.Linear({width // 2}, {width})')}(F.glu({x.name}))"
    else:
        act = d.pick(ACTIVATIONS)
        m = d.stored(f"nn.Sequential(nn.Linear({width}, {inside}), nn.{act}(), "
                     f"nn.Linear({inside}, {width}))")  # fmt: skip
        made = f"{m}({x.name})"
    d.let(f"{x.name} + {made}" if d.maybe() else made, x.batched)


def repeated_blocks(d: Draft, x: Var) -> None:
    """Equal layers in a loop."""
    need(x.tensor.dim() >= 2)
    width, count = x.shape[-1], d.number(2, 3)
    m = d.stored(f"nn.ModuleList(nn.Sequential(nn.LayerNorm({width}), nn.Linear({width}, {width}), "
                 f"nn.Tanh()) for _ in range({count}))")  # fmt: skip
    name = d.fresh("v")
    d.do(f"{name} = {x.name}", f"for block in {m}:", f"    {name} = {name} + block({name})")
    d.keep(name, x.batched)


def recurrence(d: Draft, x: Var) -> None:
    """LSTM, GRU and RNN, and their cells."""
    need(x.batched and x.tensor.dim() in (2, 3))
    kind, width, out = d.pick(["LSTM", "GRU", "RNN"]), x.shape[-1], d.pick([2, 3, 4])
    if x.tensor.dim() == 2:
        made = f"{d.stored(f'nn.{kind}Cell({width}, {out})')}({x.name})"
        d.let(made + ("[0]" if kind == "LSTM" else ""), True)
        return
    options = ", bidirectional=True" if d.maybe(0.2) else ""
    options += ", num_layers=2" if d.maybe(0.2) else ""
    if d.maybe(0.65):
        m = d.stored(f"nn.{kind}({width}, {out}, batch_first=True{options})")
        d.let(f"{m}({x.name})[0]", True)
    else:
        m = d.stored(f"nn.{kind}({width}, {out}{options})")
        y, h = d.fresh("v"), d.fresh("v")
        d.do(f"{y}, {h} = {m}({x.name}.transpose(0, 1))")
        part = f"{h}[0][-1]" if kind == "LSTM" else f"{h}[-1]"
        d.let(d.pick([f"{y}.transpose(0, 1)", f"{y}[-1]", part]), True)


def embedding(d: Draft, x: Var) -> None:
    """A table looked up by integers, tied to a head now and then."""
    ids = d.pick(d.tensors(lambda v: not v.is_float and v.tensor.dtype is d.names["torch"].int64))
    need(int(ids.tensor.min()) >= 0 and int(ids.tensor.max()) < 12 if ids.tensor.numel() else True)
    width = d.pick([4, 6, 8])
    extra = ", padding_idx=1" if d.maybe(0.2) else ""
    m = d.stored(f"nn.Embedding(12, {width}{extra})")
    made = d.let(f"{m}({ids.name})", ids.batched)
    if d.maybe(0.35):
        if d.maybe():
            d.let(f"F.linear({made.name}.tanh(), {m}.weight)", ids.batched)
        else:
            head = d.stored(f"nn.Linear({width}, 12, bias=False)")
            d.initialize(f"{head}.weight = {m}.weight")
            d.let(f"{head}({made.name}.tanh())", ids.batched)


def other_layer(d: Draft, x: Var) -> None:
    """Layers that are seldom used."""
    need(x.tensor.dim() >= 2)
    width = x.shape[-1]
    forms = [f"nn.utils.parametrizations.weight_norm(nn.Linear({width}, 4))",
             "nn.PReLU()", f"nn.Linear({width}, {width}).requires_grad_(False)",
             f"nn.Sequential(nn.Identity(), nn.Linear({width}, 3), nn.Softmax(-1))",
             f"nn.utils.parametrizations.orthogonal(nn.Linear({width}, {width}))"]  # fmt: skip
    if x.tensor.dim() == 2:
        forms.append(f"nn.Bilinear({width}, {width}, 3)")
    form = d.pick(forms)
    m = d.stored(form)
    second = f", {x.name}" if "Bilinear" in form else ""
    d.let(f"{m}({x.name}{second})", x.batched)


def spectral(d: Draft, x: Var) -> None:
    """A spectral norm, which writes its vectors in training."""
    need(x.tensor.dim() >= 2)
    m = d.stored(f"nn.utils.parametrizations.spectral_norm(nn.Linear({x.shape[-1]}, 4))")
    d.writes = True
    d.let(f"{m}({x.name})", x.batched)


def dropout(d: Draft, x: Var) -> None:
    """Dropout, as a layer or a function."""
    p = d.pick([0.0, 0.3])
    d.dropout = d.dropout or p > 0
    form = d.pick([f"F.dropout({x.name}, {p}, self.training)",
                   f"{d.stored(f'nn.Dropout({p})')}({x.name})"])  # fmt: skip
    d.let(form, x.batched)


def buffer(d: Draft, x: Var) -> None:
    """A buffer that is read, counted up, averaged into, or only written."""
    form = d.number(0, 5)
    if form <= 1:
        size = list(x.shape[-1:])
        d.let(f"{x.name} * {d.buffer(f'torch.rand({size}) + 0.5')}", x.batched)
    elif form == 2:
        name = d.buffer(d.pick(["torch.zeros(())", "torch.zeros((), dtype=torch.long)"]))
        d.writes = True
        d.do(d.pick([f"{name} += 1", f"{name}.add_(1)", f"{name} = {name} + 1"]))
        if d.maybe():
            d.let(f"{x.name} / {name}.clamp(min=1)", x.batched)
    else:
        need(not d.rowwise and x.tensor.dim() >= 1)
        d.mixes, d.writes = True, True
        statistic = f"{x.name}.detach().mean(0)"
        name = d.buffer(f"torch.zeros({list(x.shape[1:])})")
        if form == 3:
            d.do(f"{name}.mul_(0.9).add_({statistic}, alpha=0.1)")
            d.let(f"{x.name} - {name}", x.batched)
        elif form == 4:
            d.do(f"{name}.copy_({statistic})")
        else:
            d.do("with torch.no_grad():", f"    {name}.lerp_({statistic}, 0.2)")
            d.let(f"{x.name} * (1 + {name}.abs())", x.batched)


def custom_function(d: Draft, x: Var) -> None:
    """An autograd function with a backward of its own."""
    form = d.number(0, 3)
    if form == 0:
        d.let(f"RoundThrough.apply({x.name} * 3)", x.batched)
    elif form == 1:
        d.let(f"Reverse.apply({x.name}, {d.pick([0.5, 2.0])})", x.batched)
    elif form == 2:
        d.let(f"Cube.apply({x.name})", x.batched)
    else:
        y = d.alike(x)
        a, b = d.fresh("v"), d.fresh("v")
        d.do(f"{a}, {b} = Blend.apply({x.name}, {y.name}.sin())")
        d.keep(a, x.batched)
        d.keep(b, x.batched)


def autocast(d: Draft, x: Var) -> None:
    """A region in bfloat16."""
    torch = d.names["torch"]
    need(d.dtype is torch.float32 and x.tensor.dim() >= 2 and x.tensor.dtype is torch.float32)
    width = x.shape[-1]
    m = d.stored(f"nn.Linear({width}, {width})")
    name = d.fresh("v")
    lines = [f"    {name} = {m}({x.name})"]
    if d.maybe():
        lines.append(f"    {name} = {name}.softmax(-1) @ {name}.transpose(-1, -2)")
        d.mixed(x, 0 if x.tensor.dim() == 2 else 1)
    d.autocast = True
    d.do('with torch.autocast("cpu", dtype=torch.bfloat16):', *lines)
    d.let(f"{name}.float()" if d.maybe(0.7) else f"{name}.float() + {x.name}.mean(-1, True)",
          x.batched)  # fmt: skip


def without_gradient(d: Draft, x: Var) -> None:
    """A part that is computed without gradients, or again in the backward."""
    width = x.shape[-1] if x.tensor.dim() else 0
    form = d.number(0, 3)
    name = d.fresh("v")
    if form == 0:
        d.do("with torch.no_grad():", f"    {name} = {x.name}.abs().amax(-1, keepdim=True) + 1")
        d.let(f"{x.name} / {name}", x.batched)
    elif form == 1:
        d.let(f"{x.name}.detach() * {x.name}", x.batched)
    elif form == 2:
        need(x.tensor.dim() >= 2)
        m = d.stored(f"nn.Sequential(nn.Linear({width}, {width}), nn.GELU())")
        d.let(f"torch.utils.checkpoint.checkpoint({m}, {x.name}, use_reentrant=False)", x.batched)
    else:
        need(d.linears)
        target = d.pick(d.linears)
        need(target[1] == width)
        d.writes = True
        d.do("with torch.no_grad():", f"    {target[0]}.weight.clamp_(-0.4, 0.4)")
        d.let(f"{target[0]}({x.name})", x.batched)


LAYERS = {
    linear: 6, raw_product: 2, parameter: 3, norm: 4, batch_norm: 3, convolution: 4, pooling: 2,
    attention: 4, mlp: 4, repeated_blocks: 2, recurrence: 2, embedding: 3, other_layer: 1,
    spectral: 0.4, dropout: 1, buffer: 2, custom_function: 1.5, autocast: 4, without_gradient: 1.5,
}  # fmt: skip
"""Rules and their weights."""
