"""Loss sums: exact against PyTorch's own cross entropy, in chunks, in every precision, without a copy of the logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flextrain.config import ModelConfig
from flextrain.errors import ModelError
from flextrain.model import build_model, loss, token_loss_sum
from flextrain.model.loss import cross_entropy_sum, linear_cross_entropy_sum

VOCAB, WIDTH = 17, 8


def inputs(rows: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, dtype=dtype, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, dtype=dtype, generator=generator, requires_grad=True)
    labels = torch.randint(0, VOCAB, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < 0.3] = loss.IGNORE
    return x, weight, labels


def reference(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.T, labels, reduction="sum")


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 40), chunk_rows=st.integers(1, 45), seed=st.integers(0, 1000))
def test_any_cut_into_chunks_gives_the_exact_sum_and_gradients(rows: int, chunk_rows: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "CPU_CHUNK_BYTES", chunk_rows * VOCAB * 8)
        x, weight, labels = inputs(rows, seed=seed)
        expected = reference(x, weight, labels)
        wanted = torch.autograd.grad(expected * 0.7, (x, weight))
        fused = linear_cross_entropy_sum(x, weight, labels)
        logits = cross_entropy_sum(x @ weight.T, labels)
        for found in (fused, logits):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            for a, b in zip(torch.autograd.grad(found * 0.7, (x, weight)), wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_without_gradients_the_sum_is_the_same() -> None:
    x, weight, labels = inputs(9)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy_sum(x, weight, labels), reference(x, weight, labels))


def test_a_frozen_head_still_passes_gradients_on() -> None:
    x, weight, labels = inputs(9)
    weight.requires_grad_(False)
    linear_cross_entropy_sum(x, weight, labels).backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(reference(x, weight, labels), x)[0])
    assert weight.grad is None


def test_nothing_counted_is_zero_with_zero_gradients() -> None:
    x, weight, labels = inputs(5)
    total = linear_cross_entropy_sum(x, weight, torch.full_like(labels, loss.IGNORE))
    total.backward()
    assert total.item() == 0
    assert not x.grad.any()
    assert not weight.grad.any()


def test_under_autocast_products_are_bf16_and_sums_fp32() -> None:
    x, weight, labels = inputs(33, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy_sum(x, weight, labels)
        expected = F.cross_entropy((x @ weight.T).float(), labels, reduction="sum")
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for a, b in zip(torch.autograd.grad(found, (x, weight)), torch.autograd.grad(expected, (x, weight)), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_bf16_weights_collect_their_gradient_in_fp32() -> None:
    """As FSDP2 casts them. 4,096 rows of equal gradient summed in bf16 would stop growing at 256."""
    x = torch.ones(4096, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "CPU_CHUNK_BYTES", 2 * 4)
        total = linear_cross_entropy_sum(x, weight, torch.zeros(4096, dtype=torch.int64))
    total.backward()
    assert total.dtype == torch.float32
    assert weight.grad.tolist() == [[-2048.0], [2048.0]]


class Largest(TorchDispatchMode):
    """Notes the most elements that any operation returned in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_no_tensor_is_larger_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CPU_CHUNK_BYTES", 64 * VOCAB * 8)
    x, weight, labels = inputs(1024)
    with Largest() as largest:
        linear_cross_entropy_sum(x, weight, labels).backward()
    assert largest.elements == max(64 * VOCAB, 1024 * WIDTH)


class Plain(nn.Module):
    """A user's own model: logits from ids, and no more."""

    def __init__(self, wrap: str = "tensor") -> None:
        super().__init__()
        self.embedding, self.head, self.wrap = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB), wrap

    def forward(self, input_ids: Tensor) -> object:
        logits = self.head(self.embedding(input_ids))
        return {"tensor": logits, "pooled": logits.mean(1), "dict": {"x": logits}}[self.wrap]


IDS = torch.arange(12).reshape(2, 6)


def test_any_module_that_returns_logits_can_be_trained() -> None:
    model = Plain()
    found = token_loss_sum(model, IDS, IDS.roll(-1, 1))
    expected = F.cross_entropy(model(IDS).flatten(0, 1), IDS.roll(-1, 1).flatten(), reduction="sum")
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("wrap", "found"), [("pooled", r"shape \(2, 17\)"), ("dict", "a dict")])
def test_an_output_that_is_no_logits_is_named(wrap: str, found: str) -> None:
    with pytest.raises(ModelError, match=f"Plain returned {found}"):
        token_loss_sum(Plain(wrap), IDS, IDS)


def test_gpt_is_asked_for_its_own_loss() -> None:
    config = ModelConfig(d_model=16, num_layers=1, num_heads=2, d_ff=32, dtype="fp64")
    model = build_model(config, vocab_size=VOCAB, seq_length=6, seed=0)
    expected = F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten(), reduction="sum")
    torch.testing.assert_close(token_loss_sum(model, IDS, IDS), expected)


@pytest.mark.parametrize("where", ["input", "label"])
def test_a_token_outside_the_vocabulary_is_named(where: str) -> None:
    config = ModelConfig(d_model=16, num_layers=1, num_heads=2, d_ff=32)
    model = build_model(config, vocab_size=VOCAB, seq_length=6, seed=0)
    bad = IDS.clone()
    bad[1, 2] = VOCAB
    with pytest.raises(ModelError, match="token id 17 is outside the model's vocabulary of 17"):
        token_loss_sum(model, *((bad, IDS) if where == "input" else (IDS, bad)))


def test_an_index_error_of_another_cause_is_left_alone() -> None:
    class Broken(Plain):
        def forward(self, input_ids: Tensor) -> object:
            return [][1]

    with pytest.raises(IndexError):
        token_loss_sum(Broken(), IDS, IDS)
