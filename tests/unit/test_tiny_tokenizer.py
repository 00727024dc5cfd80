"""The embedded model's tokenizer: every text comes back, Chinese is a token a character, named tokens are single."""

import json
import random

import pytest
from tokenizers import Tokenizer

from models.tiny.evaluate import MODEL_FOLDER
from models.tiny.training.build_tokenizer import CHAT_TEMPLATE, NAMED, NAMED_SPECIAL


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))


def test_any_text_survives(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    ranges = [(32, 127), (0x80, 0xD7FF), (0x4E00, 0x9FFF), (0xE000, 0x10FFFF), (9, 13)]
    for _ in range(500):
        text = "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(1, 40)))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["春眠不觉晓", "处处闻啼鸟", "写一首关于秋天的五言绝句。", "，。“”"])
def test_a_common_character_is_one_token(tokenizer: Tokenizer, text: str) -> None:
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) == len(text)


def test_sizes_and_ids_agree_with_the_configuration(tokenizer: Tokenizer) -> None:
    config = json.loads((MODEL_FOLDER / "config.json").read_text(encoding="utf-8"))
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.token_to_id("<｜begin▁of▁sentence｜>") == config["bos_token_id"]
    assert tokenizer.token_to_id("<｜end▁of▁sentence｜>") == config["eos_token_id"]


def test_named_tokens_are_single_and_flagged_as_published(tokenizer: Tokenizer) -> None:
    special = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    for name in NAMED + NAMED_SPECIAL:
        assert len(tokenizer.encode(name, add_special_tokens=False).ids) == 1
        assert special[name] is (name in NAMED_SPECIAL)
    assert special["<｜end▁of▁sentence｜>"]


def test_the_committed_template_is_the_builder_s() -> None:
    config = json.loads((MODEL_FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == CHAT_TEMPLATE


def render(messages: list[dict[str, object]], add_generation_prompt: bool = True) -> str:
    jinja2 = pytest.importorskip("jinja2.sandbox")
    environment = jinja2.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(CHAT_TEMPLATE)
    return str(template.render(messages=messages, add_generation_prompt=add_generation_prompt, bos_token="<BOS>"))


def test_the_template_writes_v3_chats() -> None:
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "S1"},
        {"role": "user", "content": "U1"},
        {"role": "assistant", "content": "A1"},
        {"role": "system", "content": "S2"},
        {"role": "user", "content": "U2"},
    ]
    expected = "<BOS>S1\n\nS2<｜User｜>U1<｜Assistant｜>A1<｜end▁of▁sentence｜><｜User｜>U2"
    assert render(messages) == expected + "<｜Assistant｜>"
    assert render(messages, add_generation_prompt=False) == expected


def test_the_template_writes_v3_tool_calls() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "R1"},
        {"role": "tool", "content": "R2"},
    ]
    one = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
    expected = (
        f"<BOS><｜User｜>U<｜Assistant｜><｜tool▁calls▁begin｜>{one}\n{one}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>R1<｜tool▁output▁end｜>\n<｜tool▁output▁begin｜>R2<｜tool▁output▁end｜>"
    )
    assert render(messages) == expected + "<｜tool▁outputs▁end｜>"
    messages.append({"role": "assistant", "content": "A"})
    assert render(messages) == expected + "<｜tool▁outputs▁end｜>A<｜end▁of▁sentence｜><｜Assistant｜>"
