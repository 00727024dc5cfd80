"""Samples from the model in plain torch, many prompts at once: what training uses to look at its own work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .model import TinyModel


def nucleus(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """logits [B, V], temperature and top_p [B] -> probabilities [B, V] of the likeliest tokens that reach top_p."""
    probs = torch.softmax(logits / temperature[:, None], -1)
    ordered, index = probs.sort(-1, descending=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p[:, None], 0.0)
    return torch.zeros_like(probs).scatter(1, index, ordered)


@torch.no_grad()
def generate(
    model: TinyModel,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: Sequence[float],
    top_p: Sequence[float],
    max_tokens: int,
    eos: int,
    seed: int,
    repetition_penalty: Sequence[float] | None = None,
) -> list[list[int]]:
    """Continue each prompt by at most `max_tokens`; an answer that stopped by itself ends with `eos`.

    A repetition penalty divides the positive logits of tokens that came before, prompt included, and multiplies the
    negative ones. Prompts are fed a token a step beside the others' sampling, so a batch needs no padding.
    """
    device = model.embedding.device
    rows, longest = len(prompts), max(map(len, prompts))
    length = longest + max_tokens
    given = torch.full((rows, length + 1), -1, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        given[row, : len(prompt)] = torch.tensor(prompt)
    given = given.to(device)
    temperatures = torch.tensor(temperature, device=device)
    top_ps = torch.tensor(top_p, device=device)
    starts = torch.tensor([len(p) for p in prompts], device=device)
    penalties = torch.tensor(repetition_penalty or [1.0] * rows, device=device)[:, None]
    seen = torch.zeros(rows, model.s.vocab_size, dtype=torch.bool, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    cache = model.new_cache(rows, length)
    made = given.clone()
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    for position in range(length - 1):
        fed = made[:, position].clamp(min=0)
        logits = model.step(fed, cache, position)
        seen.scatter_(1, fed[:, None], True)
        logits = torch.where(seen, torch.where(logits > 0, logits / penalties, logits * penalties), logits)
        drawn = torch.multinomial(nucleus(logits, temperatures, top_ps), 1, generator=generator)[:, 0]
        free = given[:, position + 1] < 0
        made[:, position + 1] = torch.where(free, drawn, given[:, position + 1])
        done |= (free & (drawn == eos)) | (position + 2 - starts >= max_tokens)
        if position % 16 == 0 and bool(done.all()):
            break
    answers = []
    for row, prompt in enumerate(prompts):
        tokens = [t for t in made[row, len(prompt) : len(prompt) + max_tokens].tolist() if t >= 0]
        answers.append(tokens[: tokens.index(eos) + 1] if eos in tokens else tokens)
    return answers
