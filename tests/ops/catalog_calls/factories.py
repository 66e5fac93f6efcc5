"""Calls that make tensors of nothing but sizes."""

import torch

from tests.ops.case import Case, F, case, of, sizes_of

FACTORIES: list[Case] = [
    case("zeros.default", sizes_of("a 1 b")),
    case("ones.default", sizes_of("a b"), dtype=torch.bool),
    case("full.default", sizes_of("a b"), 2.5),
    case("empty.memory_format", sizes_of("a b")),
    case("new_zeros.default", F("c"), sizes_of("a b")),
    case("new_ones.default", F("c"), sizes_of("a b")),
    case("new_full.default", F("c"), sizes_of("a b"), 2.5),
    case("new_empty.default", F("c"), sizes_of("a b")),
    case("arange.default", of("a")),
    case("arange.default", 6.5),
    case("arange.start", 2, 9, dtype=torch.int32),
    case("arange.start_step", 9, -3, -2),
    case("arange.start_step", 0.5, 4.0, 0.75),
    case("scalar_tensor.default", 2.5),
]
