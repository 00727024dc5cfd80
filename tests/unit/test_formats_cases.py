"""What every chat format holds to, whoever writes what: content parts, one beginning, arguments, control tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.openai import chat as openai_chat
from rorqual.core.errors import InvalidRequestError
from rorqual.core.token_ids import unpack_token_ids
from rorqual.v1 import text_pb2
from services.tokenizer.decoder import decode_all
from services.tokenizer.formats import FORMATS
from services.tokenizer.formats.base import Thinking
from services.tokenizer.formats.detect import find_format
from services.tokenizer.formats.marks import BOS
from services.tokenizer.formats.reasoning import Start
from services.tokenizer.prompt import Prompt, PromptBuilder
from services.tokenizer.vocabulary import Vocabulary
from tests.support.answers import read_pieces, stream_text, syntax_of
from tests.support.vocabularies import tiny, tiny_checkpoint, v4, v4_checkpoint, vocabulary_of
from tests.unit.test_formats_rendering import builder

WITH_TOOLS = [name for name, chat_format in FORMATS.items() if chat_format.shape is not None]
DEEPSEEK = [name for name in FORMATS if name.startswith("deepseek")]
DSML = ["deepseek-v3.2", "deepseek-v4", "deepseek-v4-pro", "deepseek-v4.1"]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


def request_of(messages: list[dict[str, Any]], **fields: Any) -> text_pb2.ChatRequest:
    """An OpenAI body, as the gateway sends it on."""
    body, _ = openai_chat.READER.read(json.dumps({"messages": messages, **fields}).encode())
    return openai_chat.chat_command(body, "r").chat


def render(format_name: str, messages: list[dict[str, Any]], **fields: Any) -> Prompt:
    return builder(format_name).chat(request_of(messages, **fields), time_unix_s=0)


def ids(prompt: Prompt) -> list[int]:
    return list(unpack_token_ids(prompt.packed_ids))


def conversation(arguments: Any = '{"a": 1}', **content: Any) -> list[dict[str, Any]]:
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "system", "content": content.get("system", "S")},
        {"role": "user", "content": content.get("user", "U")},
        {
            "role": "assistant",
            "tool_calls": [call],
            **content.get("beside", {"content": content.get("assistant", "A")}),
        },
        {"role": "tool", "tool_call_id": "functions.f:0", "content": content.get("tool", "T")},
        {"role": "user", "content": "more"},
    ]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("format_name", WITH_TOOLS)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_content_in_parts(format_name: str, role: str) -> None:
    plain = render(format_name, conversation(**{role: "one"}))
    assert ids(render(format_name, conversation(**{role: parts("one")}))) == ids(plain)
    two = render(format_name, conversation(**{role: parts("one", "two")}))
    assert ids(two) == ids(render(format_name, conversation(**{role: "one\ntwo"})))
    assert "text" not in two.text
    assert "[" not in two.text.replace(BOS, "")


@pytest.mark.parametrize("format_name", WITH_TOOLS)
def test_no_content_beside_calls_has_four_spellings(format_name: str) -> None:
    first, *others = (
        ids(render(format_name, conversation(beside=beside)))
        for beside in ({"content": None}, {}, {"content": ""}, {"content": []})
    )
    assert all(other == first for other in others)


def test_a_part_that_is_no_text_is_named() -> None:
    for part, field in (
        ({"type": "image_url", "image_url": {"url": "x"}}, "messages[1].content[1]"),
        ({"type": "sound"}, "messages[1].content[1]"),
        ({"type": "text"}, "messages[1].content[1]"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            request_of(conversation(user=[*parts("a"), part]))
        assert caught.value.field == field


@pytest.mark.parametrize("add_bos_token", [True, False])
@pytest.mark.parametrize("format_name", DEEPSEEK)
def test_one_beginning_whatever_the_tokenizer_adds(format_name: str, add_bos_token: bool) -> None:
    checkpoint = replace(tiny_checkpoint(), add_bos_token=add_bos_token, chat_templates={})
    vocabulary = tiny() if add_bos_token else Vocabulary(checkpoint)
    prompts = PromptBuilder(checkpoint, vocabulary, chat_format=format_name)
    bos_id = vocabulary.control.ids[BOS]
    for messages in ([{"role": "user", "content": f"{BOS}x"}], [{"role": "system", "content": BOS}] * 2):
        token_ids = ids(prompts.chat(request_of(messages), time_unix_s=0))
        assert token_ids[0] == bos_id
        assert token_ids.count(bos_id) == 1


def test_the_known_answer_of_v4() -> None:
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hello! I am DeepSeek.", "reasoning_content": "A greeting."},
        {"role": "user", "content": "1+1=?"},
    ]
    expected = [
        0, 128803, 33310, 128804, 128822, 19923, 3, 342, 1030, 22651, 4374, 1465, 16, 1, 128803, 19, 13, 19, 127252,
        128804, 128821,
    ]  # fmt: skip
    prompts = PromptBuilder(v4_checkpoint(), v4())
    assert prompts.chat_format is FORMATS["deepseek-v4"]  # found from the vocabulary alone
    prompt = prompts.chat(request_of(messages, chat_template_kwargs={"thinking": True}), time_unix_s=0)
    assert ids(prompt) == expected
    known = [0, 53, 128803, 51, 128804, 128821]
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    assert ids(prompts.chat(request_of(messages, reasoning_effort="high"), time_unix_s=0)) == known


@pytest.mark.parametrize("format_name", WITH_TOOLS)
def test_arguments_of_earlier_calls(format_name: str) -> None:
    given = {"city": "Paris", "days": 2}
    compact = '{"city":"Paris","days":2}'
    as_text = render(format_name, conversation(compact))
    assert ids(as_text) == ids(render(format_name, conversation(given)))
    if format_name not in DSML:
        assert compact in as_text.text
    else:
        assert 'name="city" string="true">Paris<' in as_text.text
        assert 'name="days" string="false">2<' in as_text.text
        assert 'name="arguments"' not in as_text.text
    # Read back, the call has the same arguments.
    written = as_text.text[as_text.text.index("A", as_text.text.index("U")) :]
    answer = read_pieces(syntax_of(format_name), Start.CONTENT, [stream_text(format_name, written)])
    assert json.loads(answer.calls[0].arguments) == given


@pytest.mark.parametrize("arguments", ["42", '"x"', "[1]", "null", "not json", ""])
@pytest.mark.parametrize("format_name", WITH_TOOLS)
def test_arguments_that_are_no_object_are_kept_as_they_are(format_name: str, arguments: str) -> None:
    text = render(format_name, conversation(arguments)).text
    if format_name in DSML:
        assert f'name="arguments" string="true">{arguments}<' in text
    else:
        assert f"{arguments}\n```<" in text or f">{arguments}<" in text


@pytest.mark.parametrize("format_name", list(FORMATS))
def test_control_tokens_in_a_callers_text_are_text(format_name: str) -> None:
    vocabulary = vocabulary_of(format_name)
    with_tools = FORMATS[format_name].shape is not None

    def prompt(text: str) -> Prompt:
        if not with_tools:
            return render(format_name, [{"role": "system", "content": text}, {"role": "user", "content": f"{text}U"}])
        schema = {"type": "object", "properties": {f"p{text}": {"description": text}}}
        tool = {"type": "function", "function": {"name": f"f{text[:200]}", "description": text, "parameters": schema}}
        messages = conversation(json.dumps({text: text, "x": text}), system=text, user=f"{text}U{text}", tool=text)
        messages[2]["tool_calls"][0]["function"]["name"] = f"f{text[:200]}"
        messages[2]["tool_calls"][0]["id"] = messages[3]["tool_call_id"] = f"functions.f{text}:0"
        return render(format_name, messages, tools=[tool])

    def control(token_ids: list[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id in vocabulary.control_ids]

    expected = control(ids(prompt("plain")))
    everything = "".join(vocabulary.control.ids)
    for text in (
        everything, "<", "<｜", "｜>", "<｜User｜>", "<think>", "</think>", "｜DSML｜", "</｜DSML｜parameter>", "<tool_result>",
        "</tool_result>", "</result>", "<|im_end|>", "<|tool_call_end|>", "<｜end▁of▁sentence｜>",
    ):  # fmt: skip
        made = prompt(text)
        assert control(ids(made)) == expected, text
        assert decode_all(vocabulary.raw_text, ids(made)) == made.text
        assert text in made.text


@pytest.mark.parametrize(
    ("format_name", "fields", "start"),
    [
        ("deepseek-v2", {}, Start.CONTENT),
        ("deepseek-v3", {}, Start.UNDECIDED),
        ("deepseek-r1", {}, Start.REASONING),
        ("deepseek-r1-0528", {}, Start.UNDECIDED),
        ("deepseek-v3.1", {}, Start.CONTENT),
        ("deepseek-v3.1", {"reasoning_effort": "low"}, Start.REASONING),
        ("deepseek-v3.2", {}, Start.CONTENT),
        ("deepseek-v4", {"chat_template_kwargs": {"enable_thinking": True}}, Start.REASONING),
        ("kimi-k2-thinking", {}, Start.UNDECIDED),
    ],
)
def test_where_the_answer_begins_is_read_from_the_prompts_end(
    format_name: str, fields: dict[str, Any], start: Start
) -> None:
    for content in ("1+3?", "<think>", "a</think>", "</think>\n\n<｜Assistant｜><think>"):
        assert render(format_name, [{"role": "user", "content": content}], **fields).start is start
    if start is Start.REASONING:
        read = read_pieces(syntax_of(format_name), start, [stream_text(format_name, "Add them.</think>4")])
    elif start is Start.UNDECIDED:
        text = "<think>\nAdd them.\n</think>\n\n4"
        read = read_pieces(syntax_of(format_name), start, [stream_text(format_name, text)])
        plain = read_pieces(syntax_of(format_name), start, ["4"])
        assert plain.plain == ("", "4", [])
    else:
        read = read_pieces(syntax_of(format_name), start, ["4"])
        assert read.plain == ("", "4", [])
        return
    assert read.plain == ("Add them.", "4", [])


@pytest.mark.parametrize("format_name", ["deepseek-v3.1", "deepseek-v3.2"])
def test_after_results_no_reasoning_is_read_where_thinking_is_off(format_name: str) -> None:
    messages = conversation()[:-1]
    assert render(format_name, messages).start in (Start.CONTENT, Start.CONTENT_CONTINUED)


def test_the_blank_that_v2_writes_after_the_colon_is_not_content() -> None:
    question = [{"role": "user", "content": "U"}]
    prompt = render("deepseek-v2", question)
    assert prompt.text.endswith("Assistant:")
    read = read_pieces(syntax_of("deepseek-v2"), prompt.start, [" Once", " upon"])
    assert read.content == "Once upon"
    again = render("deepseek-v2", [*question, {"role": "assistant", "content": read.content}, *question])
    assert "Assistant: Once upon<" in again.text


ANSWER = {"role": "assistant", "content": "Once upon"}


@pytest.mark.parametrize("format_name", list(FORMATS))
def test_a_final_message_is_continued(format_name: str) -> None:
    messages = [{"role": "user", "content": "Tell."}, ANSWER]
    prompt = render(format_name, messages, continue_final_message=True)
    assert prompt.text.endswith("Once upon")
    # As published with the end of the turn, but for what ends it.
    whole = render(format_name, messages, add_generation_prompt=False).text
    assert whole.startswith(prompt.text)
    assert len(whole) > len(prompt.text)
    if FORMATS[format_name].thinking is Thinking.NEVER:
        assert prompt.start is Start.CONTENT_CONTINUED


@pytest.mark.parametrize("format_name", ["deepseek-v3.1", *DSML])
def test_reasoning_is_continued_where_thinking_is_on(format_name: str) -> None:
    thought = {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    messages = [{"role": "user", "content": "Tell."}, thought]
    prompt = render(format_name, messages, continue_final_message=True, reasoning_effort="low")
    assert prompt.text.endswith("<think>Hm")
    assert prompt.start is Start.REASONING_CONTINUED
    thought["content"] = "Once"
    prompt = render(format_name, messages, continue_final_message=True, reasoning_effort="low")
    assert prompt.text.endswith("<think>Hm</think>Once")
    assert prompt.start is Start.CONTENT_CONTINUED


def test_a_developers_messages_are_the_systems() -> None:
    for format_name in FORMATS:
        as_developer, as_system = (
            render(format_name, [{"role": role, "content": "D"}, {"role": "user", "content": "U"}])
            for role in ("developer", "system")
        )
        assert as_developer == as_system


@pytest.mark.parametrize(
    ("format_name", "messages", "field"),
    [
        ("deepseek-v3.2", [*conversation()[1:4], conversation()[3]], "messages[3]"),
        ("deepseek-v3", [{"role": "latest_reminder", "content": "x"}], "messages[0]"),
        ("deepseek-v3.1", [{"role": "latest_reminder", "content": "x"}], "messages[0]"),
        ("kimi-k2", [{"role": "latest_reminder", "content": "x"}], "messages[0]"),
        ("deepseek-v2", conversation(), "messages[2]"),
    ],
)
def test_a_message_that_a_format_has_no_place_for(format_name: str, messages: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(format_name, messages)
    assert (caught.value.reason, caught.value.field) == ("INVALID_MESSAGES", field)


def test_quick_tasks_of_v4() -> None:
    question = [{"role": "user", "content": "U"}]

    def tail(task: str, messages: list[dict[str, Any]] = question, **variables: Any) -> str:
        return render("deepseek-v4", messages, chat_template_kwargs={"task": task, **variables}).text.partition("｜>U")[
            2
        ]

    assert tail("title") == "<｜title｜>"
    assert tail("action") == "<｜Assistant｜></think><｜action｜>"
    assert tail("action", thinking=True) == "<｜Assistant｜><think><｜action｜>"
    with pytest.raises(InvalidRequestError) as caught:
        tail("other")
    assert caught.value.field == "chat_template_kwargs"
    kept = [*question, {"role": "assistant", "content": "A", "reasoning_content": "R"}, *question]
    text = render("deepseek-v4", kept, chat_template_kwargs={"thinking": True, "drop_thinking": False}).text
    assert "<think>R</think>A" in text


MARKS_OF_TEMPLATES = {
    "deepseek-v2": "{{ bos_token }}{% for m in messages %}{{ 'User: ' + m.content + 'Assistant: ' }}{% endfor %}",
    "deepseek-v2.5": "'<｜User｜>' '<｜Assistant｜>'",
    "deepseek-v3": "'<｜User｜>' '<｜Assistant｜>' '<｜tool▁calls▁begin｜>' '<｜tool▁outputs▁begin｜>' '<｜tool▁output▁begin｜>'",
    "deepseek-r1": "'<｜tool▁calls▁begin｜>' '<｜tool▁outputs▁begin｜>' '</think>' '<｜Assistant｜><think>\\n'",
    "deepseek-r1-0528": "'<｜tool▁calls▁begin｜>' '<｜tool▁outputs▁begin｜>' '</think>' '<｜Assistant｜>'",
    "deepseek-v3.1": "'<｜tool▁calls▁begin｜>' '<｜tool▁output▁begin｜>' '<｜Assistant｜>' '</think>' '<think>'",
    "deepseek-v3.2": "'<｜User｜>' '｜DSML｜' 'function_calls'",
    "deepseek-v4": "'<｜User｜>' '｜DSML｜' 'tool_calls'",
    "kimi-k2": "'<|im_middle|>'",
    "kimi-k2-thinking": "'<|im_middle|>' '<think>'",
}


@pytest.mark.parametrize(("format_name", "template"), MARKS_OF_TEMPLATES.items())
def test_a_checkpoints_format_is_found_from_its_template(format_name: str, template: str) -> None:
    found = find_format(replace(tiny_checkpoint(), chat_templates={"default": template}), tiny().control.ids)
    assert found is FORMATS[format_name]


@pytest.mark.parametrize(
    ("format_name", "tokens", "fields"),
    [
        ("deepseek-v4.1", ["<｜System｜>", "<｜latest_reminder｜>", "｜DSML｜"], {}),
        ("deepseek-v4", ["<｜latest_reminder｜>", "｜DSML｜"], {}),
        ("deepseek-v4", [], {"model_type": "deepseek_v4"}),
        ("deepseek-v4-pro", ["<｜latest_reminder｜>"], {"encoder": "Reasoning Effort: Beyond maximum"}),
        ("deepseek-v3.2", ["｜DSML｜"], {}),
        ("deepseek-v3.2", [], {"model_type": "deepseek_v32"}),
        ("deepseek-v3.2", [], {"encoder": 'dsml_token: str = "｜DSML｜"'}),
        ("kimi-k2", ["<|im_middle|>"], {}),
        ("kimi-k2-thinking", ["<|im_middle|>", "<think>"], {}),
        (None, ["<｜User｜>"], {}),
    ],
)
def test_and_without_a_template_from_its_vocabulary_and_files(
    format_name: str | None, tokens: list[str], fields: dict[str, str]
) -> None:
    found = find_format(replace(tiny_checkpoint(), chat_templates={}, **fields), tokens)
    assert found is (FORMATS[format_name] if format_name else None)


SAME = tiny_checkpoint().chat_templates["default"]
OTHER = SAME.replace("{{- bos_token }}", "{{- bos_token }}Always rhyme. ")


def test_a_template_that_writes_something_else_is_rendered_and_its_format_still_read() -> None:
    for template, text in (
        (SAME, f"{BOS}<｜User｜>U<｜Assistant｜>"),
        (OTHER, f"{BOS}Always rhyme. <｜User｜>U<｜Assistant｜>"),
    ):
        prompts = PromptBuilder(replace(tiny_checkpoint(), chat_templates={"default": template}), tiny())
        assert prompts.chat_format is FORMATS["deepseek-v3"]
        assert prompts.chat(request_of([{"role": "user", "content": "U"}]), time_unix_s=0).text == text
    # A template that describes tools in its own words, too.
    tools = SAME.replace("{{- bos_token }}", "{{- bos_token }}{% if tools %}{{ tools | length }} tools{% endif %}")
    prompts = PromptBuilder(replace(tiny_checkpoint(), chat_templates={"default": tools}), tiny())
    with_tools = request_of([{"role": "user", "content": "U"}], tools=TOOLS)
    assert prompts.chat(with_tools, time_unix_s=0).text == f"{BOS}1 tools<｜User｜>U<｜Assistant｜>"
    # Named, the format renders itself; but a template given by hand is what is rendered.
    named = replace(tiny_checkpoint(), chat_templates={"default": OTHER})
    prompts = PromptBuilder(named, tiny(), chat_format="deepseek-v3")
    assert "rhyme" not in prompts.chat(with_tools, time_unix_s=0).text
    prompts = PromptBuilder(replace(named, has_own_template=False), tiny(), chat_format="deepseek-v3.1")
    assert "rhyme" in prompts.chat(with_tools, time_unix_s=0).text
    assert prompts.chat_format is FORMATS["deepseek-v3.1"]


def test_a_switch_reaches_a_template_under_both_names() -> None:
    template = "{{ bos_token }}{{ thinking }} {{ enable_thinking }} {{ reasoning_effort }}"
    prompts = PromptBuilder(replace(tiny_checkpoint(), chat_templates={"default": template}), tiny())
    for fields in ({"chat_template_kwargs": {"thinking": True}}, {"chat_template_kwargs": {"enable_thinking": True}}):
        text = prompts.chat(request_of([{"role": "user", "content": "U"}], **fields), time_unix_s=0).text
        assert text == f"{BOS}True True "
    text = prompts.chat(request_of([{"role": "user", "content": "U"}], reasoning_effort="none"), time_unix_s=0).text
    assert text == f"{BOS}False False none"


def test_a_template_before_a_tokenizer_whose_tokens_take_blanks() -> None:
    """Cut out of the text beforehand, a token would leave the blanks that it swallows."""
    source = json.loads(tiny_checkpoint().tokenizer_json)
    for token in source["added_tokens"]:
        token["rstrip"] = token["content"] == "<｜User｜>"
    template = "{{ bos_token }}<｜User｜>   {{ messages[0].content }}"
    checkpoint = replace(tiny_checkpoint(), tokenizer_json=json.dumps(source), chat_templates={"default": template})
    vocabulary = Vocabulary(checkpoint)
    assert vocabulary.longest_token_chars is None
    prompts = PromptBuilder(checkpoint, vocabulary)
    plain, marked = (request_of([{"role": "user", "content": text}]) for text in ("a b", "a <think> b"))
    assert ids(prompts.chat(plain, time_unix_s=0)) == vocabulary.encode(f"{BOS}<｜User｜>   a b")
    assert ids(prompts.chat(plain, time_unix_s=0)) == vocabulary.encode(f"{BOS}<｜User｜>a b")
    assert vocabulary.control.ids["<think>"] not in ids(prompts.chat(marked, time_unix_s=0))


@pytest.mark.parametrize("format_name", sorted(FORMATS))
def test_adaptive_thinking_is_taken_by_every_format(format_name: str) -> None:
    """It thinks where there is a switch; where there is none it changes nothing."""
    messages = [{"role": "user", "content": "U"}]
    adaptive = render(format_name, messages, reasoning_effort="adaptive").text
    if FORMATS[format_name].thinking is Thinking.SWITCH:
        assert adaptive == render(format_name, messages, chat_template_kwargs={"thinking": True}).text
    else:
        assert adaptive == render(format_name, messages).text
