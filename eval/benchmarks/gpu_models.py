"""ResNet-50 and GPT-2 small in plain torch, with the parameters of torchvision's and transformers', for machines that
lack these: what they compute is the same but for how they are initialized."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Width and number of the bottlenecks of each stage of ResNet-50 (He et al. 2016, table 1)."""
VOCABULARY, PLACES, WIDTH, LAYERS, HEADS = 50257, 1024, 768, 12, 12
"""Of GPT-2 small (Radford et al. 2019, table 2)."""


def _convolution(into: int, out: int, side: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(into, out, side, stride, side // 2, bias=False), nn.BatchNorm2d(out))


class Bottleneck(nn.Module):
    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _convolution(into, width, 1), _convolution(width, width, 3, stride)
        self.third = _convolution(width, 4 * width, 1)
        self.past = _convolution(into, 4 * width, 1, stride) if into != 4 * width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.second(functional.relu(self.first(x))))
        return functional.relu(self.third(y) + self.past(x))


def resnet50() -> nn.Module:
    """[N, 3, 224, 224] to [N, 1000]; 25,557,032 parameters."""
    blocks, into = [], 64
    for stage, (width, count) in enumerate(STAGES):
        for number in range(count):
            blocks.append(Bottleneck(into, width, 2 if stage and not number else 1))
            into = 4 * width
    return nn.Sequential(_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *blocks,
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 1000))  # fmt: skip


class GPT2(nn.Module):
    """Tokens [N, T] to logits [N, T, VOCABULARY]; 124,439,808 parameters, with one matrix of tokens at both ends."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(PLACES, WIDTH)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.dropout(self.tokens(tokens) + self.places.weight[:length])
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return functional.linear(self.norm(x), self.tokens.weight)


def gpt2_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of every token behind those before it."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tokens_of(rows: int, length: int, device: torch.device) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), device=device)
