"""Calls of losses."""

from tests.ops.case import Case, F, I, K, U, case

LOSSES: list[Case] = [
    *(
        case(f"{name}.default", F("a b"), F("a b"), reduction)
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
        for reduction in (0, 1, 2)
    ),
    case("soft_margin_loss.default", F("a b"), K("a b"), 1),
    case("binary_cross_entropy.default", U("a b"), U("a b"), K("b"), 1),
    case("binary_cross_entropy_with_logits.default", F("a b"), U("a b"), None, K("b"), 1),
    case("poisson_nll_loss.default", F("a b"), U("a b"), True, False, 1e-8, 1),
    case("kl_div.default", F("a b"), U("a b"), 2),
    case("kl_div.default", F("a b"), U("a b"), 1),
    *(case("cross_entropy_loss.default", F("a c"), I("a", "c"), None, r) for r in (0, 1, 2)),
    case("cross_entropy_loss.default", F("a c d"), I("a d", "c"), K("c"), 2),
    case("cross_entropy_loss.default", F("a c"), U("a c"), None, 2, -100, 0.1),
    case("nll_loss.default", F("a c"), I("a", "c"), None, 2),
    case("nll_loss_nd.default", F("a c"), I("a", "c"), K("c"), 0),
    case("nll_loss2d.default", F("a c d e"), I("a d e", "c"), None, 2),
]
