"""Measures the embedded model: does it stop, does it loop, are its quatrains quatrains, do its drafts hold.

    python models/tiny/evaluate.py                      # through this project's own engine
    python models/tiny/evaluate.py --backend torch      # plain torch, as while training

Answers are sampled as generation_config.json says, seed 0, at most 300 tokens, to the 100 English and 50 Chinese
prompts of eval-prompts.jsonl. Acceptance is over held-out documents, each position teacher-forced: the share of
positions where the MTP layer's argmax is the main model's. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the relative imports below work
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    importlib.import_module("models.tiny")
    __package__ = "models.tiny"

from . import scoring

MODEL_FOLDER = Path(__file__).resolve().parent
MAX_TOKENS = 300
SEED = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    chars_per_line: int | None  # of the quatrain that is asked for; None: an English prompt


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    token_ids: list[int]  # with the end-of-sentence token if that ended it
    stopped: bool  # ended by itself, before MAX_TOKENS


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float
    top_p: float
    repetition_penalty: float = 1.0

    @classmethod
    def read(cls, folder: Path) -> Sampling:
        config = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        return cls(config["temperature"], config["top_p"], config.get("repetition_penalty", 1.0))


def read_prompts(path: Path) -> list[Prompt]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Prompt(row["prompt"], row.get("chars_per_line")) for row in rows]


def answer_with_engine(folder: Path, prompts: Sequence[str], sampling: Sampling, seed: int) -> list[Answer]:
    """One chat a prompt, through the whole stack."""
    from rorqual import LLM, SamplingParams

    llm = LLM(model=str(folder))
    try:
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=MAX_TOKENS,
            seed=seed,
        )
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = [output.outputs[0] for output in llm.chat(chats, params, use_tqdm=False)]
    finally:
        llm.close()
    return [Answer(out.text, list(out.token_ids), out.finish_reason == "stop") for out in outputs]


def answer_with_torch(
    folder: Path, prompts: Sequence[str], sampling: Sampling | Sequence[Sampling], seed: int, device: str = "cpu"
) -> list[Answer]:
    """The same in plain torch, every prompt in one batch; `sampling` may differ from prompt to prompt."""
    import torch
    from tokenizers import Tokenizer

    from .training.generate import generate
    from .training.model import load_checkpoint

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos = json.loads((folder / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    model = load_checkpoint(folder, device, torch.bfloat16 if device == "cuda" else torch.float32)
    each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
    asked = [tokenizer.encode(f"<｜User｜>{prompt}<｜Assistant｜>").ids for prompt in prompts]
    made = generate(
        model,
        asked,
        temperature=[s.temperature for s in each],
        top_p=[s.top_p for s in each],
        repetition_penalty=[s.repetition_penalty for s in each],
        max_tokens=MAX_TOKENS,
        eos=eos,
        seed=seed,
    )
    return [Answer(tokenizer.decode(ids), ids, ids[-1] == eos) for ids in made]


def acceptance(folder: Path, path: Path, documents: int = 100) -> float:
    """The MTP layer's share of agreeing argmaxes over the first `documents` of `path`: the executor's model, float32."""
    import torch
    from tokenizers import Tokenizer

    from executor.kv_cache import BLOCK_SIZE, LatentCache
    from executor.model.batch import Form, build_batch
    from executor.weights import load_model

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = load_model(folder, dtype=torch.float32)
    agreeing = counted = 0
    for line in path.read_text(encoding="utf-8").splitlines()[:documents]:
        ids = tokenizer.encode(chat_text(json.loads(line)["messages"])).ids
        cache = LatentCache(model.config, -(-len(ids) // BLOCK_SIZE), dtype=torch.float32)
        table = torch.arange(cache.num_blocks)
        out = model.forward(
            build_batch([(ids, 0, table, Form.PREFILL)], range(len(ids)), return_all_hidden=True), cache
        )
        assert out.all_hidden is not None
        # Row i holds the state of token i and the token after it, and drafts token i + 2.
        drafts = build_batch([(ids[1:], 0, table, Form.PREFILL)], range(len(ids) - 1))
        draft = model.forward_mtp(drafts, out.all_hidden[:-1], cache).logits.argmax(-1).tolist()
        agree, count = scoring.agreement(out.logits.argmax(-1).tolist(), [*draft, 0])
        agreeing, counted = agreeing + agree, counted + count
    return scoring.share(agreeing, counted)


def chat_text(messages: Sequence[dict[str, str]]) -> str:
    """A finished chat as the template writes it, but for the BOS that the tokenizer adds."""
    ends = {"user": ("<｜User｜>", "<｜Assistant｜>"), "assistant": ("", "<｜end▁of▁sentence｜>")}
    return "".join(ends[m["role"]][0] + m["content"] + ends[m["role"]][1] for m in messages)


def score(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> dict[str, float]:
    """english_stop and quatrain_form are shares, english_loops a number of answers."""
    pairs = list(zip(prompts, answers, strict=True))
    english = [answer for prompt, answer in pairs if prompt.chars_per_line is None]
    formed = [scoring.is_quatrain(a.text, p.chars_per_line) for p, a in pairs if p.chars_per_line is not None]
    return {
        "english_stop": round(scoring.share(sum(a.stopped for a in english), len(english)), 4),
        "english_loops": sum(scoring.loops(a.token_ids) for a in english),
        "quatrain_form": round(scoring.share(sum(formed), len(formed)), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Score the embedded model.")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--backend", choices=("engine", "torch"), default="engine")
    parser.add_argument("--device", default="cpu", help="of the torch backend")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print every N-th answer")
    parser.add_argument("--documents", type=int, default=100, help="held-out documents of each language")
    args = parser.parse_args()

    prompts = read_prompts(MODEL_FOLDER / "eval-prompts.jsonl")
    sampling = Sampling.read(args.model)
    texts = [prompt.text for prompt in prompts]
    if args.backend == "torch":
        answers = answer_with_torch(args.model, texts, sampling, args.seed, args.device)
    else:
        answers = answer_with_engine(args.model, texts, sampling, args.seed)
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        bad = (
            not answer.stopped
            if prompt.chars_per_line is None
            else not scoring.is_quatrain(answer.text, prompt.chars_per_line)
        )
        if bad or (args.show and number % args.show == 0):
            print(f"{'!' if bad else ' '} {prompt.text}\n    " + answer.text.replace("\n", "\n    "))
    scores = score(prompts, answers)
    english = acceptance(args.model, MODEL_FOLDER / "held-out-en.jsonl", args.documents)
    verse = acceptance(args.model, MODEL_FOLDER / "held-out-zh.jsonl", args.documents)
    print(f"{sampling}, seed {args.seed}, backend {args.backend}")
    print(f"quatrains' MTP acceptance {verse:.4f}")
    print(json.dumps({**scores, "mtp_acceptance": round(english, 4)}))


if __name__ == "__main__":
    main()
