"""Tries sampling settings on a checkpoint: what the choice in generation_config.json rests on.

python -m models.tiny.training.sweep --model DIR --device cuda
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..evaluate import MODEL_FOLDER, Sampling, answer_with_torch, read_prompts, score


def main() -> None:
    parser = argparse.ArgumentParser(description="Score several sampling settings.")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.4, 0.5, 0.6, 0.7, 0.8])
    parser.add_argument("--top-ps", type=float, nargs="+", default=[0.9, 0.95])
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    args = parser.parse_args()
    prompts = read_prompts(MODEL_FOLDER / "eval-prompts.jsonl") * args.repeats
    settings = [Sampling(t, p, args.repetition_penalty) for t in args.temperatures for p in args.top_ps]
    texts = [prompt.text for _ in settings for prompt in prompts]
    each = [setting for setting in settings for _ in prompts]
    answers = answer_with_torch(args.model, texts, each, seed=0, device=args.device)
    for number, setting in enumerate(settings):
        some = answers[number * len(prompts) : (number + 1) * len(prompts)]
        lengths = sorted(len(a.token_ids) for a, p in zip(some, prompts, strict=True) if p.chars_per_line is None)
        print(
            f"{setting} {score(prompts, some)} of {args.repeats} runs; tokens: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}"
        )


if __name__ == "__main__":
    main()
