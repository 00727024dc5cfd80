"""/v1/chat/completions: its request and the shape of its answer."""

from __future__ import annotations

from typing import Any

import msgspec

from rorqual.core.token_ids import unpack_token_ids
from rorqual.v1 import text_pb2

from ..policy import Dialect
from ..upstream.inbox import Piece
from .answer import AnswerOptions, Progress, WholeChoice, gather
from .answer_schema import AnsweredMessage, ChatChoice, ChatCompletion
from .chunks import DONE, ChunkTemplate
from .conversation import chat_request
from .fields import BodyReader, invalid
from .logprobs import chat_logprobs
from .options import text_options
from .schema import ChatBody
from .usage import finish_reason, stop_reason, usage_object

_encode = msgspec.json.encode

READER = BodyReader(ChatBody, Dialect.CHAT)

# A delta's opening and closing, around its encoded text.
_CONTENT = b'"delta":{"content":'
_REASONING = b'"delta":{"reasoning_content":'
_EMPTY = b'"delta":{}'


def chat_command(body: ChatBody, request_id: str) -> text_pb2.TextCommand:
    """The command for `body`. Raises InvalidRequestError."""
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise invalid("max_tokens", "it differs from max_completion_tokens: send one of them")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    request = chat_request(body)
    request.options.CopyFrom(text_options(body, request_id, max_tokens))
    if body.parallel_tool_calls is not None:
        request.parallel_tool_calls = body.parallel_tool_calls
    if body.logprobs:
        request.options.sampling.logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        raise invalid("top_logprobs", "it needs logprobs: true")
    return text_pb2.TextCommand(chat=request)


class ChatAnswer:
    """A chat completion, streamed or whole."""

    def __init__(self, options: AnswerOptions) -> None:
        self.progress = Progress(options)
        self._options = options
        self._template: ChunkTemplate | None = None
        # Nothing but text in a chunk: the common case has a shortcut.
        self._plain = not (options.continuous_usage or options.return_token_ids or options.num_top_logprobs is not None)

    def chunks(self, piece: Piece) -> bytes:
        self.progress.see(piece)
        template = self._template or self._start()
        if self._plain:
            if piece.kind == "content":
                return template.plain(piece.choice_index, _CONTENT, piece.text, b"}")
            if not piece.kind:
                return b""
        if piece.kind == "accepted":
            return self._roles(template, piece)
        if piece.kind in ("usage", "echo"):
            return b""
        finished = piece.detail if isinstance(piece.detail, text_pb2.ChoiceFinished) else None
        return template.full(
            piece.choice_index,
            _delta(piece),
            logprobs=chat_logprobs(piece.logprobs) if piece.logprobs else None,
            finish_reason=finish_reason(finished) if finished else None,
            stop_reason=stop_reason(finished, self._options.stop_token_ids),
            token_ids=piece.token_ids if self._options.return_token_ids else None,
            top=self._top(),
        )

    def _start(self) -> ChunkTemplate:
        self._template = self._options.template("chat.completion.chunk", self.progress.model)
        return self._template

    def _roles(self, template: ChunkTemplate, piece: Piece) -> bytes:
        """The first chunk of each choice."""
        top = self._top() or {}
        if self._options.return_token_ids:
            top["prompt_token_ids"] = unpack_token_ids(self.progress.prompt_token_ids(piece.choice_index)).tolist()
        role = b'"delta":{"role":"assistant","content":""}'
        return b"".join(template.full(index, role, top=top) for index in range(self._options.num_choices))

    def _top(self) -> dict[str, Any] | None:
        return {"usage": self.progress.usage_so_far()} if self._options.continuous_usage else None

    def last_chunks(self) -> bytes:
        if self._options.include_usage and self._template is not None:
            return self._template.usage(usage_object(self.progress.usages)) + DONE
        return DONE

    def whole(self, pieces: list[Piece]) -> bytes:
        options, progress = self._options, self.progress
        choices = gather(pieces, options.num_choices, progress)
        answer = ChatCompletion(
            id=options.response_id,
            created=options.created,
            model=progress.model,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=usage_object(progress.usages),
            system_fingerprint=options.fingerprint(progress.model),
            prompt_logprobs=choices[0].prompt_logprobs(options),
        )
        if options.return_token_ids:
            answer.prompt_token_ids = unpack_token_ids(progress.prompt_token_ids(0)).tolist()
        return _encode(answer)

    def _choice(self, index: int, choice: WholeChoice) -> ChatChoice:
        options = self._options
        message = AnsweredMessage(content="".join(choice.content))
        if choice.reasoning:
            message.reasoning_content = message.reasoning = "".join(choice.reasoning)
        if choice.tool_calls:
            message.content = message.content or None
            message.tool_calls = [choice.tool_calls[key] for key in sorted(choice.tool_calls)]
        return ChatChoice(
            index=index,
            message=message,
            logprobs=chat_logprobs(choice.logprobs) if options.num_top_logprobs is not None else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason(options),
            token_ids=choice.token_ids(options),
        )


def _delta(piece: Piece) -> bytes:
    detail = piece.detail
    if isinstance(detail, text_pb2.ToolCallDelta):
        call: dict[str, Any] = {"index": detail.tool_call_idx}
        function: dict[str, Any] = {"arguments": detail.arguments_json_delta}
        if detail.id:
            call |= {"id": detail.id, "type": "function"}
        if detail.name:
            function = {"name": detail.name, **function}
        return b'"delta":' + _encode({"tool_calls": [{**call, "function": function}]})
    if piece.kind == "finished":
        return _EMPTY
    text = _encode(piece.text)
    if piece.kind == "reasoning":
        return b"".join((_REASONING, text, b',"reasoning":', text, b"}"))
    return b"".join((_CONTENT, text, b"}"))
