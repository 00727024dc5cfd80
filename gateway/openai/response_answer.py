"""The answer of /v1/responses: items that grow, and OpenAI's events of their growth."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from rorqual.v1 import common_pb2, text_pb2

from ..failures import Failure
from ..upstream.inbox import Piece, TokenLogprob
from .answer import AnswerOptions, Progress
from .response_request import ToolOrigin
from .response_schema import (
    CustomToolCallItem,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from .usage import usage_object

_encode = msgspec.json.encode


class ResponsesAnswer:
    """One response, streamed or whole: both take the same steps, and a whole one drops the events."""

    def __init__(
        self,
        options: AnswerOptions,
        response: ResponseObject,
        tools: Mapping[str, ToolOrigin],
        *,
        now_s: Callable[[], int],
    ) -> None:
        """`response`: what is known before anything is generated; it is filled in here. `tools`: by the names that the
        model sees."""
        self.progress = Progress(options)
        self._response = response
        self._tools = tools
        self._now_s = now_s
        self._with_logprobs = options.num_top_logprobs is not None
        self._output: list[OutputItem] = response.output
        self._open: _OpenItem | None = None
        self._logprobs_due: list[TokenLogprob] = []  # of tokens whose text has not come yet
        self._sequence = 0
        self._reason = common_pb2.FINISH_REASON_UNSPECIFIED

    def chunks(self, piece: Piece) -> bytes:
        self.progress.see(piece)
        kind = piece.kind
        if self._with_logprobs and kind in ("", "content"):
            self._logprobs_due += piece.logprobs
        if kind == "content":
            return self._content(piece.text)
        if kind == "reasoning":
            return self._reasoning(piece.text)
        detail = piece.detail
        if isinstance(detail, text_pb2.ToolCallDelta):
            return self._tool_call(detail)
        if isinstance(detail, text_pb2.Accepted):
            return self._begin()
        if isinstance(detail, text_pb2.ChoiceFinished):
            return self._finish(detail)
        return b""

    def last_chunks(self) -> bytes:
        self._complete()
        name = "response.incomplete" if self._response.status == "incomplete" else "response.completed"
        return self._event(name, response=self._response)

    def whole(self, pieces: list[Piece]) -> bytes:
        for piece in pieces:
            self.chunks(piece)
        self._complete()
        return _encode(self._response)

    def failed(self, failure: Failure, request_id: str) -> bytes:
        """What ends a stream that went wrong."""
        if self._open is not None:
            self._output.append(self._open.item("incomplete"))
            self._open = None
        code = "rate_limit_exceeded" if failure.status == 429 else "server_error"
        if 400 <= failure.status < 500 and failure.status not in (408, 429):
            code = "invalid_prompt"
        if failure.code == "context_length_exceeded":  # by which clients know that they have to shorten the input
            code = failure.code
        self._response.status = "failed"
        self._response.error = ResponseError(code, failure.message)
        error = self._event("error", code=failure.code, message=failure.message, param=failure.param)
        return error + self._event("response.failed", response=self._response)

    def _event(self, name: str, /, **fields: object) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        data = _encode({"type": name, **fields, "sequence_number": number})
        return b"".join((b"event: ", name.encode(), b"\ndata: ", data, b"\n\n"))

    def _begin(self) -> bytes:
        response = self._response
        response.model = self.progress.model
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    # Items. Each begins when its first text comes, and ends when another begins.

    def _content(self, text: str) -> bytes:
        opening = (
            b"" if isinstance(self._open, _OpenMessage) else self._switch(_OpenMessage(self._id("msg"), self._at()))
        )
        item = self._open
        assert isinstance(item, _OpenMessage)
        logprobs, self._logprobs_due = self._logprobs_due, []
        return opening + self._delta(item, text, logprobs)

    def _reasoning(self, text: str) -> bytes:
        opening = (
            b"" if isinstance(self._open, _OpenReasoning) else self._switch(_OpenReasoning(self._id("rs"), self._at()))
        )
        item = self._open
        assert item is not None
        return opening + self._delta(item, text)

    def _tool_call(self, delta: text_pb2.ToolCallDelta) -> bytes:
        opening, item = b"", self._open
        if not isinstance(item, _OpenCall) or item.tool_call_idx != delta.tool_call_idx:
            origin = self._tools.get(delta.name) or ToolOrigin(delta.name, None, takes_text=False)
            kind, prefix = (_OpenTextCall, "ctc") if origin.takes_text else (_OpenCall, "fc")
            item = kind(self._id(prefix), self._at(), delta.tool_call_idx, delta.id, origin)
            opening = self._switch(item)
        if isinstance(item, _OpenTextCall):
            item.arguments.append(delta.arguments_json_delta)
            return opening
        return opening + (self._delta(item, delta.arguments_json_delta) if delta.arguments_json_delta else b"")

    def _delta(self, item: _OpenItem, text: str, logprobs: list[TokenLogprob] | None = None) -> bytes:
        item.texts.append(text)
        number, self._sequence = self._sequence, self._sequence + 1
        rest = b""
        if isinstance(item, _OpenMessage):
            item.logprobs += logprobs or ()
            rest = b',"logprobs":' + (_encode(logprobs) if logprobs else b"[]")
        return b"".join((item.delta_head, _encode(text), rest, b',"sequence_number":%d}\n\n' % number))

    def _at(self) -> int:
        """The output index of an item that begins now."""
        return len(self._output) + (self._open is not None)

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._response.id.removeprefix('resp_')}_{self._at()}"

    def _switch(self, item: _OpenItem) -> bytes:
        closing = self._close("completed")
        self._open = item
        added = self._event("response.output_item.added", output_index=item.output_index, item=item.bare())
        part = item.part("")
        if part is not None:
            added += self._event("response.content_part.added", **item.place(), part=part)
        return closing + added

    def _close(self, status: str) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        late = b""
        if isinstance(item, _OpenTextCall) and (text := item.input()):
            late = self._delta(item, text)
        done = late + self._event(item.done_name, **item.place(), **item.done_fields())
        part = item.part(item.text)
        if part is not None:
            done += self._event("response.content_part.done", **item.place(), part=part)
        whole = item.item(status)
        self._output.append(whole)
        return done + self._event("response.output_item.done", output_index=item.output_index, item=whole)

    def _finish(self, finished: text_pb2.ChoiceFinished) -> bytes:
        self._reason = finished.reason
        opening = b""
        if self._open is None and not self._output:  # it said nothing, which is an empty message
            opening = self._switch(_OpenMessage(self._id("msg"), self._at()))
        cut = finished.reason == common_pb2.FINISH_REASON_LENGTH
        return opening + self._close("incomplete" if cut else "completed")

    def _complete(self) -> None:
        response = self._response
        response.model = self.progress.model
        if self._reason == common_pb2.FINISH_REASON_LENGTH:
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        else:
            response.status = "completed"
            response.completed_at = self._now_s()
        usage = usage_object(self.progress.usages)
        response.usage = ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
            usage.total_tokens,
        )


class _OpenItem:
    """An item that still grows."""

    delta_name: str
    done_name: str

    def __init__(self, item_id: str, output_index: int) -> None:
        self.item_id = item_id
        self.output_index = output_index
        self.texts: list[str] = []
        fixed = _encode({"type": self.delta_name, **self.place()})
        self.delta_head = b"".join((b"event: ", self.delta_name.encode(), b"\ndata: ", fixed[:-1], b',"delta":'))

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def place(self) -> dict[str, object]:
        """Where its events belong."""
        return {"item_id": self.item_id, "output_index": self.output_index, "content_index": 0}

    def bare(self) -> OutputItem:
        """The item before anything was put into it."""
        raise NotImplementedError

    def item(self, status: str) -> OutputItem:
        raise NotImplementedError

    def part(self, text: str) -> OutputText | ReasoningText | None:
        """Its one content part with `text`; None where it has none."""
        raise NotImplementedError

    def done_fields(self) -> dict[str, object]:
        return {"text": self.text}


class _OpenMessage(_OpenItem):
    delta_name = "response.output_text.delta"
    done_name = "response.output_text.done"

    def __init__(self, item_id: str, output_index: int) -> None:
        super().__init__(item_id, output_index)
        self.logprobs: list[TokenLogprob] = []

    def bare(self) -> OutputItem:
        return OutputMessage(id=self.item_id, status="in_progress", content=[])

    def item(self, status: str) -> OutputItem:
        return OutputMessage(id=self.item_id, status=status, content=[self.part(self.text)])

    def part(self, text: str) -> OutputText:
        return OutputText(text, logprobs=self.logprobs if text else [])

    def done_fields(self) -> dict[str, object]:
        return {"text": self.text, "logprobs": self.logprobs}


class _OpenReasoning(_OpenItem):
    delta_name = "response.reasoning_text.delta"
    done_name = "response.reasoning_text.done"

    def bare(self) -> OutputItem:
        return ReasoningItem(id=self.item_id, status="in_progress", content=[])

    def item(self, status: str) -> OutputItem:
        return ReasoningItem(id=self.item_id, status=status, content=[self.part(self.text)])

    def part(self, text: str) -> ReasoningText:
        return ReasoningText(text)


class _OpenCall(_OpenItem):
    delta_name = "response.function_call_arguments.delta"
    done_name = "response.function_call_arguments.done"

    def __init__(self, item_id: str, output_index: int, tool_call_idx: int, call_id: str, origin: ToolOrigin) -> None:
        super().__init__(item_id, output_index)
        self.tool_call_idx = tool_call_idx
        self.call_id = call_id
        self.name = origin.name
        self.namespace = origin.namespace or msgspec.UNSET

    def place(self) -> dict[str, object]:
        return {"item_id": self.item_id, "output_index": self.output_index}

    def bare(self) -> OutputItem:
        return self._item("in_progress", "")

    def item(self, status: str) -> OutputItem:
        return self._item(status, self.text)

    def _item(self, status: str, text: str) -> OutputItem:
        return FunctionCallItem(
            id=self.item_id,
            status=status,
            call_id=self.call_id,
            name=self.name,
            namespace=self.namespace,
            arguments=text,
        )

    def part(self, text: str) -> None:
        return None

    def done_fields(self) -> dict[str, object]:
        return {"arguments": self.text}


class _OpenTextCall(_OpenCall):
    """A call of a custom tool. Its text is known when its arguments have ended, and comes as one delta."""

    delta_name = "response.custom_tool_call_input.delta"
    done_name = "response.custom_tool_call_input.done"

    def __init__(self, item_id: str, output_index: int, tool_call_idx: int, call_id: str, origin: ToolOrigin) -> None:
        super().__init__(item_id, output_index, tool_call_idx, call_id, origin)
        self.arguments: list[str] = []  # JSON, as the model writes it

    def input(self) -> str:
        """The text in the arguments. What is not of that form, or was cut off, is given as it is."""
        written = "".join(self.arguments)
        try:
            value = msgspec.json.decode(written)
        except (msgspec.DecodeError, RecursionError):
            return written
        text = value.get("input") if isinstance(value, dict) else None
        return text if isinstance(text, str) else written

    def _item(self, status: str, text: str) -> OutputItem:
        return CustomToolCallItem(
            id=self.item_id,
            status=status,
            call_id=self.call_id,
            name=self.name,
            namespace=self.namespace,
            input=text,
        )

    def done_fields(self) -> dict[str, object]:
        return {"input": self.text}
