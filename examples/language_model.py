"""A small decoder-only language model over bytes: plain PyTorch, nothing in it knows about fxfuse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # one symbol a byte
SOFT_CAP = 15.0


class Attention(nn.Module):
    """Causal multi-head self-attention, (B, T, C) -> (B, T, C)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class GeluMLP(nn.Module):
    """GPT-2's: down(gelu(up(x))), with biases."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class SwiGLU(nn.Module):
    """Llama's: down(silu(gate(x)) * up(x)), gate and up projected apart."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PackedSwiGLU(nn.Module):
    """Phi-3's: the same from one projection, cut in two."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm layer. With ``layer_scale`` the MLP's branch enters the residual stream through a per-channel gain."""

    def __init__(self, dim: int, heads: int, mlp: nn.Module, layer_scale: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = mlp
        self.dropout = nn.Dropout(dropout)
        self.gamma = nn.Parameter(torch.full((dim,), 0.5)) if layer_scale else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        branch = self.mlp(self.norm2(x))
        return x + branch if self.gamma is None else x + self.gamma * branch


class LanguageModel(nn.Module):
    """Bytes (B, T) int64 -> logits (B, T, 256). The layers take their kind of MLP in turn; the embedding is tied to the head."""

    def __init__(self, layers: int = 6, dim: int = 128, heads: int = 4, context: int = 64, dropout: float = 0.1) -> None:
        super().__init__()
        mlps = [(GeluMLP, 4 * dim), (SwiGLU, 8 * dim // 3 // 16 * 16), (PackedSwiGLU, 8 * dim // 3 // 16 * 16)]
        self.context = context
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Parameter(torch.zeros(context, dim))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList()
        for i in range(layers):
            kind, hidden = mlps[i % 3]
            self.layers.append(Block(dim, heads, kind(dim, hidden), layer_scale=i % 3 == 1, dropout=dropout))
        self.norm = nn.RMSNorm(dim)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.04)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embed(tokens) + self.position[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embed.weight) * (1 / SOFT_CAP)
        return SOFT_CAP * torch.tanh(logits)  # Gemma 2's cap


@torch.no_grad()
def continue_text(model: LanguageModel, text: bytes, length: int, temperature: float = 0.7) -> bytes:
    """``text`` and ``length`` bytes more, sampled from the model in plain eager mode."""
    device = model.embed.weight.device
    tokens = torch.tensor(list(text), device=device)
    for _ in range(length):
        logits = model(tokens[-model.context :][None])[0, -1]
        tokens = torch.cat([tokens, torch.multinomial((logits / temperature).softmax(-1), 1)])
    return bytes(tokens.tolist())
