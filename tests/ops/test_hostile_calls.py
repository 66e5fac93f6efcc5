"""No call that the proof lets through ends a process, whatever its sizes, strides and indices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shardwright.ops.catalog import ALLOWED, is_allowed
from shardwright.torch_internals import schema_of
from tests.ops.hostile import findings

TRUSTING = (
    *(f"aten.max_pool{n}d_with_indices_backward.default" for n in (2, 3)),
    *(f"aten.adaptive_max_pool{n}d_backward.default" for n in (2, 3)),
    "aten.embedding_dense_backward.default",
    "aten.nll_loss_backward.default",
    "aten.native_layer_norm_backward.default",
    "aten.native_batch_norm_backward.default",
    "aten.native_group_norm_backward.default",
    "aten._fused_sgd.tensor_lr",
    "aten.lstm.input",
    "aten.rrelu_with_noise_backward.default",
    "aten._native_batch_norm_legit_no_training.default",
    "aten.as_strided.default",
    "aten._foreach_copy.default",
    "aten.linalg_lu_solve.default",
    "aten._fft_c2r.default",
)
"""Operators whose kernels do not look themselves."""


def overloads() -> Iterator[str]:
    """Every functional overload that a file may call."""
    for name in sorted(ALLOWED):
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            schema = schema_of(getattr(packet, overload))
            named = any("Dimname" in str(argument.real_type) for argument in schema.arguments)
            made = [str(item.type) for item in schema.returns]
            tensors = bool(made) and set(made) <= {"Tensor", "List[Tensor]"}
            if tensors and not (schema.is_mutable or named):
                yield f"aten.{name}.{overload}"


@pytest.mark.parametrize("op", TRUSTING)
def test_operators_that_trust_their_arguments(op: str) -> None:
    assert is_allowed(op)
    assert [*findings(op, range(40))] == []


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_every_operator_that_a_file_may_call() -> None:
    found = {op: [*findings(op, range(60), seconds=5)] for op in overloads()}
    assert {op: seeds for op, seeds in found.items() if seeds} == {}


@pytest.mark.parametrize(
    "op",
    [
        *("_reshape_alias.default", "_reshape_alias_copy.default", "resize.default"),
        *("segment_reduce.default", "_convert_indices_from_csr_to_coo.default"),
        *("_ctc_loss.default", "_embedding_bag_dense_backward.default", "from_file.default"),
        *(
            "set.source_Tensor",
            "_stack.default",
            "embedding_backward.default",
            "_pack_padded_sequence.default",
            "relu_.default",
        ),
    ],
)
def test_what_no_file_may_call(op: str) -> None:
    assert not is_allowed(f"aten.{op}")
