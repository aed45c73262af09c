"""A small GPT: pre-norm blocks, rotary positions, SwiGLU; it knows nothing of quantization."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Args:
        layers: Number of blocks.
        heads: Attention heads per block; ``dim`` must be a multiple of ``2 * heads``.
        dim: Width of the residual stream. Multiples of 128 fill the blocks of every format.
        context: Longest sequence, in tokens.
        vocabulary: Number of tokens; 256 for plain bytes.
    """

    layers: int
    heads: int
    dim: int
    context: int
    vocabulary: int = 256

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim must be a multiple of 2 * heads = {2 * self.heads}, got {self.dim}; "
                "change dim or heads"
            )

    @property
    def hidden(self) -> int:
        """Width of the MLP: 8/3 of ``dim``, rounded up to a multiple of 128."""
        return 128 * math.ceil(self.dim * 8 / 3 / 128)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x_i, x_(i + n/2)) of each head by their position's angle (arXiv:2104.09864).

    Args:
        x: Queries or keys, [batch, heads, length, n].
        cos: Cosine of the angles, [length, n / 2].
        sin: Sine of the angles, [length, n / 2].
    """
    first, second = x.chunk(2, dim=-1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    return torch.cat(turned, dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps [batch, length, dim] to the same shape."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202): ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, length, dim] to the same shape."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps [batch, length, dim] to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Predicts the next token; the output head ``lm_head`` has weights of its own.

    Args:
        config: The shape.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocabulary, bias=False)
        pairs = config.dim // config.heads // 2
        frequencies = 10_000.0 ** (-torch.arange(pairs) / pairs)
        angles = torch.outer(torch.arange(config.context), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialize()

    def _initialize(self) -> None:
        """Normal weights; the two layers that write to the residual stream start smaller."""
        for name, param in self.named_parameters():
            if param.ndim == 2:
                to_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
                depth = 2 * self.config.layers if to_stream else 1
                nn.init.normal_(param, std=0.02 / math.sqrt(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens, int64 [batch, length], to logits, [batch, length, vocabulary]."""
        length = tokens.shape[1]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.lm_head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, temperature: float = 0.8) -> Tensor:
        """Returns ``tokens``, [batch, length], with ``count`` sampled tokens appended."""
        for _ in range(count):
            logits = self(tokens[:, -self.config.context :])[:, -1].float() / temperature
            tokens = torch.cat((tokens, torch.multinomial(logits.softmax(-1), 1)), dim=1)
        return tokens
