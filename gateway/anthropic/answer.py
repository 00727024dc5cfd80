"""The answer of /v1/messages: content blocks, and Anthropic's events of their growth."""

from __future__ import annotations

import base64
import hashlib

import msgspec

from rorqual.v1 import common_pb2, text_pb2

from ..openai.answer import AnswerOptions, Progress
from ..upstream.inbox import Piece
from .schema import ContentBlock, MessageObject, MessageUsage, TextBlock, ThinkingBlock, ThinkingTokens, ToolUseBlock

_encode = msgspec.json.encode

_STOP_REASONS = {
    common_pb2.FINISH_REASON_STOP: "end_turn",
    common_pb2.FINISH_REASON_LENGTH: "max_tokens",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_use",
}


PING = b'event: ping\ndata: {"type":"ping"}\n\n'
"""What says that a silent stream is alive."""


class MessagesAnswer:
    """One message, streamed or whole: both take the same steps, and a whole one drops the events."""

    def __init__(self, options: AnswerOptions, *, max_tokens: int, omit_thinking: bool = False) -> None:
        """`omit_thinking`: blocks of thinking are empty but for their signature."""
        self.progress = Progress(options)
        self._thinking = _OpenOmitted if omit_thinking else _OpenThinking
        self._max_tokens = max_tokens
        self._message = MessageObject(id=options.response_id, model=options.model, usage=MessageUsage(0, 0))
        self._blocks: list[ContentBlock] = self._message.content
        self._open: _OpenBlock | None = None

    def chunks(self, piece: Piece) -> bytes:
        self.progress.see(piece)
        kind = piece.kind
        if kind == "content":
            return self._text(_OpenText, piece.text)
        if kind == "reasoning":
            return self._text(self._thinking, piece.text)
        detail = piece.detail
        if isinstance(detail, text_pb2.ToolCallDelta):
            return self._tool_call(detail)
        if isinstance(detail, text_pb2.Accepted):
            return self._begin(detail)
        if isinstance(detail, text_pb2.ChoiceFinished):
            self._stop(detail)
            return self._close(cut=detail.reason == common_pb2.FINISH_REASON_LENGTH)
        return b""

    def last_chunks(self) -> bytes:
        message = self._message
        self._count()
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        return _event("message_delta", delta=delta, usage=message.usage) + _event("message_stop")

    def whole(self, pieces: list[Piece]) -> bytes:
        for piece in pieces:
            self.chunks(piece)
        self._count()
        return _encode(self._message)

    def _begin(self, accepted: text_pb2.Accepted) -> bytes:
        message = self._message
        message.model = self.progress.model
        cached = accepted.num_cached_tokens
        message.usage = MessageUsage(accepted.num_prompt_tokens - cached, 0, cached)
        return _event("message_start", message=message)

    def _text(self, kind: type[_OpenText] | type[_OpenThinking], text: str) -> bytes:
        opening, block = b"", self._open
        if not isinstance(block, kind):
            block = kind(self._at())
            opening = self._switch(block)
        return opening + block.delta(text)

    def _tool_call(self, delta: text_pb2.ToolCallDelta) -> bytes:
        opening, block = b"", self._open
        if not isinstance(block, _OpenToolUse) or block.tool_call_idx != delta.tool_call_idx:
            block = _OpenToolUse(self._at(), delta.tool_call_idx, delta.id, delta.name)
            opening = self._switch(block)
        return opening + (block.delta(delta.arguments_json_delta) if delta.arguments_json_delta else b"")

    def _at(self) -> int:
        """The index of a block that begins now."""
        return len(self._blocks) + (self._open is not None)

    def _switch(self, block: _OpenBlock) -> bytes:
        closing = self._close()
        self._open = block
        return closing + _event("content_block_start", index=block.index, content_block=block.bare())

    def _close(self, *, cut: bool = False) -> bytes:
        """`cut`: the open block ends because the answer may not be longer."""
        block, self._open = self._open, None
        if block is None:
            return b""
        self._blocks.append(block.whole(cut=cut))
        return block.last_delta() + _event("content_block_stop", index=block.index)

    def _stop(self, finished: text_pb2.ChoiceFinished) -> None:
        message = self._message
        message.stop_reason = _STOP_REASONS.get(finished.reason, "end_turn")
        if finished.WhichOneof("stop") == "stop_string":
            message.stop_reason, message.stop_sequence = "stop_sequence", finished.stop_string
        elif finished.reason == common_pb2.FINISH_REASON_LENGTH and self.progress.num_generated < self._max_tokens:
            message.stop_reason = "model_context_window_exceeded"

    def _count(self) -> None:
        self._message.model = self.progress.model
        prompt = cached = generated = thought = 0
        for usage in self.progress.usages:
            prompt += usage.num_prompt_tokens
            cached += usage.num_cached_tokens
            generated += usage.num_generated_tokens
            thought += usage.num_reasoning_tokens
        details = ThinkingTokens(thought)
        self._message.usage = MessageUsage(prompt - cached, generated, cached, output_tokens_details=details)


def _event(name: str, /, **fields: object) -> bytes:
    return b"".join((b"event: ", name.encode(), b"\ndata: ", _encode({"type": name, **fields}), b"\n\n"))


class _OpenBlock:
    """A block that still grows."""

    delta_type: str
    delta_key: str

    def __init__(self, index: int) -> None:
        self.index = index
        self.parts: list[str] = []
        # All but the text of its deltas.
        self._head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (
                index,
                self.delta_type.encode(),
                self.delta_key.encode(),
            )
        )

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def delta(self, text: str) -> bytes:
        self.parts.append(text)
        return b"".join((self._head, _encode(text), b"}}\n\n"))

    def last_delta(self) -> bytes:
        return b""

    def bare(self) -> ContentBlock:
        """The block before anything was put into it."""
        raise NotImplementedError

    def whole(self, *, cut: bool) -> ContentBlock:
        raise NotImplementedError


class _OpenText(_OpenBlock):
    delta_type, delta_key = "text_delta", "text"

    def bare(self) -> ContentBlock:
        return TextBlock("")

    def whole(self, *, cut: bool) -> ContentBlock:
        return TextBlock(self.text)


class _OpenThinking(_OpenBlock):
    delta_type, delta_key = "thinking_delta", "thinking"

    def bare(self) -> ContentBlock:
        return ThinkingBlock("", "")

    def whole(self, *, cut: bool) -> ContentBlock:
        return ThinkingBlock(self.text, self._signature())

    def last_delta(self) -> bytes:
        delta = {"type": "signature_delta", "signature": self._signature()}
        return _event("content_block_delta", index=self.index, delta=delta)

    def _signature(self) -> str:
        """Clients want one and send it back. It is a digest of the thought: nothing here trusts it."""
        return base64.b64encode(hashlib.blake2b(self.text.encode(), digest_size=24).digest()).decode()


class _OpenOmitted(_OpenThinking):
    """A thought that the client does not want to see: it has a signature alone."""

    def delta(self, text: str) -> bytes:
        super().delta(text)
        return b""

    def whole(self, *, cut: bool) -> ContentBlock:
        return ThinkingBlock("", self._signature())


class _OpenToolUse(_OpenBlock):
    delta_type, delta_key = "input_json_delta", "partial_json"

    def __init__(self, index: int, tool_call_idx: int, call_id: str, name: str) -> None:
        super().__init__(index)
        self.tool_call_idx = tool_call_idx
        self._call_id, self._name = call_id, name

    def bare(self) -> ContentBlock:
        return ToolUseBlock(self._call_id, self._name, {})

    def whole(self, *, cut: bool) -> ContentBlock:
        return ToolUseBlock(self._call_id, self._name, _arguments(self.text, cut=cut))


def _arguments(text: str, *, cut: bool) -> dict[str, object]:
    """The input of a call. What a model wrote that is no JSON object is kept as text, for nothing may be lost.

    A call that was cut off has no input yet: its beginning would be a member that no tool knows.
    """
    try:
        value = msgspec.json.decode(text) if text else {}
    except (msgspec.DecodeError, RecursionError):
        value = {} if cut else text
    return value if isinstance(value, dict) else {"arguments": text}
