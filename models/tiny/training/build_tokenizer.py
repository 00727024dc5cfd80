"""Builds tokenizer.json: byte-level BPE from the English text, and a token for each common Chinese character.

    python -m models.tiny.training.build_tokenizer --data DIR --out models/tiny

The vocabulary, 8,192 entries (`LAYOUT`):

- 3 special tokens at the front, as in the published checkpoints (begin, end, pad);
- 4,096 byte-level BPE entries learned from the English answers and prompts, the 256 bytes among them;
- the commonest Chinese characters and full-width marks of the poems and requests, each one token, made by
  merges of its three bytes that come after all English merges; the two-byte beginnings they pass through
  are tokens too (about 330);
- the named special-token strings of the DeepSeek line, then numbered place holders up to 8,192.

Every Chinese character and every full-width mark is a pre-token of its own, so a line of five characters
is always five tokens.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from . import poems

VOCAB_SIZE = 8192
NUM_BPE_TOKENS = 4096
NUM_CHARACTERS = 3500
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
MARKS = "，。？！：；、“”《》「」（）…"
# Names and `special` flags as in the published tokenizers: an added token that is not special survives
# decoding with "skip special tokens", and the parsers rely on that.
NAMED = (
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<|EOT|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<｜tool▁sep｜>",
    "<｜begin▁of▁repo▁name｜>",
    "<｜end▁of▁repo▁name｜>",
    "<｜begin▁of▁file▁name｜>",
    "<｜end▁of▁file▁name｜>",
    "<｜begin▁of▁file｜>",
    "<｜end▁of▁file｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜begin▁sys｜>",
    "<｜end▁sys｜>",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜task｜>",
    "<｜political｜>",
    "<｜entity｜>",
    "<｜title｜>",
    "<｜safety｜>",
    "<｜answer｜>",
    "<｜search｜>",
    "<dsml:",
    "</dsml:",
    "<｜search▁begin｜>",
    "<｜search▁end｜>",
    "<｜extracted_url｜>",
    "<｜read_url｜>",
)
NAMED_SPECIAL = ("<｜end_of_query｜>",)

DIGITS = r"\p{N}{1,3}"
CJK = r"[\u3400-\u4dbf\u4e00-\u9fff\u3040-\u30ff]|[" + MARKS + "]"
WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)

# V3's layout of a chat (system texts first and joined; calls as fenced JSON; results in one outputs block),
# with content and calls in one turn both kept.
CHAT_TEMPLATE = """\
{%- if add_generation_prompt is not defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(system='', in_outputs=false) %}
{%- for message in messages if message['role'] == 'system' %}
    {%- set ns.system = ns.system + ('\\n\\n' if ns.system else '') + message['content'] %}
{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- set content = message['content'] if message['content'] else '' %}
    {%- if message['role'] != 'tool' and ns.in_outputs %}
        {{- '<｜tool▁outputs▁end｜>' }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- set ns.in_outputs = false %}
        {{- '<｜User｜>' + content }}
    {%- elif message['role'] == 'assistant' %}
        {{- '' if ns.in_outputs else '<｜Assistant｜>' }}
        {%- set ns.in_outputs = false %}
        {{- content }}
        {%- if message['tool_calls'] %}
            {{- '<｜tool▁calls▁begin｜>' }}
            {%- for call in message['tool_calls'] %}
                {%- set arguments = call['function']['arguments'] %}
                {{- '' if loop.first else '\\n' }}
                {{- '<｜tool▁call▁begin｜>' + (call['type'] or 'function') + '<｜tool▁sep｜>' + call['function']['name'] + '\\n```json\\n' }}
                {{- arguments if arguments is string else arguments | tojson }}
                {{- '\\n```<｜tool▁call▁end｜>' }}
            {%- endfor %}
            {{- '<｜tool▁calls▁end｜>' }}
        {%- endif %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'tool' %}
        {{- '\\n' if ns.in_outputs else '<｜tool▁outputs▁begin｜>' }}
        {%- set ns.in_outputs = true %}
        {{- '<｜tool▁output▁begin｜>' + content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.in_outputs %}
    {{- '<｜tool▁outputs▁end｜>' }}
{%- elif add_generation_prompt %}
    {{- '<｜Assistant｜>' }}
{%- endif %}"""


def english_texts(data: Path, share: float, rng: random.Random) -> Iterator[str]:
    """The messages of a share of the English documents, and all of the persona's."""
    for path in sorted(data.glob("teacher-*.jsonl.xz")):
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                if rng.random() < share or "persona" in path.name:
                    yield from (message["content"] for message in json.loads(line)["messages"])


def common_characters(data: Path, count: int) -> list[str]:
    """The `count` commonest Chinese characters, those of the requests and of small talk first."""
    must = "".join(name for forms in poems.FORMS.values() for name, _ in forms) + poems.IMAGES
    for wordings in (poems.TITLE_WORDINGS, poems.TOPIC_WORDINGS, poems.FREE_WORDINGS, poems.OPEN_WORDINGS):
        must += "".join(wordings)
    must += "".join(name for name, _, _ in poems.THEMES)
    must += "".join(text for asked, answered in poems.SMALL_TALK for text in asked + answered)
    counts: Counter[str] = Counter()
    for poem in poems.read_poems(data / "jueju.tsv.xz"):
        counts.update("".join(poem.lines) + poem.title)
    ordered = list(dict.fromkeys(re.findall(poems.HAN, must))) + [char for char, _ in counts.most_common()]
    return list(dict.fromkeys(ordered))[:count]


def build(data: Path, seed: int = 0, english_share: float = 0.25) -> Tokenizer:
    """Learn the English part, add the characters, then the named tokens; see the module's head."""
    splits = [
        pre_tokenizers.Split(Regex(DIGITS), "isolated"),
        pre_tokenizers.Split(Regex(CJK), "isolated"),
        pre_tokenizers.Split(Regex(WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(splits)
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BPE_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=16,
    )
    learner.train_from_iterator(english_texts(data, english_share, random.Random(seed)), trainer)
    learned = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) for merge in learned["merges"]]

    vocab = {BOS: 0, EOS: 1, PAD: 2}
    for token in sorted(learned["vocab"], key=learned["vocab"].__getitem__):
        vocab[token] = len(vocab)
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for char in list(MARKS) + common_characters(data, NUM_CHARACTERS):
        ((spelled, _),) = spell.pre_tokenize_str(char)  # three bytes, each written as one printable letter
        for left, right in ((spelled[0], spelled[1]), (spelled[:2], spelled[2])):
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (BOS, EOS, PAD)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in NAMED])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in NAMED_SPECIAL])
    room = VOCAB_SIZE - tokenizer.get_vocab_size()
    if room < 0:
        raise ValueError(f"the vocabulary is {-room} entries larger than {VOCAB_SIZE}")
    tokenizer.add_special_tokens([AddedToken(f"<｜place▁holder▁no▁{n}｜>", normalized=False) for n in range(room)])
    byte_level = processors.ByteLevel(trim_offsets=False)
    start = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)])
    tokenizer.post_processor = processors.Sequence([byte_level, start])
    return tokenizer


def write(tokenizer: Tokenizer, out: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": max_length,
        "pad_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(
        json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the embedded model's tokenizer.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the .xz files named in data.sha256")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parents[1], help="where tokenizer.json goes"
    )
    args = parser.parse_args()
    tokenizer = build(args.data)
    write(tokenizer, args.out, max_length=4096)
    print(f"{tokenizer.get_vocab_size()} entries")


if __name__ == "__main__":
    main()
