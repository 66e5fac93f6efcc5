"""Draws a program as the text of a Python module: a model, its arguments, a training step.

The module has ``build()``, which makes the model; ``arguments(seed)``, a call of it; ``train()``,
a model with its optimizer and step; ``batch(seed)``, the arguments of a step; and ``FACTS``.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

from fuzz.draft import BATCHES, HELPERS, Draft, UnfitError, Var
from fuzz.layers import LAYERS
from fuzz.operators import OPERATORS

RULES = {**LAYERS, **OPERATORS}
OPTIMIZERS = (
    "torch.optim.SGD({p}, lr=0.05)", "torch.optim.SGD({p}, lr=0.05, momentum=0.9)",
    "torch.optim.SGD({p}, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "torch.optim.SGD({p}, lr=0.02, momentum=0.5, weight_decay=0.05)",
    "torch.optim.SGD({p}, lr=0.05, weight_decay=0.1, maximize=False, foreach=True)",
    "torch.optim.Adam({p}, lr=0.01)", "torch.optim.Adam({p}, lr=0.01, weight_decay=0.02)",
    "torch.optim.Adam({p}, lr=0.01, amsgrad=True, betas=(0.8, 0.9))",
    "torch.optim.AdamW({p}, lr=0.01)", "torch.optim.AdamW({p}, lr=0.01, eps=1e-6, fused=True)",
    "torch.optim.AdamW({p}, lr=0.01, weight_decay=0.1, foreach=True)",
)  # fmt: skip
SCHEDULERS = ("StepLR(optimizer, 2, 0.5)", "CosineAnnealingLR(optimizer, 10)",
              "LinearLR(optimizer, 0.1, total_iters=4)",
              "ExponentialLR(optimizer, 0.9)")  # fmt: skip
TERMS = ("{o}.square().mean()", "{o}.square().mean()", "{o}.sin().mean()", "{o}.sum() * 0.1",
         "{o}.abs().mean() * 2", "F.mse_loss({o}, torch.ones_like({o}))",
         "F.smooth_l1_loss({o}, torch.zeros_like({o}))",
         "{o}.square().sum() / {o}.shape[0]")  # fmt: skip
TEMPLATE = '''"""Program {seed}."""

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

FACTS = {facts}

{helpers}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
{init}

    def forward(self, {parameters}):
{body}


def build():
    torch.manual_seed({seed})
    return Model().to({dtype})


def drawn(seed):
    torch.manual_seed(seed)
    return {tensors}


def arguments(seed):
    t = drawn(seed)
    return {arguments}, {keywords}


{train}'''
TRAIN = """def batch(seed):
    args, kwargs = arguments(seed)
    return {batch}


def train():
    model = build().train()
{optimizer}

    def step({parameters}):
{step}

    return model, optimizer, step
"""


@dataclass(frozen=True)
class Program:
    """A program's text and what is known of it."""

    seed: int
    text: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class _Inputs:
    """How a program takes its tensors."""

    tensors: list[str]  # the expression of each
    parameters: str  # of forward
    opening: list[str]  # statements that name the tensors x0, x1, ...
    arguments: str
    keywords: str
    batched: list[bool]


def draw(seed: int) -> Program:
    """The program of a seed; the same one in every process."""
    for attempt in range(100):
        try:
            with torch.random.fork_rng():
                return _draw(seed, random.Random(f"{seed}/{attempt}"))
        except UnfitError:
            continue
    raise AssertionError(f"no program for seed {seed}")


def _draw(seed: int, chance: random.Random) -> Program:
    torch.manual_seed(seed)
    dtype = chance.choices([torch.float64, torch.float32], [3, 1])[0]
    d = Draft(chance, chance.random() < 0.7, dtype, chance.choice(BATCHES))
    inputs = _inputs(d)
    d.names["t"] = eval(_list(inputs.tensors), d.names)
    d.names["args"], d.names["kwargs"] = eval(f"{inputs.arguments}, {inputs.keywords}", d.names)
    _bind(d, inputs)
    rules, weights = list(RULES), list(RULES.values())
    wanted, tries = d.number(2, 9), 0
    while wanted and tries < 200:
        tries += 1
        (rule,) = chance.choices(rules, weights)
        usable = d.tensors(lambda v: v.is_float and v.tensor.numel() > 0)
        x = d.pick(usable[-1:] if d.maybe() else usable)
        wanted -= d.attempt(rule, x)
    parts, result = _outputs(d)
    d.body.append(f"return {result}")
    train = _train(d, inputs, parts)
    facts = {
        "rows": d.rows,
        "dtype": str(dtype).removeprefix("torch."),
        "rowwise": d.rowwise,
        "batch_norm": any("BatchNorm" in line for line in d.init),
        "writes": d.writes,
        "dropout": d.dropout,
        "autocast": d.autocast,
        "trains": bool(train),
    }
    text = TEMPLATE.format(
        seed=seed,
        facts=facts,
        helpers="".join(f"{HELPERS[name]}\n\n" for name in sorted(d.helpers)),
        init=_indented(d.init or ["pass"]),
        parameters=inputs.parameters,
        body=_indented([*inputs.opening, *d.body]),
        dtype=dtype,
        tensors=_list(inputs.tensors),
        arguments=inputs.arguments,
        keywords=inputs.keywords,
        train=train,
    )
    return Program(seed, text, facts)


def _inputs(d: Draft) -> _Inputs:
    kinds, batched = [], []
    for i in range(d.chance.choices([1, 2, 3], [5, 4, 2])[0]):
        kind = d.chance.choices(
            ["row", "sequence", "image", "ids", "mask", "bytes", "shared", "scalar", "empty"],
            [4, 5, 3, 3, 1, 1, 0.7, 0.4, 0.2] if i else [4, 5, 3, 0, 0, 0, 0, 0, 0],
        )[0]
        kinds.append(_tensor(d, kind))
        batched.append(kind not in ("shared", "scalar"))
    names = [f"t[{i}]" for i in range(len(kinds))]
    if len(kinds) > 1 and kinds[0] == kinds[1] and d.maybe(0.3):
        names[1] = "t[0]"  # one tensor passed twice
    form = d.chance.choices(["plain", "keyword", "dict", "nested", "defaults"], [5, 2, 2, 2, 1])[0]
    bound = [f"x{i}" for i in range(len(kinds))]
    if form == "plain":
        made = ", ".join(bound), [], f"({', '.join(names)},)", "{}"
    elif form == "keyword":
        pairs = ", ".join(f"{b!r}: {n}" for b, n in zip(bound, names, strict=True))
        made = ", ".join(bound), [], "()", f"{{{pairs}}}"
    elif form == "dict":
        pairs = ", ".join(f"'k{i}': {n}" for i, n in enumerate(names))
        opening = [f"x{i} = batch['k{i}']" for i in range(len(names))]
        made = "batch", opening, f"({{{pairs}}},)", "{}"
    elif form == "nested":
        opening = ["x0 = tree[0]['a']", *(f"x{i} = tree[1][{i - 1}]" for i in range(1, len(names)))]
        made = (
            "tree, none=None",
            opening,
            f"([{{'a': {names[0]}}}, ({''.join(f'{name}, ' for name in names[1:])}), None],)",
            "{}",
        )
    else:
        made = (
            f"{', '.join(bound)}, scale=0.5, flag=True",
            ["x0 = x0 * scale if flag else x0"],
            f"({', '.join(names)},)",
            "{'scale': 0.75}",
        )
    return _Inputs(kinds, *made, batched)


def _tensor(d: Draft, kind: str) -> str:
    rows = d.rows
    if kind == "row":
        return f"torch.randn({rows}, {d.width()}, dtype={d.dtype})"
    if kind == "sequence":
        return f"torch.randn({rows}, {d.number(2, 5)}, {d.width()}, dtype={d.dtype})"
    if kind == "image":
        sizes = f"{rows}, {d.pick([1, 2, 3, 4])}, {d.number(3, 6)}, {d.number(3, 6)}"
        return f"torch.randn({sizes}, dtype={d.dtype})"
    if kind == "ids":
        return f"torch.randint(12, ({rows}, {d.number(2, 5)}))"
    if kind == "mask":
        return f"torch.rand({rows}, {d.number(2, 5)}) > 0.4"
    if kind == "bytes":
        return f"torch.randint(256, ({rows}, {d.number(2, 5)}), dtype=torch.uint8)"
    if kind == "empty":
        return f"torch.randn({rows}, 0, dtype={d.dtype})"
    if kind == "shared":
        width = d.pick([w for w in (2, 3, 5, 7) if w != rows])
        return f"torch.randn({width}, dtype={d.dtype})"
    return f"torch.rand((), dtype={d.dtype})"


def _bind(d: Draft, inputs: _Inputs) -> None:
    """Run what a call of forward does before its first statement."""
    scope: dict[str, Any] = {**d.names}
    header = f"def opened({inputs.parameters}):\n"
    names = [f"x{i}" for i in range(len(inputs.tensors))]
    lines = [*inputs.opening, f"return ({', '.join(names)},)"]
    exec(header + "\n".join(f"    {line}" for line in lines), scope)
    found = scope["opened"](*d.names["args"], **d.names["kwargs"])
    for name, tensor, batched in zip(names, found, inputs.batched, strict=True):
        d.names[name] = tensor
        d.variables.append(Var(name, tensor, batched))


def _outputs(d: Draft) -> tuple[list[tuple[str, Var]], str]:
    """Paths of the outputs with their values, and the expression that is returned."""
    count = d.chance.choices([1, 2, 3], [4, 3, 1])[0]
    last = [v for v in d.variables if v.tensor.numel()][-4:]
    if d.maybe(0.8):
        last = [v for v in d.variables if v.tensor.numel() and v.tensor.requires_grad][-4:] or last
    found = [d.pick(last) for _ in range(count)]
    if d.maybe(0.6) or all(var.name.startswith("x") for var in found):
        found[0] = last[-1]
    if d.maybe(0.08):
        found.append(d.pick(d.variables))  # an input, perhaps
    names = [var.name for var in found]
    form = d.chance.choices(["plain", "dict", "nested"], [4, 3, 1])[0]
    if form == "plain" and len(found) == 1:
        return [("out", found[0])], names[0]
    if form == "plain":
        paths = [f"out[{i}]" for i in range(len(found))]
        text = d.pick(["({})", "[{}]"]).format(", ".join(names))
    elif form == "dict":
        keys = [f"{'zyxw'[i]}" for i in range(len(found))]
        paths = [f'out["{key}"]' for key in keys]
        text = "{" + ", ".join(f'"{k}": {n}' for k, n in zip(keys, names, strict=True)) + "}"
    else:
        paths = ['out[0]["a"]', *(f"out[1][{i}]" for i in range(len(found) - 1))]
        rest = "".join(f"{name}, " for name in names[1:])
        text = f'({{"a": {names[0]}, "none": None}}, ({rest}), 3)'
    return list(zip(paths, found, strict=True)), text


def _train(d: Draft, inputs: _Inputs, parts: list[tuple[str, Var]]) -> str:
    """The text of the training step; empty where nothing can be learned."""
    usable = [(path, v) for path, v in parts if v.is_float and v.tensor.requires_grad]
    if not usable or not any(line.startswith("self.m") for line in d.init):
        return ""
    step = ["optimizer.zero_grad()" + ("" if d.maybe(0.8) else "  # set_to_none")]
    call = _call(inputs)
    step.append(f"out = model({call})")
    batch = "kwargs" if inputs.arguments == "()" else "args"
    parameters = _step_parameters(inputs)
    terms = []
    for path, var in usable[: d.number(1, 2)]:
        labelled = var.batched and var.tensor.dim() in (2, 3) and var.shape[-1] > 1
        if labelled and "target" not in parameters and batch == "args" and d.maybe(0.35):
            classes, lead = var.shape[-1], list(var.shape[:-1])
            before, options, after = parameters.partition(", scale")
            parameters = f"{before}, target{options}{after}"
            batch = (
                f"(*args, torch.randint({classes}, {lead}).where(torch.rand({lead}) > 0.2, -100))"
            )
            flat = ".flatten(0, 1)" if len(lead) == 2 else ""
            labels = ".flatten()" if flat else ""
            options = d.pick(["", ", label_smoothing=0.1", ', reduction="sum"'])
            terms.append(f"F.cross_entropy({path}{flat}, target{labels}{options})")
        else:
            terms.append(d.pick(TERMS).format(o=path))
    if d.maybe(0.1):
        terms.append("sum(p.square().sum() for p in model.parameters() if p.requires_grad) * 1e-2")
    step += [f"loss = {' + '.join(terms)}", "loss.backward()"]
    if d.maybe(0.2):
        step.append(d.pick(["nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
                            "nn.utils.clip_grad_value_(model.parameters(), 0.05)"]))  # fmt: skip
    step.append("optimizer.step()")
    optimizer = _optimizer(d)
    if any("scheduler" in line for line in optimizer):
        step.append("scheduler.step()")
    results = ["return loss", "return loss", "return loss.detach()"]
    results += ['return {"loss": loss, "seen": out}'] if d.maybe(0.1) else []
    step.append(d.pick(results))
    return TRAIN.format(
        batch=batch,
        optimizer=_indented(optimizer, 4),
        parameters=parameters,
        step=_indented(step),
    )


def _step_parameters(inputs: _Inputs) -> str:
    return inputs.parameters.replace(", none=None", "").replace(
        ", scale=0.5, flag=True", ", scale=0.75"
    )


def _call(inputs: _Inputs) -> str:
    names = [part.split("=")[0].strip() for part in _step_parameters(inputs).split(",")]
    return ", ".join(f"{name}={name}" if name == "scale" else name for name in names)


def _optimizer(d: Draft) -> list[str]:
    options = OPTIMIZERS if d.dtype is torch.float64 and not d.autocast else OPTIMIZERS[:5]
    lines = []
    if d.maybe(0.15):
        lines = ["first, *others = [p for p in model.parameters() if p.requires_grad]",
                 "groups = [{'params': [first], 'lr': 0.02}, {'params': others}]"
                 " if others else [first]"]  # fmt: skip
        given = "groups"
    else:
        given = d.pick(["model.parameters()", "[p for p in model.parameters() if p.requires_grad]"])
    lines.append(f"optimizer = {d.pick(options).format(p=given)}")
    if d.maybe(0.15):
        lines.append(f"scheduler = torch.optim.lr_scheduler.{d.pick(SCHEDULERS)}")
    return lines


def _list(items: list[str]) -> str:
    return f"[{', '.join(items)}]"


def _indented(lines: list[str], by: int = 8) -> str:
    return "\n".join(" " * by + line for line in lines)


if __name__ == "__main__":
    print(draw(int(sys.argv[1])).text)
