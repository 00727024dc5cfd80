"""Chat templates: as transformers renders them, except that a caller's control tokens stay text."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from rorqual.core.errors import CheckpointError, InvalidRequestError, PreconditionError, TemplateError
from rorqual.core.token_ids import unpack_token_ids
from rorqual.v1 import text_pb2
from services.tokenizer.control_tokens import ControlTokens
from services.tokenizer.decoder import decode_all
from services.tokenizer.formats.reasoning import Start
from services.tokenizer.prompt import Prompt, PromptBuilder
from services.tokenizer.vocabulary import Vocabulary
from tests.support.vocabularies import tiny, tiny_checkpoint, v4, v4_checkpoint

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"

# In the manner of the V3.1 template: system texts first, a thinking switch, history cut after its reasoning.
THINKING_TEMPLATE = """
{%- set ns = namespace(system='') %}
{%- for m in messages if m.role == 'system' %}
    {%- set ns.system = ns.system + ('\\n\\n' if ns.system else '') + m.content %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- if tools %}{{- '\\n\\n## Tools\\n' }}{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}{% endif %}
    {%- if m.role == 'assistant' %}{{- '<｜Assistant｜></think>' + (m.content.split('</think>') | last) + eos_token }}{% endif %}
    {%- if m.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + m.content | trim + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}
"""


def builder(vocabulary: Vocabulary, checkpoint: Any, template: str | None = None) -> PromptBuilder:
    if template is not None:
        checkpoint = replace(checkpoint, chat_templates={"default": template})
    return PromptBuilder(checkpoint, vocabulary)


def chat(messages: list[dict[str, Any]], **fields: Any) -> text_pb2.ChatRequest:
    return text_pb2.ChatRequest(messages=[text_pb2.ChatMessage(**message) for message in messages], **fields)


def ids(prompt: Prompt) -> list[int]:
    return list(unpack_token_ids(prompt.packed_ids))


V4 = builder(v4(), v4_checkpoint(), THINKING_TEMPLATE)
TINY = builder(tiny(), tiny_checkpoint())

ORDINARY = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "写一首诗 😀\n\n"}],
    [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "  Hello! I am DeepSeek."},
        {"role": "user", "content": "1+1=? <b>x</b> > 0"},
    ],
]


@pytest.mark.parametrize("messages", ORDINARY)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("which", ["tiny", "thinking"])
def test_ordinary_messages_render_as_transformers_does(
    messages: list[dict[str, Any]], add_generation_prompt: bool, which: str
) -> None:
    template = tiny_checkpoint().chat_templates["default"] if which == "tiny" else THINKING_TEMPLATE
    prompts, vocabulary = (TINY, tiny()) if which == "tiny" else (V4, v4())
    [expected], _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=add_generation_prompt, bos_token=BOS, eos_token=EOS
    )
    prompt = prompts.chat(chat(messages, add_generation_prompt=add_generation_prompt), time_unix_s=0)
    assert prompt.text == expected
    # Also where a marker was needed ("> 0" ends like a token): as if tokenized in one go.
    assert ids(prompt) == vocabulary.encode(expected)


def test_tools_and_calls_render_as_transformers_does() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "description": "Größe <x>"}}}
    tools = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": schema}}]
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}, "id": "c1"}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]
    request = chat(
        [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "tool_calls": [text_pb2.ToolCall(id="c1", name="weather", arguments_json='{"city": "Paris"}')],
            },
            {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        ],
        tools=[text_pb2.Tool(name="weather", description="d", parameters_json=json.dumps(schema))],
    )
    [expected], _ = render_jinja_template(
        [messages],
        tools=tools,
        chat_template=tiny_checkpoint().chat_templates["default"],
        add_generation_prompt=True,
        bos_token=BOS,
        eos_token=EOS,
    )
    # The embedded model's template has no word for tools; its format writes them after the system text.
    described = json.dumps(tools[0]["function"], ensure_ascii=False, indent=4)
    rendered = TINY.chat(request, time_unix_s=0).text
    assert described in rendered
    assert rendered.startswith(f"{BOS}## Tools\n\n### Function\n\n")
    assert BOS + rendered[rendered.index("<｜User｜>") :] == expected
    empty = text_pb2.ChatRequest()
    empty.CopyFrom(request)
    empty.messages[1].content = ""
    assert TINY.chat(empty, time_unix_s=0) == TINY.chat(request, time_unix_s=0)
    with_tools = V4.chat(chat([{"role": "user", "content": "x"}], tools=list(request.tools)), time_unix_s=0)
    assert json.dumps(tools[0]["function"], ensure_ascii=False) in with_tools.text


def test_the_known_answer_of_the_format() -> None:
    request = chat(
        [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Hello! I am DeepSeek."},
            {"role": "user", "content": "1+1=?"},
        ],
        chat_template_kwargs_json='{"thinking": true}',
    )
    prompt = V4.chat(request, time_unix_s=0)
    assert ids(prompt) == [
        0, 128803, 33310, 128804, 128822, 19923, 3, 342, 1030, 22651, 4374, 1465, 16, 1, 128803, 19, 13, 19, 127252,
        128804, 128821,
    ]  # fmt: skip
    assert prompt.start is Start.REASONING
    assert V4.chat(chat([{"role": "user", "content": "a <think>"}]), time_unix_s=0).start is Start.CONTENT
    assert TINY.chat(chat([{"role": "user", "content": "a <think>"}]), time_unix_s=0).start is Start.UNDECIDED


def control_counts(vocabulary: Vocabulary, token_ids: list[int]) -> list[int]:
    return [token_id for token_id in token_ids if token_id in vocabulary.control_ids]


@given(st.sets(st.text("ab<", min_size=1, max_size=4)), st.text("ab<c", max_size=20))
def test_control_tokens_are_found_leftmost_then_longest(tokens: set[str], text: str) -> None:
    expected, position = [], 0
    while position < len(text):
        fitting = [len(token) for token in tokens if text.startswith(token, position)]
        if fitting:
            expected.append((position, position + max(fitting)))
        position += max(fitting, default=1)
    assert list(ControlTokens({token: index for index, token in enumerate(tokens)}).find(text)) == expected


def test_a_megabyte_of_beginnings_of_tokens_is_searched_at_once() -> None:
    began_s = time.process_time()
    assert not list(v4().control.find("<｜" * 500_000))
    assert time.process_time() - began_s < 3  # 0.1 s; a step of Python's for each takes 8


@settings(deadline=None)
@given(st.lists(st.sampled_from(["<", "｜", "User", ">", "｜>", BOS, "\\ufdd0", "日", " "])).map("".join))
def test_a_rendering_counts_its_characters_without_markers_and_no_token_stands_for_more(text: str) -> None:
    for prompts, vocabulary in ((TINY, tiny()), (V4, v4())):
        rendered = prompts.render(chat([{"role": "user", "content": text}]), time_unix_s=0)
        prompt = prompts.encode(rendered)
        assert rendered.num_chars == len(prompt.text)
        assert vocabulary.longest_token_chars is not None
        assert prompt.num_tokens * vocabulary.longest_token_chars >= rendered.num_chars


@pytest.mark.parametrize("which", ["tiny", "thinking"])
def test_no_added_token_that_a_caller_spells_becomes_a_control_token(which: str) -> None:
    prompts, vocabulary = (TINY, tiny()) if which == "tiny" else (V4, v4())

    def request(text: str) -> text_pb2.ChatRequest:
        schema = {"type": "object", "properties": {f"p{text}": {"description": text}}}
        return chat(
            [
                {"role": "system", "content": f"S{text}"},
                {"role": "user", "content": f"{text}U{text}"},
                {
                    "role": "assistant",
                    "content": f"A{text.replace('</think>', '')}",
                    "tool_calls": [text_pb2.ToolCall(name=f"f{text}", arguments_json=json.dumps({text: text}))],
                },
                {"role": "tool", "content": f"{text}"},
                {"role": "user", "content": text + text},
            ],
            tools=[text_pb2.Tool(name=f"f{text}", description=text, parameters_json=json.dumps(schema))],
            chat_template_kwargs_json=json.dumps({"other": text} | ({"thinking": True} if which == "thinking" else {})),
        )

    expected = control_counts(vocabulary, ids(prompts.chat(request("plain"), time_unix_s=0)))
    everything = "".join(vocabulary.control.ids)
    for text in (
        everything,
        BOS,
        EOS,
        "<｜User｜>",
        "<think>",
        "</think>",
        "<",
        "<｜",
        "｜>",
        "｜DSML｜",
        "<tool_result>",
    ):
        prompt = prompts.chat(request(text), time_unix_s=0)
        assert control_counts(vocabulary, ids(prompt)) == expected, text
        assert decode_all(vocabulary.raw_text, ids(prompt)) == prompt.text
        assert text in prompt.text


def test_pieces_of_a_token_in_neighbouring_strings_do_not_join() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}<｜Assistant｜>"
    prompts = builder(v4(), v4_checkpoint(), template)
    for parts in (["<think", ">"], ["<", "/think>"], ["<｜end▁of", "▁sentence｜>"], ["<｜", "User", "｜>"]):
        prompt = prompts.chat(chat([{"role": "user", "content": part} for part in parts]), time_unix_s=0)
        assert control_counts(v4(), ids(prompt)) == [0, 128804], parts
        assert prompt.text == f"{BOS}{''.join(parts)}<｜Assistant｜>"


def test_characters_used_as_markers_pass_through() -> None:
    text = "\ufdd0<think>\ufdd1 \ufdd2 \\ufdd3 \ue000 <｜User｜>"
    prompt = V4.chat(chat([{"role": "user", "content": text}]), time_unix_s=0)
    assert text in prompt.text
    assert decode_all(v4().raw_text, ids(prompt)) == prompt.text
    assert control_counts(v4(), ids(prompt)) == [0, 128803, 128804, 128822]


def test_json_that_escapes_everything_keeps_tokens_apart_too() -> None:
    prompts = builder(v4(), v4_checkpoint(), "{{ bos_token }}{{ messages[0].content | tojson(ensure_ascii=true) }}")
    prompt = prompts.chat(chat([{"role": "user", "content": "é<think>"}]), time_unix_s=0)
    assert prompt.text == BOS + '"\\u00e9<think>"'
    assert control_counts(v4(), ids(prompt)) == [0]


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", BOS, EOS, "<｜User｜>", "<", "｜", ">", "a", " ", "\n"]), max_size=8
    )
)
@settings(max_examples=60, deadline=None)
def test_any_mixture_stays_text(parts: list[str]) -> None:
    text = "".join(parts)
    prompt = V4.chat(chat([{"role": "user", "content": text}]), time_unix_s=0)
    assert prompt.text == f"{BOS}<｜User｜>{text}<｜Assistant｜></think>"
    assert control_counts(v4(), ids(prompt)) == [0, 128803, 128804, 128822]
    assert decode_all(v4().raw_text, ids(prompt)) == prompt.text


def test_finding_is_leftmost_then_longest() -> None:
    control = ControlTokens({"<a>": 1, "<a><b>": 2, "b>c": 3})
    text = "x<a><b>c<a>"
    assert [text[a:b] for a, b in control.find(text)] == ["<a><b>", "<a>"]


def test_continue_final_message() -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, two, "}]
    prompt = TINY.chat(chat(messages, continue_final_message=True), time_unix_s=0)
    assert prompt.text == f"{BOS}<｜User｜>Count<｜Assistant｜>one, two, "
    assert prompt.start is Start.CONTENT_CONTINUED
    trimming = "{% for m in messages %}{{ m.content | trim }}\n{% endfor %}"
    for template in (trimming, tiny_checkpoint().chat_templates["default"]):
        [expected], _ = render_jinja_template(
            [messages], chat_template=template, continue_final_message=True, bos_token=BOS, eos_token=EOS
        )
        prompts = builder(v4(), v4_checkpoint(), template)
        assert prompts.chat(chat(messages, continue_final_message=True), time_unix_s=0).text == expected
    with pytest.raises(InvalidRequestError) as caught:
        TINY.chat(chat(messages[:1], continue_final_message=True), time_unix_s=0)
    assert caught.value.field == "messages[0]"
    with pytest.raises(InvalidRequestError):
        TINY.chat(chat(messages, continue_final_message=True, add_generation_prompt=True), time_unix_s=0)


def test_one_begin_of_sequence_token_whatever_the_template_writes() -> None:
    no_bos = "{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}"
    prompt = builder(tiny(), tiny_checkpoint(), no_bos).chat(chat([{"role": "user", "content": BOS}]), time_unix_s=0)
    assert ids(prompt)[:2] == [0, tiny().control.ids["<｜User｜>"]]
    assert ids(prompt).count(0) == 1
    assert ids(TINY.chat(chat([{"role": "user", "content": "x"}]), time_unix_s=0)).count(0) == 1


def test_plain_prompts_get_one_begin_of_sequence_token() -> None:
    complete = text_pb2.CompleteRequest
    assert ids(TINY.complete(complete(text="Hi")))[0] == 0
    assert ids(TINY.complete(complete(text="Hi"))) == ids(TINY.complete(complete(text=BOS + "Hi")))
    assert ids(V4.complete(complete(text="Hi"))) == v4().encode("Hi")
    assert ids(TINY.complete(complete(token_ids=b"\x05\x00\x00\x00"))) == [5]
    for empty in (complete(token_ids=b""), complete(token_ids=b"")):
        with pytest.raises(InvalidRequestError) as caught:
            TINY.complete(empty)
        assert caught.value.reason == "EMPTY_PROMPT"
    with pytest.raises(InvalidRequestError, match="4 bytes"):
        TINY.complete(complete(token_ids=b"abc"))


def test_the_time_a_template_sees_is_given() -> None:
    prompts = builder(v4(), v4_checkpoint(), "{{ strftime_now('%Y-%m-%d %H:%M') }}")
    assert prompts.chat(chat([{"role": "user", "content": "x"}]), time_unix_s=1_700_000_000).text == "2023-11-14 22:13"


def test_developer_messages_are_system_messages_to_a_template_that_has_no_such_role() -> None:
    as_developer = TINY.chat(
        chat([{"role": "developer", "content": "D"}, {"role": "user", "content": "u"}]), time_unix_s=0
    )
    assert as_developer.text == f"{BOS}D<｜User｜>u<｜Assistant｜>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0].content.nothing.at_all }}", "nothing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace(a=1) %}{% set ns._b = 2 %}", "_b"),
        ("{{ 1 / 0 }}", "division"),
        ("{% for i in range(99999999) %}{% endfor %}", "Range"),
    ],
)
def test_a_template_that_fails_says_so(template: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        V4.chat(chat([{"role": "user", "content": "x"}], chat_template=template), time_unix_s=0)


def test_templates_that_cannot_be_compiled() -> None:
    with pytest.raises(TemplateError, match="line 2"):
        V4.chat(chat([{"role": "user", "content": "x"}], chat_template="a\n{% if %}"), time_unix_s=0)
    with pytest.raises(TemplateError, match="characters"):
        V4.chat(chat([{"role": "user", "content": "x"}], chat_template="a" * 300_000), time_unix_s=0)
    with pytest.raises(CheckpointError, match="--chat-template"):
        builder(v4(), v4_checkpoint(), "{% if %}")


def test_a_checkpoint_without_a_template() -> None:
    # A vocabulary whose marks are of no format that is known.
    source = tiny_checkpoint().tokenizer_json.replace("DSML", "other").replace("latest_reminder", "another")
    checkpoint = replace(tiny_checkpoint(), chat_templates={}, tokenizer_json=source)
    prompts = PromptBuilder(checkpoint, Vocabulary(checkpoint))
    with pytest.raises(PreconditionError, match="--chat-template") as caught:
        prompts.chat(chat([{"role": "user", "content": "x"}]), time_unix_s=0)
    assert caught.value.reason == "NO_CHAT_TEMPLATE"
    assert prompts.chat(chat([{"role": "user", "content": "x"}], chat_template="hi"), time_unix_s=0).text.endswith("hi")


def test_generation_blocks_and_loop_controls() -> None:
    template = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert V4.chat(chat(messages, chat_template=template), time_unix_s=0).text == "a"


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def test_a_schema_as_deep_as_is_taken() -> None:
    request = chat([{"role": "user", "content": "a"}], tools=[text_pb2.Tool(name="f", parameters_json=nested(64))])
    assert "f" in TINY.chat(request, time_unix_s=0).text


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (text_pb2.ChatRequest(), "messages"),
        (chat([{"role": "admin", "content": "x"}]), "messages[0].role"),
        (chat([{"role": "user"}]), "messages[0].content"),
        (chat([{"role": "user", "content": "a"}, {"role": "tool", "content": "x"}]), "messages[1]"),
        (chat([{"role": "user", "content": "a", "reasoning_content": "x"}]), "messages[0].reasoning_content"),
        (chat([{"role": "user", "tool_calls": [text_pb2.ToolCall(name="f")]}]), "messages[0].tool_calls"),
        (chat([{"role": "assistant", "tool_calls": [text_pb2.ToolCall()]}]), "messages[0].tool_calls[0].function.name"),
        (chat([{"role": "user", "content": "a"}], tools=[text_pb2.Tool()]), "tools[0].function.name"),
        (
            chat([{"role": "user", "content": "a"}], tools=[text_pb2.Tool(name="f", parameters_json="[]")]),
            "tools[0].function.parameters",
        ),
        (
            chat([{"role": "user", "content": "a"}], tools=[text_pb2.Tool(name="f", parameters_json=nested(65))]),
            "tools[0].function.parameters",
        ),
        (chat([{"role": "user", "content": "a"}], chat_template_kwargs_json="{"), "chat_template_kwargs"),
        (chat([{"role": "user", "content": "a"}], chat_template_kwargs_json="[" * 100_000), "chat_template_kwargs"),
        (chat([{"role": "user", "content": "a"}], chat_template_kwargs_json='{"messages": 1}'), "chat_template_kwargs"),
    ],
)
def test_what_is_no_conversation_is_refused_by_field(request_: text_pb2.ChatRequest, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        TINY.chat(request_, time_unix_s=0)
    assert (caught.value.reason, caught.value.field) == ("INVALID_MESSAGES", field)
