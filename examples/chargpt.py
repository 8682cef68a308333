"""A small GPT on the characters of any text file: `paceline run -n 2 examples/chargpt.py shakespeare.txt`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import paceline


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of a text, each with the same piece one character later."""

    def __init__(self, codes: torch.Tensor, context: int) -> None:
        self._codes = codes
        self._context = context

    def __len__(self) -> int:
        return (len(self._codes) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self._context
        return self._codes[start : start + self._context], self._codes[start + 1 : start + self._context + 1]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        deeper: torch.Tensor = self.mlp(self.norm2(x))
        return x + deeper


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int, depth: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight  # tied

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.token(codes) + self.position(torch.arange(codes.shape[1]))
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    options = parser.parse_args()

    text = options.text.read_text(encoding="utf-8", errors="replace")
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) for letter in text])
    cut = len(codes) * 9 // 10
    train_set, valid_set = Windows(codes[:cut], options.context), Windows(codes[cut:], options.context)
    if len(valid_set) == 0 or len(train_set) < options.batch:
        raise SystemExit(f"{options.text} has {len(text)} characters, too few for --batch {options.batch}")

    model = GPT(len(letters), options.context, options.width, options.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    session = paceline.Session(
        model, optimizer, data=train_set, global_batch=options.batch, seed=0, clip_norm=1.0, micro_batch=16
    )

    def loss_fn(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(before).flatten(0, 1), after.flatten())

    def validate(before: torch.Tensor, after: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": loss_fn(before, after)}

    for epoch in session.epochs(options.epochs):
        for batch in epoch:
            loss = session.step(loss_fn, batch)
            if session.is_main and session.steps % 50 == 0:
                print(f"step {session.steps}: loss {loss:.3f}", flush=True)
        scores = session.evaluate(validate, valid_set)
        if session.is_main:
            print(f"epoch {epoch.number}: validation loss {scores['loss']:.3f}", flush=True)


if __name__ == "__main__":
    main()
