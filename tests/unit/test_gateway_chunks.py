"""Chunk templates: the shortcut and the long way say the same, and all of it is JSON."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.openai.chunks import ChunkTemplate


def template(*, usage_key: bool = False) -> ChunkTemplate:
    return ChunkTemplate(
        response_id="chatcmpl-1",
        object_name="chat.completion.chunk",
        created=5,
        model='a "model"\n',
        fingerprint=None,
        num_choices=3,
        usage_key=usage_key,
    )


def decoded(event: bytes) -> object:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2, "one event, one line"
    return json.loads(event[6:])


@settings(deadline=None)
@given(st.integers(0, 2), st.text(), st.booleans())
def test_the_shortcut_says_what_the_long_way_says(index: int, text: str, usage_key: bool) -> None:
    chunks = template(usage_key=usage_key)
    plain = decoded(chunks.plain(index, b'"delta":{"content":', text, b"}"))
    full = decoded(chunks.full(index, b'"delta":{"content":' + json.dumps(text).encode() + b"}"))
    assert plain == full
    choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    assert plain == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 5,
        "model": 'a "model"\n',
        "system_fingerprint": None,
        "choices": [choice],
        **({"usage": None} if usage_key else {}),
    }


def test_further_members() -> None:
    event = template(usage_key=True).full(
        0,
        b'"text":"x"',
        logprobs={"tokens": []},
        finish_reason="stop",
        stop_reason="END",
        token_ids=b"\1\0\0\0\2\0\0\0",
        prompt_token_ids=b"\3\0\0\0",
        top={"usage": {"total_tokens": 1}},
    )
    chunk = decoded(event)
    assert isinstance(chunk, dict)
    assert chunk["choices"] == [
        {
            "index": 0,
            "text": "x",
            "logprobs": {"tokens": []},
            "finish_reason": "stop",
            "stop_reason": "END",
            "token_ids": [1, 2],
            "prompt_token_ids": [3],
        }
    ]
    assert chunk["usage"] == {"total_tokens": 1}
    with_ids = decoded(template(usage_key=True).full(0, b'"delta":{}', top={"prompt_token_ids": [1]}))
    assert isinstance(with_ids, dict)
    assert with_ids["usage"] is None
    last = decoded(template().usage({"total_tokens": 9}))
    assert isinstance(last, dict)
    assert (last["choices"], last["usage"]) == ([], {"total_tokens": 9})
