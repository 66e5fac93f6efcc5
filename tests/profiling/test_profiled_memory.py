"""Bytes that something needs at most while it runs."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from shardwright.ir import DROPOUT, resolve
from shardwright.profiling.memory import Peak, peak_bytes

CPU = torch.device("cpu")
N = 256 * 4
"""Bytes of a vector."""


def vector() -> torch.Tensor:
    return torch.ones(256)


def test_what_is_made_and_kept() -> None:
    assert peak_bytes(vector, CPU) == Peak(N, N)


def test_what_is_made_and_dropped_counts_while_it_is_there() -> None:
    x = vector()
    assert peak_bytes(lambda: x.neg().exp().sum(), CPU) == Peak(2 * N, 4)


def test_views_and_what_runs_in_place_need_nothing() -> None:
    x = vector()
    assert peak_bytes(lambda: x.view(16, 16).t().neg_(), CPU) == Peak(0, 0)


def test_a_backward_needs_its_gradients_and_what_is_between_them() -> None:
    x = vector().requires_grad_()
    y = x.exp().sigmoid()
    seed = torch.ones_like(y)

    def backward() -> object:
        return torch.autograd.grad(y, [x], seed, retain_graph=True)

    assert peak_bytes(backward, CPU) == Peak(2 * N, N)


def test_what_operators_allocate_for_themselves_counts() -> None:
    image, weight = torch.ones(2, 8, 16, 16), torch.ones(8, 8, 3, 3)
    found = peak_bytes(lambda: functional.conv2d(image, weight, padding=1), CPU)
    assert found.most > found.left == image.nbytes


def test_operators_that_are_written_in_python_are_looked_into() -> None:
    x, step = vector(), torch.ones(1, dtype=torch.int64)
    dropout = resolve(DROPOUT)
    found = peak_bytes(lambda: dropout(x, 0.5, 0, step, 0, [0], [256]), CPU)
    assert found.left == N
    assert found.most > 2 * N


def test_a_failure_ends_the_counting() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        peak_bytes(fail, CPU)
    assert peak_bytes(vector, CPU) == Peak(N, N)


GIVES_BACK = """
import torch
from shardwright.profiling import memory

def give_back():
    held.clear()
    return torch.ones(256)

if {loud}:
    memory._QUIET.begin = memory._QUIET.end = lambda: None
held = [torch.ones(256)]
found = memory.peak_bytes(give_back, torch.device("cpu"))
assert found == (1024, 1024), found
"""


@pytest.mark.parametrize("loud", [True, False])
def test_nothing_is_said_of_memory_from_before_that_is_given_back(loud: bool) -> None:
    program = GIVES_BACK.replace("{loud}", str(loud))
    environment = {name: v for name, v in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert ("Memory block of unknown size" in found.stderr) == loud
    assert loud or found.stderr == ""
    assert found.stdout == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_cuda_the_allocator_says_it() -> None:
    device = torch.device("cuda", 0)
    x = vector().to(device)
    assert peak_bytes(lambda: (x + 1).exp() + 1, device) == Peak(2 * N, N)
