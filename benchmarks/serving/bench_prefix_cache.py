"""Time to the first token of a long prompt on a CPU: none of it cached, and 90 %.

    python benchmarks/serving/bench_prefix_cache.py [--prompt-tokens 8192] [--rounds 3]

The embedded model behind all four processes, with its positions stretched to the prompt (its text would mean nothing
there; its work is the same). A round sends a new prompt, then the prompt with its last tenth replaced. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import uvloop  # noqa: E402
from load_client import completion_job, run_load  # noqa: E402

from rorqual.launch import Stack, make_plan  # noqa: E402

TINY = ROOT / "models" / "tiny"
BLOCK_SIZE = 64
FIRST_ID, LAST_ID = 300, 8000  # ordinary tokens


def stretched(folder: Path, num_positions: int) -> Path:
    """The embedded model's files, with another longest history."""
    for file in TINY.iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((TINY / "config.json").read_text())
    config["max_position_embeddings"] = num_positions
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(prompt_tokens: int = 8192, rounds: int = 3, timeout_s: float = 120.0) -> dict[str, Any]:
    """Median times to the first token, in milliseconds."""
    kept = round(0.9 * prompt_tokens / BLOCK_SIZE) * BLOCK_SIZE
    times: dict[str, list[float]] = {"uncached": [], "cached": []}
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        model = stretched(Path(name), 2 * prompt_tokens)
        stack = Stack(make_plan({"model": model, "port": 0, "device": "cpu"}), log_dir=Path(name) / "logs")
        stack.start(120.0)
        try:
            for _ in range(rounds):
                prompt = [rng.randrange(FIRST_ID, LAST_ID) for _ in range(prompt_tokens)]
                for values in times.values():
                    job = completion_job(prompt, prompt_tokens, 2)
                    run = uvloop.run(run_load(stack.url, [job], 1, timeout_s))
                    values.append(1000 * run.answers[0].ttft_s)
                    prompt = prompt[:kept] + [rng.randrange(FIRST_ID, LAST_ID) for _ in range(prompt_tokens - kept)]
        finally:
            stack.stop()
    median = {kind: round(statistics.median(values), 1) for kind, values in times.items()}
    return {
        "prompt_tokens": prompt_tokens,
        "cached_share": round(kept / prompt_tokens, 3),
        "uncached_ttft_ms": median["uncached"],
        "cached_ttft_ms": median["cached"],
        "ratio": round(median["uncached"] / median["cached"], 2),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps(measure(args.prompt_tokens, args.rounds)))


if __name__ == "__main__":
    main()
