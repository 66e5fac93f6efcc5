"""Graphs of a model for sizes that vary, each held against the model itself."""

import threading
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from shardwright.errors import CaptureError
from shardwright.tracing import capture, empty_weights
from shardwright.tracing.program_set import ProgramSet

BATCH = {0: "batch"}
TOKENS = {"ids": ("batch", "length"), "attention_mask": ("batch", "length")}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu())


class Attention(nn.Module):
    """A decoder's layer with a mask: a causal one, or that of the call alone."""

    def __init__(self, *, causal: bool = False, positions: int = 64) -> None:
        super().__init__()
        self.causal = causal
        self.embed, self.positions = nn.Embedding(50, 16), nn.Embedding(positions, 16)
        self.head = nn.Linear(16, 50)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        x = self.embed(ids) + self.positions(places)
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        allowed = attention_mask[:, None, None, :].bool()
        if self.causal:
            allowed = allowed & (places[:, None] >= places)
        y = scaled_dot_product_attention(q, q, q, attn_mask=allowed)
        return self.head(x + y.transpose(1, 2).flatten(2))


class Pooled(Attention):
    """What it gives is a mean over the length, padding included, or left out."""

    def __init__(self, *, right: bool) -> None:
        super().__init__()
        self.right = right

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, mask = self.embed(ids), attention_mask[..., None]
        count = mask.sum(1) if self.right else ids.shape[1]
        return self.head((x * mask).sum(1) / count)


def tokens(batch: int, length: int, seen: int | None = None) -> tuple[Tensor, Tensor]:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, length if seen is None else seen :] = 0
    return torch.randint(0, 50, (batch, length)), mask


def padding(programs: ProgramSet) -> dict[str, str | None]:
    return {name: size.padding for name, size in programs.shapes.sizes.items()}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_rows_are_padded_where_annotations_prove_them_apart() -> None:
    model = Mlp().eval()
    programs = capture(model, (torch.randn(3, 8),), dynamic={"x": BATCH})
    assert padding(programs) == {"batch": "rows"}
    assert programs.first.values[programs.first.inputs[0]].shape == (4, 8)
    for rows in (1, 2, 3, 5, 9):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(programs.run(x), model(x))
    assert [*programs.graphs] == [(4,), (1,), (2,), (8,), (16,)]


@pytest.mark.parametrize("causal", [False, True])
def test_a_length_is_padded_where_the_mask_leaves_it_out(causal: bool) -> None:
    model = Attention(causal=causal).eval()
    programs = capture(model, tokens(3, 10), dynamic=TOKENS)
    assert padding(programs) == {"batch": "rows", "length": "mask"}
    for batch, length, seen in ((3, 10, 10), (5, 21, 13), (1, 2, 2), (2, 33, 1)):
        call = tokens(batch, length, seen)
        torch.testing.assert_close(programs.run(*call), model(*call))
    assert (8, 32) in programs.graphs


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Pooled(right=False), "computes with a size that varies"),
        (Pooled(right=True), ""),
    ],
)
def test_a_mask_is_tried_against_the_shorter_call(model: nn.Module, reason: str) -> None:
    """A mean over the length ignores what is in the padding, and is wrong all the same."""
    programs = capture(model.eval(), tokens(3, 10), dynamic=TOKENS)
    size = programs.shapes.sizes["length"]
    assert (size.padding == "mask") == (not reason)
    assert reason in size.reason
    for length in (10, 13):
        call = tokens(2, length)
        torch.testing.assert_close(programs.run(*call), model(*call))


class Sized(nn.Module):
    """Every row by itself, and the number of rows in a value."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if self.how == "number":
            return x / rows
        if self.how == "constant":
            return x * torch.tensor([1.0, float(rows)] * 4)
        return x + torch.arange(rows, 0.0, -1.0)[:, None]


@pytest.mark.parametrize("how", ["number", "constant", "positions from the end"])
def test_a_model_that_computes_with_its_sizes_is_not_padded(how: str) -> None:
    """No operator mixes rows there, and yet a row depends on how many there are."""
    model = Sized(how)
    programs = capture(model, (torch.randn(6, 8),), dynamic={"x": BATCH})
    assert padding(programs) == {"batch": None}
    for rows in (5, 6, 7):
        x = torch.randn(rows, 8)
        assert torch.equal(programs.run(x), model(x))


def test_a_model_that_computes_with_larger_sizes_alone() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / max(8, x.shape[0])

    model = Scaled()
    programs = capture(model, (torch.randn(3, 8),), dynamic={"x": BATCH})
    assert padding(programs) == {"batch": "rows"}
    for rows in (5, 9, 16):
        x = torch.randn(rows, 8)
        assert torch.equal(programs.run(x), model(x))
    assert [*programs.graphs] == [(4,), (8,), (16,), (9,)]


def test_a_branch_on_a_size_divides_what_is_padded() -> None:
    class Chosen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (2 if x.shape[0] < 6 else 1)

    model = Chosen()
    programs = capture(model, (torch.randn(16, 8),), dynamic={"x": BATCH})
    assert padding(programs) == {"batch": "rows"}
    for rows in (16, 9, 8, 7, 6, 5, 4, 3, 1):
        x = torch.randn(rows, 8)
        assert torch.equal(programs.run(x), model(x)), rows
    assert programs.least == {(16,): {"batch": 6}, (8,): {"batch": 6}, (5,): {"batch": 1}} | {
        (size,): {"batch": 1} for size in (4, 1)
    }


def test_dropout_in_train_mode_is_not_padded() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout())
    programs = capture(model, (torch.randn(6, 8),), dynamic={"input": BATCH})
    assert "dropout in 1 has no dim" in programs.shapes.sizes["batch"].reason
    assert padding(capture(model.eval(), (torch.randn(6, 8),), dynamic={"input": BATCH})) == {
        "batch": "rows"
    }


class Mixing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "sum":
            return x - x.sum(0)
        if self.how == "flip":
            return x.flip(0)
        if self.how == "batch norm":
            return self.norm(x)
        if self.how == "buffer":
            self.seen.add_(x.sum(0).detach())
            return x * 2
        return x.flatten().view(-1, 4)


@pytest.mark.parametrize(
    ("how", "training", "reason"),
    [
        ("sum", False, "mixes the rows"),
        ("flip", False, "mixes the rows"),
        ("batch norm", True, "mixes the rows"),
        ("buffer", False, "mixes the rows"),
    ],
)
def test_a_size_that_is_mixed_has_a_program_of_its_own(
    how: str, training: bool, reason: str
) -> None:
    model = Mixing(how).train(training)
    programs = capture(model, (torch.randn(6, 8),), dynamic={"x": BATCH})
    assert padding(programs) == {"batch": None}
    assert reason in programs.shapes.sizes["batch"].reason
    x = torch.randn(5, 8)
    torch.testing.assert_close(programs.run(x), model(x))
    assert (5,) in programs.graphs


def test_several_elements_a_row() -> None:
    model = Mixing("view")
    programs = capture(model, (torch.randn(6, 8),), dynamic={"x": BATCH})
    x = torch.randn(5, 8)
    assert torch.equal(programs.run(x), model(x))
    assert padding(programs) == {"batch": "rows"}


def test_sizes_of_several_calls() -> None:
    model = Attention().eval()
    calls = [tokens(2, 10), {"ids": tokens(2, 7)[0], "attention_mask": tokens(2, 7)[1]}]
    programs = capture(model, tokens(3, 10), dynamic=calls)
    sizes = {name: dict(size.inputs) for name, size in programs.shapes.sizes.items()}
    assert sizes == {
        "ids_0": {"ids": (0,), "attention_mask": (0,)},
        "ids_1": {"ids": (1,), "attention_mask": (1,)},
    }


def test_buckets_and_largest_sizes() -> None:
    """A table of 24 positions cannot be asked for the 32 of the next power of two."""
    model = Attention(positions=24).eval()
    length = torch.export.Dim("length", max=24)
    dynamic = {"ids": {0: "batch", 1: length}, "attention_mask": {0: "batch", 1: length}}
    programs = capture(model, tokens(3, 10), dynamic=dynamic, buckets={"batch": (6, 3)})
    call = tokens(4, 20)
    torch.testing.assert_close(programs.run(*call), model(*call))
    assert [*programs.graphs][-1] == (6, 24)
    assert (3, 16) in programs.graphs


def test_stored_values_are_those_of_the_first() -> None:
    """Constants that a capture makes anew, such as positions, have names of their own."""
    programs = capture(Attention(causal=True).eval(), tokens(3, 10), dynamic=TOKENS)
    first, other = programs.first, programs.at(batch=4, length=64)
    held = {name: first.tensors[v.id] for v in first.stored() for name in v.names}
    for value in other.stored():
        for name in value.names:
            assert held.get(name, other.tensors[value.id]) is other.tensors[value.id], name


def test_example_of_one_row() -> None:
    model = Mlp().eval()
    programs = capture(model, (torch.randn(1, 8),), dynamic={"x": BATCH})
    assert padding(programs) == {"batch": "rows"}
    assert programs.first.values[programs.first.inputs[0]].shape == (1, 8)
    assert torch.equal(programs.run(torch.ones(1, 8)), model(torch.ones(1, 8)))


def test_a_mask_is_not_tried_on_weights_without_contents() -> None:
    with empty_weights():
        model = Attention().eval()
    programs = capture(model, tokens(3, 10), dynamic=TOKENS)
    assert padding(programs) == {"batch": "rows", "length": None}
    assert "weights have no contents" in programs.shapes.sizes["length"].reason


def test_text() -> None:
    programs = capture(Mlp().eval(), (torch.randn(3, 8),), dynamic={"x": BATCH})
    assert str(programs).splitlines() == [
        "programs of Mlp",
        "  batch of x[0]: padded to powers of two with copies of the last row; output[0] cut",
        "  batch=4: 4 nodes",
    ]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({}, "no size varies"),
        ([], "no size varies"),
        ([(torch.randn(3, 8),)], "no size varies"),
        ({"y": BATCH}, "names the input 'y'; the inputs are x"),
        ({"x": {2: "batch"}}, "'x' has 2 dimensions, and dynamic names 2"),
        ({"x": {0: 3}}, "names dimension 0 of 'x' 3; a name is a word"),
        ({"x": {0: "a/b"}}, "names dimension 0 of 'x' 'a/b'"),
        ({"x": {0: "n", 1: "n"}}, "'n' is 3 in one input and 8 in dimension 1"),
        ([(torch.randn(3, 8, 1),)], "'x' has not as many dimensions"),
        ([{"z": torch.randn(3, 8)}], "a call of dynamic is not like the first"),
    ],
)
def test_sizes_that_cannot_vary(dynamic: Mapping[str, object], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Mlp(), (torch.randn(3, 8),), dynamic=dynamic)


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ({"rows": (1, 2)}, "buckets names 'rows'; the sizes are batch"),
        ({"batch": (0, 2)}, "the buckets of 'batch' are"),
    ],
)
def test_buckets_that_are_none(buckets: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Mlp(), (torch.randn(3, 8),), dynamic={"x": BATCH}, buckets=buckets)
    with pytest.raises(CaptureError, match="name these with dynamic="):
        capture(Mlp(), (torch.randn(3, 8),), buckets=buckets)  # type: ignore[call-overload]


def test_a_model_that_is_another_one_later() -> None:
    model = Mlp().eval()
    programs = capture(model, (torch.randn(3, 8),), dynamic={"x": BATCH})
    model.train()
    with pytest.raises(CaptureError, match="was in eval mode for its other sizes"):
        programs.at(batch=8)
    model.eval()
    model.up.weight = nn.Parameter(torch.randn(16, 8))
    with pytest.raises(CaptureError, match=r"'up.weight' is another tensor"):
        programs.at(batch=8)


def test_a_model_whose_attribute_is_another_later() -> None:
    model = Scored("ignored")
    args = (torch.arange(12).reshape(2, 6), torch.zeros(2, 6))
    programs = capture(model, args, dynamic={"ids": {0: "batch"}, "mask": {0: "batch"}})
    model.meaning = "unused"
    with pytest.raises(CaptureError, match="otherwise than when it was captured"):
        programs.at(batch=4)


def test_a_model_that_cannot_be_copied_is_not_padded() -> None:
    model = Mlp().eval()
    model.lock = threading.Lock()  # type: ignore[assignment]
    programs = capture(model, (torch.randn(3, 8),), dynamic={"x": BATCH})
    x = torch.randn(5, 8)
    torch.testing.assert_close(programs.run(x), model(x))
    assert "cannot be copied" in programs.shapes.sizes["batch"].reason


def test_a_model_whose_copy_is_not_it_is_not_padded() -> None:
    """A closure of its own reaches the model, and not the copy."""
    model = Mlp().eval()
    model.norm.register_forward_hook(lambda *_: model.up.bias * 2)
    programs = capture(model, (torch.randn(3, 8),), dynamic={"x": BATCH})
    assert padding(programs) == {"batch": None}
    x = torch.randn(5, 8)
    torch.testing.assert_close(programs.run(x), model(x))


def test_an_example_of_one_that_two_do_not_go_with() -> None:
    class Added(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    programs = capture(Added(), (torch.randn(3, 1), torch.randn(1, 3)), dynamic={"y": {0: "n"}})
    args = (torch.randn(3, 1), torch.randn(3, 3))
    torch.testing.assert_close(programs.run(*args), args[0] + args[1])
    programs = capture(Added(), (torch.randn(1, 4), torch.randn(5, 4)), dynamic={"x": {0: "n"}})
    assert "does not take two" in programs.shapes.sizes["n"].reason
    args = (torch.randn(5, 4), torch.randn(5, 4))
    torch.testing.assert_close(programs.run(*args), args[0] + args[1])


def test_a_model_that_mixes_rows_of_some_sizes_alone() -> None:
    class Sometimes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0) if x.shape[0] > 4 else x * 2

    model = Sometimes()
    programs = capture(model, (torch.randn(3, 8),), dynamic={"x": BATCH})
    for rows in (2, 5, 8):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(programs.run(x), model(x))


class Scored(nn.Module):
    """Attention with a mask of another meaning than 1 for what is attended."""

    def __init__(self, meaning: str) -> None:
        super().__init__()
        self.meaning = meaning
        self.embed = nn.Embedding(50, 16)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        scores = x @ x.transpose(1, 2) / 4
        if self.meaning == "additive":
            scores = scores + mask[:, None]
        elif self.meaning == "ignored":
            scores = scores.masked_fill(mask[:, None].bool(), -torch.inf)
        return scores.softmax(-1) @ x


class Predicted(Scored):
    """The largest of logits that attention changes little."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return (self.embed(ids) + super().forward(ids, mask) * 1e-3).argmax(-1)


def test_outputs_of_integers_are_tried_before_they_are_rounded() -> None:
    args = (torch.arange(12).reshape(2, 6), torch.zeros(2, 6))
    dynamic = {"ids": ("batch", "length"), "mask": ("batch", "length")}
    programs = capture(Predicted("additive"), args, dynamic=dynamic)
    assert padding(programs) == {"batch": "rows", "length": None}
    assert "before an output of integers" in programs.shapes.sizes["length"].reason


@pytest.mark.parametrize("meaning", ["additive", "ignored", "unused"])
@pytest.mark.parametrize("example", [torch.zeros, torch.ones])
def test_an_example_that_is_the_same_everywhere(
    meaning: str, example: Callable[..., Tensor]
) -> None:
    """Attention over copies of one token gives that token; so the trial takes other ones."""
    model = Scored(meaning)
    args = (example(2, 6, dtype=torch.int64), torch.zeros(2, 6))
    dynamic = {"ids": ("batch", "length"), "mask": ("batch", "length")}
    programs = capture(model, args, dynamic=dynamic)
    assert padding(programs) == {"batch": "rows", "length": None}
    call = (torch.randint(0, 50, (2, 5)), torch.zeros(2, 5))
    torch.testing.assert_close(programs.run(*call), model(*call))


def test_an_example_that_nothing_can_be_tried_on() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1, 8)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return (self.embed(ids) * mask[..., None]).cumsum(1)

    args = (torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4))
    sizes = {"ids": {1: "length"}, "mask": {1: "length"}}
    programs = capture(Masked(), args, dynamic=sizes)
    assert "the same all along it" in programs.shapes.sizes["length"].reason


class Varied(nn.Module):
    """Models whose result depends on the number of rows in ways of their own."""

    seen: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: Tensor) -> object:
        rows = x.shape[0]
        if self.how == "of zeros":
            return x / rows
        if self.how == "counter":
            y = x * self.seen
            self.seen += rows
            return y
        if self.how == "empty":
            return x * 2, x[:, :0]
        if self.how == "number":
            return {"y": x * 2, "rows": rows}
        if self.how == "one row":
            return (x * 2).squeeze(0)
        return x * 2 if rows > 1 else x * 3


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("of zeros", "computes with a size"),
        ("counter", "computes with a size"),
        ("number", "torch.SymInt"),
        ("one row", ""),
        ("other of one row", ""),
        ("empty", ""),
    ],
)
def test_what_padding_would_change(how: str, reason: str) -> None:
    programs = capture(
        Varied(how), (torch.zeros(4, 8),), dynamic={"x": BATCH}, buckets={"batch": (4,)}
    )
    size = programs.shapes.sizes["batch"]
    assert (size.padding == "rows") == (not reason)
    assert reason in size.reason
    for rows in (1, 3, 4):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(programs.run(x), Varied(how)(x), rtol=0, atol=0)


def test_example_of_one_row_of_a_model_that_drops_it() -> None:
    model = Varied("one row")
    programs = capture(model, (torch.zeros(1, 8),), dynamic={"x": BATCH})
    for rows in (1, 2, 3):
        x = torch.randn(rows, 8)
        assert torch.equal(programs.run(x), model(x))  # type: ignore[arg-type]


def test_sizes_that_no_memory_has() -> None:
    programs = capture(Mlp().eval(), (torch.randn(4, 8),), dynamic={"x": BATCH})
    with pytest.raises(CaptureError, match=r"inputs of batch=\d+ cannot be made"):
        programs.at(batch=1 << 50)


def test_an_input_without_elements() -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor, none: Tensor) -> Tensor:
            return torch.cat([x, none], 1) * 2

    model, none = Joined(), torch.randn(6, 0)
    programs = capture(model, (torch.randn(6, 8), none), dynamic={"x": BATCH, "none": BATCH})
    x = torch.randn(5, 8)
    assert torch.equal(programs.run(x, none[:5]), model(x, none[:5]))
