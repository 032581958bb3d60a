"""The built-in decoder: pre-norm blocks, causal attention, rotary or learned positions, an optionally tied head.

Shapes: B sequences, T tokens, N = B*T, H heads, D width of a head, C = H*D width of the residual stream, V vocabulary.
The module stays plain: compiling, checkpointing activations and sharding are applied to it from outside.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flextrain.config import ModelConfig
from flextrain.errors import ModelError
from flextrain.model.loss import linear_cross_entropy_sum

ROTARY_BASE = 10_000.0  # wavelengths from 2π to 2π·base tokens (Su et al. 2021, RoFormer, section 3.2.2)
NORM_EPS = 1e-5
INIT_STD = 0.02


def rotate(x_BTnHD: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) of a head by its position times the pair's frequency.

    Angles are computed here, in at least fp32, rather than kept in a buffer: nothing to build on a meta device, and
    nothing that sharded mixed precision could round to bf16 on the way in.
    """
    steps, width = x_BTnHD.shape[1], x_BTnHD.shape[-1]
    wide = torch.promote_types(x_BTnHD.dtype, torch.float32)
    exponents = torch.arange(0, width, 2, device=x_BTnHD.device, dtype=wide) / width
    positions_T = torch.arange(steps, device=x_BTnHD.device, dtype=wide)
    angles = torch.outer(positions_T, ROTARY_BASE**-exponents)[:, None, None, :]
    cos, sin = angles.cos(), angles.sin()
    left, right = x_BTnHD.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x_BTnHD.dtype)


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=NORM_EPS)
    return nn.LayerNorm(config.d_model, eps=NORM_EPS, bias=False)


class Attention(nn.Module):
    """Causal self-attention; PyTorch picks the kernel."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.rotary = config.num_heads, config.positions == "rotary"
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv_BT3HD = self.qkv(x_BTC).unflatten(-1, (3, self.num_heads, -1))
        qk_BT2HD, v_BTHD = qkv_BT3HD[:, :, :2], qkv_BT3HD[:, :, 2]
        if self.rotary:
            qk_BT2HD = rotate(qk_BT2HD)
        q_BHTD, k_BHTD, v_BHTD = (z.transpose(1, 2) for z in (*qk_BT2HD.unbind(2), v_BTHD))
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        mixed: Tensor = self.out(y_BHTD.transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    """GELU (tanh form, as GPT-2) or SwiGLU (Shazeer 2020), whose gate and value share one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.activation == "swiglu"
        self.up = nn.Linear(config.d_model, config.d_ff * (2 if self.gated else 1), bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        hidden = self.up(x_BTC)
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        y_BTC: Tensor = self.down(hidden)
        return y_BTC


class Block(nn.Module):
    """Attention, then feed-forward, each on a normalised copy and added back."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = make_norm(config), Attention(config)
        self.feed_forward_norm, self.feed_forward = make_norm(config), FeedForward(config)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC))
        y_BTC: Tensor = x_BTC + self.feed_forward(self.feed_forward_norm(x_BTC))
        return y_BTC


class GPT(nn.Module):
    """A decoder over `vocab_size` tokens; with learned positions its context ends at `seq_length`."""

    returns_loss_sum = True  # forward(ids, labels) is a sum of token losses: see model.loss.token_loss_sum

    def __init__(self, config: ModelConfig, *, vocab_size: int, seq_length: int) -> None:
        super().__init__()
        self.config, self.vocab_size, self.seq_length = config, vocab_size, seq_length
        self.embedding = nn.Embedding(vocab_size, config.d_model)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(seq_length, config.d_model) if learned else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.d_model, vocab_size, bias=False)
        self.to(torch.float64 if config.dtype == "fp64" else torch.float32)
        self.init_weights()

    def tie_weights(self) -> None:
        """Let the head be the embedding where the configuration says so; `to_empty()` parts them."""
        if self.config.tie_head:
            self.head.weight = self.embedding.weight

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Tie the head and draw every weight as GPT-2 did: N(0, 0.02), residual projections scaled by 1/sqrt(2 L).

        Draws fp32 values on the CPU in the order of `named_parameters`, so one seed gives one model in any dtype.
        After `to_empty()` this makes a model built on the meta device whole.
        """
        self.tie_weights()
        residual_std = INIT_STD / (2 * self.config.num_layers) ** 0.5
        for name, weight in self.named_parameters():
            if weight.is_meta:
                continue
            if weight.dim() < 2:
                weight.fill_(1.0)  # the norms' gains: nothing here has a bias
                continue
            std = residual_std if name.endswith(("attention.out.weight", "feed_forward.down.weight")) else INIT_STD
            if weight.dtype == torch.float32 and weight.device.type == "cpu":
                weight.normal_(std=std, generator=generator)
            else:
                weight.copy_(torch.empty(weight.shape, device="cpu").normal_(std=std, generator=generator))

    def forward(self, input_ids_BT: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        """Logits (B, T, V); with labels, the sum of their cross-entropies in nats, a scalar of at least fp32.

        labels_BT[b, t] is the token after input_ids_BT[b, t], or -100 for one that does not count.
        Raises ModelError where T exceeds the learned positions.
        """
        x_BTC = self.embedding(input_ids_BT)
        if self.positions is not None:
            x_BTC = x_BTC + self.positions(self._position_ids(input_ids_BT))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        x_BTC = self.norm(x_BTC)
        if labels_BT is None:
            logits_BTV: Tensor = self.head(x_BTC)
            return logits_BTV
        return linear_cross_entropy_sum(x_BTC.flatten(0, 1), self.head.weight, labels_BT.flatten())

    def _position_ids(self, input_ids_BT: Tensor) -> Tensor:
        steps = input_ids_BT.shape[1]
        if steps > self.seq_length:
            raise ModelError(
                f"a sequence of {steps} tokens does not fit a model with {self.seq_length} learned positions",
                number=2,
                remedy="raise data.seq_length before training, shorten the input, or use model.positions: rotary",
            )
        return torch.arange(steps, device=input_ids_BT.device)
