"""A decoder language model in plain PyTorch. It knows nothing of devices, sharding or pipelines.

A pipeline stage is the same class with fewer parts: some of the layers, and the embedding or the output head only at
the ends. Layers keep their global index as their key, so that a parameter has one name ("layers.3.attention.wq.weight")
wherever it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.config import DecoderConfig


class Decoder(nn.Module):
    """Embedding, decoder blocks, norm and an untied output head; or a contiguous part of that.

    ``layers`` are the global indices of the blocks to hold; ``first`` adds the embedding, ``last`` norm and head.
    """

    def __init__(
        self, config: DecoderConfig, vocab_size: int, layers: range, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.rope_theta = config.rope_theta
        self.embedding = nn.Embedding(vocab_size, config.dim) if first else None
        self.layers = nn.ModuleDict({str(index): Block(config) for index in layers})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps) if last else None
        self.output = nn.Linear(config.dim, vocab_size, bias=False) if last else None

    def forward(self, x: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Tokens [B, S] int64 (first stage) or hidden states [B, S, dim] to the same or logits [B, S, vocab] (last).

        ``positions`` [B, S] count from 0 inside each document; ``segments`` [B, S] number the documents packed in a
        row: a token attends to earlier tokens of its own segment only.
        """
        hidden = x if self.embedding is None else self.embedding(x)
        cos, sin = rotation(positions, self.head_dim, self.rope_theta)
        mask = causal_mask(segments)
        for block in self.layers.values():
            hidden = block(hidden, cos, sin, mask)
        if self.norm is None or self.output is None:
            return hidden
        return self.output(self.norm(hidden))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), cos, sin, mask)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions. Heads are counted from the width, whatever part of it is here."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        kv_dim = config.num_kv_heads * self.head_dim
        self.wq = nn.Linear(config.dim, config.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * self.head_dim, config.dim, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, heads, S, head_dim]
            for projection in (self.wq, self.wk, self.wv)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))


def rotation(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of RoPE's angles (arXiv:2104.09864), each [B, 1, S, head_dim / 2] in float32.

    Computed from the positions in every forward pass, which is cheap, so that there is no table to keep or restore.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions[:, None, :, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of ``heads`` [B, heads, S, head_dim] by its angle, at least in float32."""
    left, right = heads.to(torch.promote_types(heads.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(heads.dtype)


def causal_mask(segments: Tensor) -> Tensor:
    """True where attention is allowed, [B, 1, S, S]: earlier or same position, same segment.

    Every token may look at itself, padding too, so no row of the softmax is empty.
    """
    same = segments[:, :, None] == segments[:, None, :]
    return same.tril()[:, None]
