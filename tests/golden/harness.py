"""Running our model the way an executor would, beside transformers' own models as the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from executor.kv_cache import BLOCK_SIZE, LatentCache
from executor.model.batch import Form, build_batch
from executor.model.deepseek import DeepseekModel

from .checkpoints import V2, random_tensors


def oracle(config: Mapping[str, Any], *, seed: int = 0) -> Any:
    """transformers' model of `config` with random weights, float32."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

    raw = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    is_v2 = config["model_type"] == V2["model_type"]
    classes = (DeepseekV2Config, DeepseekV2ForCausalLM) if is_v2 else (DeepseekV3Config, DeepseekV3ForCausalLM)
    # No token ends a sequence: generation runs to its length.
    model = classes[1](classes[0](**raw, bos_token_id=None, eos_token_id=None, pad_token_id=0)).eval()
    load_into(model, random_tensors(config, seed=seed))
    return model


def load_into(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put published tensors into transformers' model, which keeps a layer's experts in two stacks."""
    state = dict(tensors)
    num_experts = model.config.n_routed_experts
    for key in model.state_dict():
        prefix, _, last = key.rpartition("mlp.experts.")
        if last == "gate_up_proj":
            state[key] = torch.stack(
                [
                    torch.cat([state.pop(f"{prefix}mlp.experts.{e}.{part}_proj.weight") for part in ("gate", "up")])
                    for e in range(num_experts)
                ]
            )
        elif last == "down_proj":
            state[key] = torch.stack(
                [state.pop(f"{prefix}mlp.experts.{e}.down_proj.weight") for e in range(num_experts)]
            )
    model.load_state_dict(state)


def save(model: Any, folder: Path, *, max_shard_size: str | None = None) -> Path:
    """save_pretrained, whole or in many shards."""
    model.save_pretrained(folder, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
    return folder


def greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """transformers' own generate."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def random_tokens(num: int, *, seed: int, vocab: int = 211) -> list[int]:
    return torch.randint(1, vocab, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


class Blocks:
    """Block ids handed out in a shuffled order; what nobody holds is NaN in the cache."""

    def __init__(self, cache: LatentCache, seed: int = 0) -> None:
        self.cache = cache
        self.free = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        cache.fill_(float("nan"))

    def take(self, num_tokens: int) -> torch.Tensor:
        num = -(-num_tokens // BLOCK_SIZE)
        taken, self.free = self.free[:num], self.free[num:]
        assert len(taken) == num
        return torch.tensor(taken, dtype=torch.int32)

    def give(self, table: torch.Tensor) -> None:
        for block in table.tolist():
            self.cache.storage[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = float("nan")
            self.free.append(block)


def new_cache(model: DeepseekModel, num_blocks: int = 24) -> LatentCache:
    cache = LatentCache(model.config, num_blocks, dtype=model.dtype)
    cache.fill_(float("nan"))
    return cache


def prefill_logits(model: DeepseekModel, tokens: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """Logits of every position, computed in prefill chunks of the given sizes, one a pass: [len(tokens), vocab]."""
    cache = new_cache(model)
    table = Blocks(cache, seed=len(chunks)).take(len(tokens))
    out: list[torch.Tensor] = []
    start = 0
    for size in chunks:
        batch = build_batch([(tokens[start : start + size], start, table, Form.PREFILL)], range(size))
        out.append(model.forward(batch, cache).logits)
        start += size
    assert start == len(tokens)
    return torch.cat(out)


def prefill_in_chunks(model: DeepseekModel, tokens: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Logits of every position, once for each chunk size: all copies advance together, a chunk each a pass."""
    blocks_each = -(-len(tokens) // BLOCK_SIZE)
    cache = new_cache(model, blocks_each * len(sizes))
    blocks = Blocks(cache)
    tables = [blocks.take(len(tokens)) for _ in sizes]
    logits: list[list[torch.Tensor]] = [[] for _ in sizes]
    start = [0] * len(sizes)
    while any(s < len(tokens) for s in start):
        parts = [(i, tokens[start[i] : start[i] + size]) for i, size in enumerate(sizes) if start[i] < len(tokens)]
        num_rows = sum(len(part) for _, part in parts)
        batch = build_batch([(part, start[i], tables[i], Form.PREFILL) for i, part in parts], range(num_rows))
        rows = model.forward(batch, cache).logits.split([len(part) for _, part in parts])
        for (i, part), part_logits in zip(parts, rows, strict=True):
            logits[i].append(part_logits)
            start[i] += len(part)
    return [torch.cat(parts) for parts in logits]


def decode_logits(model: DeepseekModel, tokens: Sequence[int]) -> torch.Tensor:
    """Logits of every position, one token a pass in the decode form."""
    cache = new_cache(model)
    table = Blocks(cache).take(len(tokens))
    return torch.cat(
        [model.forward(build_batch([([token], i, table, Form.DECODE)]), cache).logits for i, token in enumerate(tokens)]
    )


@dataclass
class Served:
    """One request of a simulated serving run."""

    prompt: list[int]
    num_tokens: int  # to generate
    joins: int  # the step it is admitted at
    chunks: list[int]  # sizes of its prefill chunks
    made: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # of each token made
    computed: int = 0
    table: torch.Tensor | None = None

    @property
    def is_done(self) -> bool:
        return len(self.made) == self.num_tokens


def serve(model: DeepseekModel, sequences: Sequence[Served], *, num_blocks: int = 24, seed: int = 0) -> int:
    """Run sequences together as an executor does: each step computes the next chunk of every sequence that is still in
    its prompt and one token of every other; sequences join at their step and leave when done, and their
    blocks go to others at once. Returns the number of steps that mixed both forms."""
    cache = LatentCache(model.config, num_blocks, dtype=model.dtype)
    blocks = Blocks(cache, seed)
    mixed = step = 0
    while not all(seq.is_done for seq in sequences):
        parts: list[tuple[list[int], int, torch.Tensor, Form]] = []
        rows: list[int] = []
        owners: list[Served] = []
        num_rows = 0
        for seq in sequences:
            if seq.is_done or step < seq.joins:
                continue
            if seq.table is None:
                seq.table = blocks.take(len(seq.prompt) + seq.num_tokens)
            if seq.computed < len(seq.prompt):
                size = min(seq.chunks.pop(0) if seq.chunks else BLOCK_SIZE, len(seq.prompt) - seq.computed)
                tokens, form = seq.prompt[seq.computed : seq.computed + size], Form.PREFILL
            else:
                tokens, form = seq.made[-1:], Form.DECODE
            parts.append((tokens, seq.computed, seq.table, form))
            num_rows += len(tokens)
            seq.computed += len(tokens)
            if seq.computed >= len(seq.prompt):
                rows.append(num_rows - 1)
                owners.append(seq)
        step += 1
        if not parts:
            continue
        mixed += len({part[3] for part in parts}) == 2
        logits = model.forward(build_batch(parts, rows), cache).logits
        for i, seq in enumerate(owners):
            seq.logits.append(logits[i])
            seq.made.append(int(logits[i].argmax()))
            if seq.is_done:
                assert seq.table is not None
                blocks.give(seq.table)
    return mixed
