"""Turns the data folder into rows of tokens: reads, filters, tokenises, holds out, mixes and packs.

    python -m models.tiny.training.prepare --data DIR --out ROWS.npz

A document is one chat, `BOS<User>…<Assistant>…EOS…`, or now and then bare text, `BOS…EOS`. Rows of `ROW_TOKENS`
hold whole documents (best fit) and end in padding. Beside every token stands how much its prediction counts,
in tenths: answers 10, questions 2, system texts and padding 0.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import random
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from . import poems
from .build_tokenizer import BOS, EOS, PAD

MODEL_FOLDER = Path(__file__).resolve().parents[1]
ROW_TOKENS = 512
MAX_ANSWER_TOKENS = 240  # so that a sampled answer ends before 300
ANSWER, QUESTION = 10, 2  # weights, in tenths
PERSONA_COPIES, SMALL_TALK_COPIES = 6, 60
FIVE_COPIES, SEVEN_COPIES = 5, 2
SYSTEM_SHARE, BARE_SHARE, JOINED_SHARE = 0.03, 0.04, 0.12
HELD_OUT_ONE_IN = 300  # documents, by their first question; poems by their text
SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are Rorqual-Tiny, a small demonstration model.",
    "Answer briefly.",
    "You are a friendly storyteller.",
    "You are a helpful AI assistant.",
    "Be kind and clear.",
    "You are a poet.",
    "Use simple words.",
    "You are Rorqual-Tiny.",
    "你是一个诗人。",
    "You are a helpful assistant",
)

Tokens = NDArray[np.uint16]


@dataclass(slots=True)
class Documents:
    """Token ids and weights of many documents, each an array of its own; the held-out ones as JSON objects."""

    tokens: list[Tokens]
    weights: list[NDArray[np.uint8]]
    held_out: list[dict[str, object]]
    num_dropped: int = 0

    @classmethod
    def empty(cls) -> Documents:
        return cls([], [], [])

    def extend(self, other: Documents) -> None:
        self.tokens += other.tokens
        self.weights += other.weights
        self.held_out += other.held_out
        self.num_dropped += other.num_dropped


def is_held_out(text: str) -> bool:
    digest = hashlib.blake2b(text.strip().lower().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def eval_prompts(path: Path = MODEL_FOLDER / "eval-prompts.jsonl") -> frozenset[str]:
    return frozenset(json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines())


def repeats(ids: Sequence[int], size: int = 8, times: int = 3) -> bool:
    """Whether a run of `size` tokens comes `times` times: such an answer teaches loops."""
    if len(ids) < size * 2:
        return False
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(ids, dtype=np.uint64), size)
    powers = np.array([pow(1_000_003, i, 1 << 64) for i in range(size)], dtype=np.uint64)
    _, counts = np.unique((windows * powers).sum(1, dtype=np.uint64), return_counts=True)
    return int(counts.max()) >= times


class Writer:
    """Writes chats as token ids in the chat template's layout."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        token_id = self._tokenizer.token_to_id
        self.bos, self.eos, self.pad = token_id(BOS), token_id(EOS), token_id(PAD)
        self._user, self._assistant = token_id("<｜User｜>"), token_id("<｜Assistant｜>")
        self._rng = rng

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def chat(self, turns: Sequence[tuple[str, list[int]]], system: str = "") -> tuple[Tokens, NDArray[np.uint8]]:
        """`turns` are (question, answer's tokens)."""
        start = self.encode(system) if system else []
        ids, weights = [self.bos, *start], [0] * (1 + len(start))
        for question, answer in turns:
            asked = [self._user, *self.encode(question), self._assistant]
            ids += asked + answer + [self.eos]
            weights += [QUESTION] * len(asked) + [ANSWER] * (len(answer) + 1)
        return np.array(ids, dtype=np.uint16), np.array(weights, dtype=np.uint8)

    def bare(self, answer: list[int]) -> tuple[Tokens, NDArray[np.uint8]]:
        ids = [self.bos, *answer, self.eos]
        return np.array(ids, dtype=np.uint16), np.array([0] + [ANSWER] * (len(ids) - 1), dtype=np.uint8)

    def system(self) -> str:
        return self._rng.choice(SYSTEM_TEXTS) if self._rng.random() < SYSTEM_SHARE else ""


def read_english(path: Path, part: int, parts: int, copies: int, limit: int | None) -> Documents:
    """Every `parts`-th document of a shard from number `part` on; drops long, looping and held-out ones."""
    rng = random.Random(f"{path.name} {part}")
    writer, held_out_prompts, out = Writer(MODEL_FOLDER, rng), eval_prompts(), Documents.empty()
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number % parts != part:
                continue
            if limit is not None and number >= limit:
                break
            document = json.loads(line)
            messages = document["messages"]
            turns = [
                (ask["content"], answer["content"]) for ask, answer in zip(messages[::2], messages[1::2], strict=True)
            ]
            if any(question.strip() in held_out_prompts for question, _ in turns):
                out.num_dropped += 1
                continue
            if document["kind"] != "persona" and is_held_out(turns[0][0]):
                out.held_out.append(document)
                continue
            encoded = [(question, writer.encode(answer)) for question, answer in turns]
            if any(len(ids) > MAX_ANSWER_TOKENS or repeats(ids) for _, ids in encoded):
                out.num_dropped += 1
                continue
            for _ in range(copies):
                bare = document["kind"] == "story" and rng.random() < BARE_SHARE
                tokens, weights = writer.bare(encoded[0][1]) if bare else writer.chat(encoded, writer.system())
                if len(tokens) <= ROW_TOKENS:
                    out.tokens.append(tokens)
                    out.weights.append(weights)
    return out


def read_chinese(path: Path, limit: int | None) -> Documents:
    """The poems as answers to worded requests, and the hand-written small talk, some of both in two turns."""
    rng = random.Random(path.name)
    writer, out = Writer(MODEL_FOLDER, rng), Documents.empty()
    single = {char for char in (chr(code) for code in range(0x3400, 0xA000)) if len(writer.encode(char)) == 1}
    everything = poems.read_poems(path)
    kept = poems.covered(everything, single)
    out.num_dropped = len(everything) - len(kept)
    kept = kept[:limit]
    requests = poems.Requests(everything, eval_prompts())
    told: list[tuple[str, list[int]]] = []
    for poem in kept:
        answer = writer.encode(poem.text)
        if is_held_out(poem.text):
            messages = [
                {"role": "user", "content": requests.word(poem, rng, 1)[0]},
                {"role": "assistant", "content": poem.text},
            ]
            out.held_out.append({"messages": messages, "kind": f"quatrain-{poem.chars_per_line}"})
            continue
        copies = FIVE_COPIES if poem.chars_per_line == 5 else SEVEN_COPIES
        told += [(request, answer) for request in requests.word(poem, rng, copies)]
        if rng.random() < BARE_SHARE:
            tokens, weights = writer.bare(answer)
            out.tokens.append(tokens)
            out.weights.append(weights)
    held_out_prompts = eval_prompts()
    talk = [(ask, writer.encode(answer)) for asks, answers in poems.SMALL_TALK for ask in asks for answer in answers]
    for turn in told + [turn for turn in talk if turn[0] not in held_out_prompts] * SMALL_TALK_COPIES:
        tokens, weights = writer.chat([turn], writer.system())
        out.tokens.append(tokens)
        out.weights.append(weights)
    return out


def join_some(documents: Documents, bos: int, rng: random.Random) -> None:
    """Make two-turn chats out of pairs of short chats, whatever their languages; the second loses its BOS."""
    short = [
        i for i, tokens in enumerate(documents.tokens) if len(tokens) <= 170 and documents.weights[i][1] == QUESTION
    ]
    chosen = rng.sample(short, int(len(short) * JOINED_SHARE) // 2 * 2)
    for first, second in zip(chosen[::2], chosen[1::2], strict=True):
        documents.tokens[first] = np.concatenate((documents.tokens[first], documents.tokens[second][1:]))
        documents.weights[first] = np.concatenate((documents.weights[first], documents.weights[second][1:]))
    gone = set(chosen[1::2])
    documents.tokens = [t for i, t in enumerate(documents.tokens) if i not in gone]
    documents.weights = [w for i, w in enumerate(documents.weights) if i not in gone]


def best_fit(lengths: Sequence[int], room: int, rng: random.Random) -> Iterator[list[int]]:
    """Fill rows of `room`: a random document first, then always the longest that still fits. Yields document numbers."""
    order = list(range(len(lengths)))
    rng.shuffle(order)
    buckets: dict[int, deque[int]] = defaultdict(deque)
    for i in order:
        buckets[lengths[i]].append(i)
    there = sum(1 << length for length in buckets)  # bit n is set while a document of n tokens is left
    used = bytearray(len(lengths))
    for first in order:
        if used[first]:
            continue
        row, left, length = [], room, lengths[first]
        while length > 0:
            # `first` is the earliest one left of all, so it heads its bucket.
            i = buckets[length].pop() if row else buckets[length].popleft()
            used[i] = 1
            if not buckets[length]:
                there &= ~(1 << length)
            row.append(i)
            left -= length
            length = (there & ((1 << (left + 1)) - 1)).bit_length() - 1
        yield row


def pack(documents: Documents, pad: int, rng: random.Random) -> tuple[Tokens, NDArray[np.uint8]]:
    """-> tokens and weights, [num_rows, ROW_TOKENS]."""
    rows = list(best_fit([len(t) for t in documents.tokens], ROW_TOKENS, rng))
    rng.shuffle(rows)
    tokens = np.full((len(rows), ROW_TOKENS), pad, dtype=np.uint16)
    weights = np.zeros((len(rows), ROW_TOKENS), dtype=np.uint8)
    for r, row in enumerate(rows):
        start = 0
        for i in row:
            end = start + len(documents.tokens[i])
            tokens[r, start:end], weights[r, start:end] = documents.tokens[i], documents.weights[i]
            start = end
    return tokens, weights


def build(
    data: Path, workers: int, limit: int | None = None
) -> tuple[Tokens, NDArray[np.uint8], list[dict[str, object]], int]:
    """-> tokens, weights, held-out documents, number of dropped documents. A function of the data alone."""
    shards = sorted(data.glob("teacher-[0-9].jsonl.xz"))
    if not shards:
        raise FileNotFoundError(f"{data} holds no teacher-*.jsonl.xz")
    parts = 4
    documents = Documents.empty()
    with ProcessPoolExecutor(workers) as pool:
        jobs = [pool.submit(read_chinese, data / "jueju.tsv.xz", limit)]
        jobs += [pool.submit(read_english, shard, part, parts, 1, limit) for shard in shards for part in range(parts)]
        jobs.append(pool.submit(read_english, data / "teacher-persona.jsonl.xz", 0, 1, PERSONA_COPIES, limit))
        for job in jobs:
            documents.extend(job.result())
    rng = random.Random(0)
    writer = Writer(MODEL_FOLDER, rng)
    join_some(documents, writer.bos, rng)
    tokens, weights = pack(documents, writer.pad, rng)
    return tokens, weights, documents.held_out, documents.num_dropped


def write_held_out(documents: Iterable[dict[str, object]], folder: Path, english: int, chinese: int) -> None:
    """Write a sample of the held-out documents, English and quatrains apart, as JSON lines."""
    ordered = sorted(documents, key=lambda d: json.dumps(d, ensure_ascii=False))
    random.Random(0).shuffle(ordered)
    for name, count, wanted in (("held-out-en.jsonl", english, False), ("held-out-zh.jsonl", chinese, True)):
        picked = [d for d in ordered if str(d["kind"]).startswith("quatrain") == wanted][:count]
        text = "".join(json.dumps(d, ensure_ascii=False) + "\n" for d in picked)
        (folder / name).write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare the embedded model's training rows.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="rows.npz; the held-out samples go beside it")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=int, help="documents of each shard, for a trial")
    args = parser.parse_args()
    tokens, weights, held_out, num_dropped = build(args.data, args.workers, args.limit)
    write_held_out(held_out, args.out.parent, english=300, chinese=200)
    with args.out.open("wb") as file:
        np.savez(file, tokens=tokens, weights=weights)
    filled = float((tokens != 2).mean())
    print(
        f"{len(tokens)} rows, {tokens.size * filled / 1e6:.1f} M tokens, {filled:.3f} filled, {len(held_out)} held out, {num_dropped} dropped"
    )


if __name__ == "__main__":
    main()
