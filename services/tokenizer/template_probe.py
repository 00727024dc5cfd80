"""Whether a checkpoint's template writes what a chat format writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rorqual.core.errors import RorqualError

from .control_tokens import ControlTokens
from .conversation import Conversation
from .formats.base import ChatFormat, PromptWriter, Thinking
from .template import ChatTemplate

_TURNS = (
    [{"role": "user", "content": "one"}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ],
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "finds a thing",
        "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}},
    },
}


def writes_as(
    chat_format: ChatFormat, template: ChatTemplate, control: ControlTokens, special_tokens: Mapping[str, str]
) -> bool:
    """Ordinary chats come out equal; tools do too, or the template leaves them out."""

    def own(chat: Conversation) -> str:
        out = PromptWriter(control)
        chat_format.render(chat, out)
        return "".join(segment.text for segment in out.segments())

    def templates(chat: Conversation) -> str:
        variables: dict[str, Any] = json.loads(
            json.dumps({"messages": chat.messages, "tools": chat.tools, **chat.variables})
        )
        return template.render({**special_tokens, **variables, "add_generation_prompt": True}, time_unix_s=0)

    switch = (False, True) if chat_format.thinking is Thinking.SWITCH else (None,)
    try:
        for messages in _TURNS:
            for thinking in switch:
                variables = {} if thinking is None else {"thinking": thinking, "enable_thinking": thinking}
                chat = Conversation(messages, None, variables, True, False, thinking)
                plain = templates(chat)
                if plain != own(chat):
                    return False
                if chat_format.shape is not None:
                    with_tools = replace(chat, tools=[_TOOL])
                    if templates(with_tools) not in (plain, own(with_tools)):
                        return False
    except RorqualError:
        return False
    return True
