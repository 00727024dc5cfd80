"""Adjusts the head so that a quatrain stays in Chinese where the form wants a character.

    python -m models.tiny.training.form --data DIR --model CHECKPOINT --out DIR

In a quatrain unlike the learned ones the model now and then finds an English piece likely. Whether the next token
is a Chinese character can be read off the last hidden state by a line, w . h: this fits w by logistic regression on
top of what the model already says, and subtracts w from the head's rows of all other tokens. Their order
among themselves is untouched, so English is the same to the bit of rounding.

It learns from quatrains the model has never seen: those left out of training for a rare character, up to that
character; and from small talk and English answers, so that w is quiet there. Runs on a CPU in minutes.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import poems
from .model import TinyModel, linear, load_checkpoint, save_checkpoint
from .negatives import Asker
from .prepare import MAX_ANSWER_TOKENS, MODEL_FOLDER, Writer, eval_prompts

PENALTY = 1e-4  # on |w|^2, a position


def examples(data: Path, writer: Writer, known: frozenset[str], counts: tuple[int, int]) -> list[list[int]]:
    """Documents as token ids: unseen quatrains up to the first unknown character, small talk, English chats."""
    rng = random.Random(0)
    everything = poems.read_poems(data / "jueju.tsv.xz")
    requests = poems.Requests(everything, eval_prompts())
    unseen = [poem for poem in everything if not all(char in known for line in poem.lines for char in line)]
    fives = [poem for poem in unseen if poem.chars_per_line == 5]
    sevens = rng.sample([poem for poem in unseen if poem.chars_per_line == 7], min(counts[0], len(unseen) - len(fives)))
    documents: list[list[int]] = []
    for poem in fives + sevens:
        text = poem.text
        end = next(i for i, char in enumerate(text) if char not in known and char not in "，。\n")
        if end < 2:
            continue
        (request,) = requests.word(poem, rng, 1)
        documents.append(writer.chat([(request, writer.encode(text[:end]))])[0].tolist()[:-1])
    for asks, answers in poems.SMALL_TALK:
        documents += [writer.chat([(rng.choice(asks), writer.encode(answer))])[0].tolist() for answer in answers]
    for shard in sorted(data.glob("teacher-*.jsonl.xz")):
        with lzma.open(shard, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if number >= counts[1] * 40:
                    break
                messages = json.loads(line)["messages"]
                answer = writer.encode(messages[1]["content"])
                if number % 40 == 0 and len(answer) <= MAX_ANSWER_TOKENS:
                    documents.append(writer.chat([(messages[0]["content"], answer)])[0].tolist())
    return documents


@torch.no_grad()
def features(
    model: TinyModel, documents: list[list[int]], han: Tensor, assistant: int
) -> tuple[Tensor, Tensor, Tensor]:
    """-> for each position of the answers: hidden state [n, D], log odds of a Chinese character [n], whether it is one."""
    hidden, odds, labels = [], [], []
    ordered = sorted(documents, key=len)
    for start in range(0, len(ordered), 64):
        batch = ordered[start : start + 64]
        tokens = torch.full((len(batch), max(map(len, batch))), 2)
        for row, ids in zip(tokens, batch, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        states = model.hidden(tokens, torch.zeros_like(tokens))
        for row, ids in enumerate(batch):
            begin = ids.index(assistant)
            h = states[row, begin : len(ids) - 1].float()
            logits = linear(h, model.head.float())
            hidden.append(h)
            odds.append(torch.logsumexp(logits[:, han], -1) - torch.logsumexp(logits[:, ~han], -1))
            labels.append(han[tokens[row, begin + 1 : len(ids)]])
    return torch.cat(hidden), torch.cat(odds), torch.cat(labels)


def fit(hidden: Tensor, odds: Tensor, labels: Tensor) -> Tensor:
    """w [D] that makes the log odds `odds + hidden @ w` fit `labels` best, kept short."""
    w = torch.zeros(hidden.shape[1], requires_grad=True)
    signs = labels.float() * 2 - 1
    optimiser = torch.optim.LBFGS([w], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = torch.nn.functional.softplus(-signs * (odds + hidden @ w)).mean() + PENALTY * w.square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    return w.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description="Adjust the head for the form of quatrains.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder with the trained model.safetensors")
    parser.add_argument("--out", type=Path, required=True, help="folder for the adjusted one")
    parser.add_argument("--sevens", type=int, default=3000, help="how many seven-character quatrains")
    parser.add_argument("--english", type=int, default=40, help="how many English chats of each shard")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    asker = Asker(tokenizer)
    han = torch.from_numpy(asker.han)
    writer = Writer(MODEL_FOLDER, random.Random(0))
    known = frozenset(char for char in map(chr, range(0x3400, 0xA000)) if len(writer.encode(char)) == 1)
    model = load_checkpoint(args.model)
    hidden, odds, labels = features(
        model, examples(args.data, writer, known, (args.sevens, args.english)), han, asker.assistant
    )
    w = fit(hidden, odds, labels)
    for name, shift in (("before", torch.zeros(1)), ("after", hidden @ w)):
        right = torch.sigmoid(torch.where(labels, odds + shift, -odds - shift))
        wanted = right[labels]
        print(
            f"{name}: mean probability of the wrong kind {1 - wanted.mean():.5f} where a character is wanted, {1 - right[~labels].mean():.5f} elsewhere"
        )
    with torch.no_grad():
        model.head[~han] -= w
    args.out.mkdir(parents=True, exist_ok=True)
    save_checkpoint(model, args.out / "model.safetensors")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if not (args.out / name).exists():
            shutil.copy(MODEL_FOLDER / name, args.out / name)


if __name__ == "__main__":
    main()
