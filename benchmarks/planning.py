"""How fast plans are found, and what they promise: `python -m benchmarks.planning`.

Everything is built on meta, with costs from shapes: nothing runs. First the time to plan: a GPT for
4 slots, shapes of Llama-70B of 20, 40 and 80 layers for 1,024 slots of 8-slot hosts, and the splits
of one Llama layer over a mesh of 4 by 2; each on one core. Then what is predicted of T5,
BERT-large, ViT and GPT-2 XL shapes on the slots of a cluster file (`a100x8.yaml` by default),
bubbles and communication counted, against one slot of the same kind with memory without end, which
takes as many microbatches.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from benchmarks.measure import console, print_machine
from benchmarks.models import GPT, loss_of
from shardwright.clusters import Cluster, Link, Links
from shardwright.clusters.device import DEVICES
from shardwright.costs.cost import Analytic
from shardwright.ir import IRGraph
from shardwright.planning.splits import best_splits
from shardwright.planning.step import as_step
from shardwright.planning.step_graph import forward_view

NVLINK = Links.of(Link(5e-6, 250e9), Link(5e-6, 250e9), 10e-6)
INFINIBAND = Links.of(Link(10e-6, 20e9), Link(10e-6, 20e9), 20e-6)
A100 = DEVICES["A100-80GB"]
UNLIMITED = 10**15
MICROBATCHES = 64
"""Captured batches that a step takes where nothing says how many."""
CLUSTER = Path(__file__).with_name("a100x8.yaml")


class LlamaAttention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.size, bias=False)
        self.value = nn.Linear(width, groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            layer(x).view(batch, length, -1, self.size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.groups != self.heads
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = LlamaAttention(width, heads, groups)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The shape of Llama-70B, of any number of layers."""

    def __init__(self, layers: int, width: int = 8192, vocabulary: int = 128256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaLayer(width, 64, 8, 28672) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def step_graph(
    model: nn.Module, loss: Callable[..., torch.Tensor], data: Mapping[str, torch.Tensor]
) -> IRGraph:
    """The step of a model on meta, trained by AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(**given: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(model, **given)
        found.backward()
        optimizer.step()
        return found

    return sw.compile_ir(step, **data)


def of_tokens(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of a model from tokens to scores."""
    return loss_of(model(ids), labels)


def of_transformers(model: nn.Module, **given: torch.Tensor) -> torch.Tensor:
    """The loss that a model of transformers gives."""
    return model(**given).loss


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def gpt() -> IRGraph:
    with sw.empty_weights():
        model = GPT(32, 256, 4, 1000, 128)
    ids = tokens(8, 128)
    return step_graph(model, of_tokens, {"ids": ids, "labels": ids})


def llama(layers: int, batch: int = 128) -> IRGraph:
    with sw.empty_weights():
        model = Llama(layers)
    ids = tokens(batch, 4096)
    return step_graph(model, of_tokens, {"ids": ids, "labels": ids})


def a100s(devices: int) -> Cluster:
    return Cluster.of(devices, 8, device=A100, inside=NVLINK, between=INFINIBAND)


class Timed(NamedTuple):
    """How long a plan took without capture, and the most bytes of its process with it."""

    nodes: int
    seconds: float
    plan: str
    nbytes: int


def timed(nodes: int, work: Callable[[], str]) -> Timed:
    """Do the work, which says what it planned."""
    begin = time.perf_counter()
    plan = work()
    seconds = time.perf_counter() - begin
    return Timed(nodes, seconds, plan, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def planned_gpt() -> Timed:
    graph = gpt()
    return timed(len(graph.nodes), lambda: planned(graph, Cluster.of(4)))


def planned_llama(layers: int) -> Timed:
    graph = llama(layers)
    return timed(len(graph.nodes), lambda: planned(graph, a100s(1024)))


def planned(graph: IRGraph, cluster: Cluster) -> str:
    explanation = sw.plan(graph, cluster, "auto", microbatches=MICROBATCHES).explanation
    assert explanation is not None
    return explanation.plan


def split_llama() -> Timed:
    """The splits of one layer between embedding and head, both axes of a mesh free."""
    view = forward_view(as_step(llama(1, batch=8), 1).graph)
    cluster = Cluster.load(CLUSTER)

    def split() -> str:
        axes, costs = {"data": 4, "tensor": 2}, Analytic(cluster.device)
        best_splits(view, axes, cluster=cluster, costs=costs, training=True)
        return ""

    return timed(len(view.nodes), split)


@contextmanager
def one_core() -> Iterator[None]:
    """Processes that are started meanwhile run on one core, so with one thread of each library."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def planning_times() -> None:
    """How long it takes to plan, each case in a process that has planned nothing before."""
    cases: dict[str, Callable[[], Timed]] = {
        "GPT, hidden 256, 32 layers, 4 slots": planned_gpt,
        **{
            f"Llama-70B shape, {layers} layers, 1,024 slots": partial(planned_llama, layers)
            for layers in (20, 40, 80)
        },
        "embedding, one Llama layer, head: splits on (4, 2), both axes free": split_llama,
    }
    table = Table(
        "what", "nodes", "seconds to plan", "GB", "plan", title="Time to plan, on one core"
    )
    for name, case in cases.items():
        with one_core(), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            found = process.submit(case).result()
        table.add_row(
            name,
            str(found.nodes),
            f"{found.seconds:.2f}",
            f"{found.nbytes / 1e9:.2f}",
            found.plan,
        )
    console.print(table)


class Promise(NamedTuple):
    """A family: its model on meta, and a batch."""

    model: Callable[[], nn.Module]
    data: Callable[[], dict[str, torch.Tensor]]


def families() -> dict[str, Promise]:
    """T5-large, BERT-large, ViT-large and GPT-2 XL, as transformers configures them."""
    import transformers as hf

    plain = {"attn_implementation": "eager"}
    return {
        "T5-large": Promise(
            lambda: hf.T5ForConditionalGeneration(
                hf.T5Config(
                    d_model=1024, d_ff=4096, num_layers=24, num_heads=16, use_cache=False,
                    dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
                )
            ),
            lambda: {"input_ids": tokens(8, 512), "labels": tokens(8, 512)},
        ),
        "BERT-large": Promise(
            lambda: hf.BertForMaskedLM(
                hf.BertConfig(
                    hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                    intermediate_size=4096, hidden_dropout_prob=0.0,
                    attention_probs_dropout_prob=0.0, **plain,
                )
            ),
            lambda: {"input_ids": tokens(8, 512), "labels": tokens(8, 512)},
        ),
        "ViT-large": Promise(
            lambda: hf.ViTForImageClassification(
                hf.ViTConfig(
                    hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                    intermediate_size=4096, num_labels=1000, **plain,
                )
            ),
            lambda: {
                "pixel_values": torch.zeros(32, 3, 224, 224),
                "labels": torch.zeros(32, dtype=torch.long),
            },
        ),
        "GPT-2 XL": Promise(
            lambda: hf.GPT2LMHeadModel(
                hf.GPT2Config(
                    n_embd=1600, n_layer=48, n_head=25, use_cache=False, resid_pdrop=0.0,
                    embd_pdrop=0.0, attn_pdrop=0.0, **plain,
                )
            ),
            lambda: {"input_ids": tokens(8, 1024), "labels": tokens(8, 1024)},
        ),
    }  # fmt: skip


class SpeedUp(NamedTuple):
    """What a plan is predicted to take, and how often that goes into what one slot takes."""

    plan: sw.Plan
    times: float


def speed_up(graph: IRGraph, cluster: Cluster, microbatches: int) -> SpeedUp:
    """The best plan on a cluster against one of its slots, with memory without end."""
    made = sw.plan(graph, cluster, "auto", microbatches=microbatches)
    endless = Cluster.of(1, device=msgspec.structs.replace(cluster.device, memory=UNLIMITED))
    count = made.prediction.microbatches
    alone = sw.plan(graph, endless, "auto", microbatches=count).prediction
    return SpeedUp(made, alone.per_microbatch / made.prediction.per_microbatch)


def promises(cluster: Cluster, name: str, microbatches: int) -> None:
    """What is predicted on a cluster against one of its slots."""
    device, count = cluster.device, len(cluster.devices)
    table = Table(
        "shape", f"speed-up on {count}", "microbatches", "ms a captured batch",
        "GB on the fullest slot", "plan",
        title=f"Predicted on {name}: {count} × {device.name}, {device.memory / 1e9:.0f} GB each",
    )  # fmt: skip
    for shape, family in families().items():
        with sw.empty_weights():
            model = family.model()
        made, times = speed_up(
            step_graph(model, of_transformers, family.data()), cluster, microbatches
        )
        found = made.prediction
        table.add_row(
            shape,
            f"{times:.2f}",
            str(found.microbatches),
            f"{1e3 * found.per_microbatch:.1f}",
            f"{found.peak_memory / 1e9:.1f}",
            made.explanation.plan,
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, help="of a step", default=MICROBATCHES)
    parser.add_argument("--cluster", type=Path, default=CLUSTER, help="file to predict on")
    parser.add_argument("--only", choices=("times", "promises"))
    options = parser.parse_args()
    print_machine()
    if options.only != "promises":
        planning_times()
    if options.only != "times":
        cluster = Cluster.load(options.cluster)
        promises(cluster, options.cluster.name, options.microbatches)


if __name__ == "__main__":
    main()
