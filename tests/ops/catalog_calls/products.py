"""Calls of products of matrices, and of attention."""

from tests.ops.case import B, Case, F, case

PRODUCTS: list[Case] = [
    case("linear.default", F("a b k"), F("n k"), F("n")),
    case("linear.default", F("a k"), F("n k")),
    case("matmul.default", F("a b m k"), F("b k n")),
    case("matmul.default", F("a m k"), F("k n")),
    case("matmul.default", F("a 1 m k"), F("b k n")),
    case("matmul.default", F("m k"), F("k")),
    case("matmul.default", F("k"), F("a k n")),
    case("matmul.default", F("k"), F("k")),
    case("mm.default", F("m k"), F("k n")),
    case("bmm.default", F("b m k"), F("b k n")),
    case("mv.default", F("m k"), F("k")),
    case("dot.default", F("k"), F("k")),
    case("outer.default", F("m"), F("n")),
    case("addmm.default", F("n"), F("m k"), F("k n"), beta=0.5, alpha=2),
    case("addmm.default", F("m 1"), F("m k"), F("k n")),
    case("addmv.default", F("m"), F("m k"), F("k")),
    case("baddbmm.default", F("b 1 n"), F("b m k"), F("b k n"), alpha=0.3),
    case("addbmm.default", F("m n"), F("b m k"), F("b k n")),
    case("bilinear.default", F("a i"), F("a j"), F("n i j"), F("n")),
    case("bilinear.default", F("a i"), F("a j"), F("n i j")),
    case("einsum.default", "bij,bjk->bik", [F("b i j"), F("b j k")]),
    case("einsum.default", "b i j, j -> b i", [F("b i j"), F("j")]),
    case("einsum.default", "...i,ij", [F("a b i"), F("i j")]),
    case("einsum.default", "ab,bc,cd->ad", [F("a b"), F("b c"), F("c d")]),
    case("einsum.default", "ii->i", [F("i i")]),
    case("scaled_dot_product_attention.default", F("b h l d"), F("b h s d"), F("b h s e")),
    case(
        "scaled_dot_product_attention.default",
        *(F("b h l d"), F("b h s d"), F("b h s d"), F("b 1 l s")),
        scale=0.3,
    ),
    case(
        "scaled_dot_product_attention.default",
        *(F("b h l d"), F("b 1 s d"), F("b 1 s d"), B("l s")),
    ),
    case(
        "scaled_dot_product_attention.default",
        *(F("b h l d"), F("b h l d"), F("b h l d")),
        is_causal=True,
    ),
    case(
        "scaled_dot_product_attention.default",
        *(F("b h*2 l d"), F("b h s d"), F("b h s d"), F("1 h*2 l s")),
        enable_gqa=True,
    ),
    case(
        "scaled_dot_product_attention.default",
        *(F("b h l d"), F("b 1 s d"), F("b 1 s d")),
        enable_gqa=True,
        is_causal=True,
    ),
]
