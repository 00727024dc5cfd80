"""An asyncio client of TextService, whose streams go on when the server is lost and comes back.

A stream that broke is opened again with the tokens that were received (see TextResume in text.proto), so a reader sees
neither gap nor repeat.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from rorqual.core import limits
from rorqual.core.errors import InvalidRequestError, UnavailableError
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.rpc.channel import open_channel
from rorqual.rpc.prompt_echo import EchoJoiner
from rorqual.rpc.status import from_error_proto, from_rpc_error
from rorqual.v1 import text_pb2, text_pb2_grpc

from .outputs import CompletionOutput, Logprob, RequestOutput, ToolCall, Usage
from .params import SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

_TOOL_CHOICES = {
    "none": text_pb2.TOOL_CHOICE_MODE_NONE,
    "auto": text_pb2.TOOL_CHOICE_MODE_AUTO,
    "required": text_pb2.TOOL_CHOICE_MODE_REQUIRED,
}
_FINISH_REASONS = {1: "stop", 2: "length", 3: "tool_calls", 4: "aborted", 5: "error"}
_LOST = (grpc.StatusCode.UNAVAILABLE,)


def parse_grpc_url(url: str) -> str:
    """ "host:port" of "grpc://host:port". Raises InvalidRequestError."""
    scheme, separator, address = url.partition("://")
    host, _, port = address.rstrip("/").rpartition(":")
    if scheme != "grpc" or not separator or not host or not port.isdigit():
        raise InvalidRequestError(f"the URL must be grpc://host:port, got {url!r}", field="url")
    return address.rstrip("/")


class AsyncClient:
    """One channel to a tokenizer service; all methods raise RorqualError.

    `resume_timeout_s`: how long a broken stream is tried again before UnavailableError. `timeout_s`: of calls that
    are no streams.
    """

    def __init__(self, address: str, *, resume_timeout_s: float = 30.0, timeout_s: float = 60.0) -> None:
        self._channel = open_channel(address)
        self._stub: Any = text_pb2_grpc.TextServiceStub(self._channel)
        self._address = address
        self._resume_timeout_s = resume_timeout_s
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    # --- streams ---------------------------------------------------------------------------------------------------

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        model: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str = "",
        cache_salt: str | None = None,
        priority: int = 0,
        return_prompt_token_ids: bool = False,
    ) -> AsyncIterator[text_pb2.TextEvent]:
        """The events of one chat, in OpenAI's shapes of messages, tools and tool_choice."""
        request = chat_request(messages, tools, continue_final_message, chat_template_kwargs)
        if (choice := _tool_choice(tool_choice)) is not None:
            request.tool_choice.CopyFrom(choice)
        if parallel_tool_calls is not None:
            request.parallel_tool_calls = parallel_tool_calls
        request.reasoning_effort = reasoning_effort
        request.options.CopyFrom(_options(params, model, cache_salt, priority, return_prompt_token_ids))
        return self._stream(self._stub.Chat, request)

    def stream_complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        echo: bool = False,
        cache_salt: str | None = None,
        priority: int = 0,
        return_prompt_token_ids: bool = False,
    ) -> AsyncIterator[text_pb2.TextEvent]:
        """The events of one completion of a text or of token ids."""
        request = text_pb2.CompleteRequest(
            options=_options(params, model, cache_salt, priority, return_prompt_token_ids), echo=echo
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids = _pack(prompt)
        return self._stream(self._stub.Complete, request)

    async def _stream(
        self, method: Any, request: text_pb2.ChatRequest | text_pb2.CompleteRequest
    ) -> AsyncIterator[text_pb2.TextEvent]:
        progress = _Progress(request)
        lost_since: float | None = None
        while True:
            call = method(request)
            try:
                async for response in call:
                    lost_since = None
                    for event in response.events:
                        if progress.is_new(event):
                            yield event
                if progress.done:
                    return
                fault: UnavailableError = UnavailableError(f"{self._address} ended a stream before its last event")
            except grpc.aio.AioRpcError as error:
                translated = from_rpc_error(error)
                if error.code() not in _LOST:
                    raise translated from None
                fault = UnavailableError(f"{self._address}: {translated.message}", reason=translated.reason)
            finally:
                call.cancel()
            now = time.monotonic()
            lost_since = now if lost_since is None else lost_since
            if now - lost_since > self._resume_timeout_s:
                raise fault
            await asyncio.sleep(random.uniform(0.1, 0.5))
            progress.write_resume(request)

    # --- whole answers ---------------------------------------------------------------------------------------------

    async def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **kwargs: Any
    ) -> RequestOutput:
        """`stream_chat`, gathered."""
        return await gather(self.stream_chat(messages, params, return_prompt_token_ids=True, **kwargs))

    async def complete(self, prompt: Prompt, params: SamplingParams | None = None, **kwargs: Any) -> RequestOutput:
        """`stream_complete`, gathered."""
        output = await gather(self.stream_complete(prompt, params, return_prompt_token_ids=True, **kwargs))
        if isinstance(prompt, str):
            output.prompt = prompt
        return output

    # --- single calls ----------------------------------------------------------------------------------------------

    async def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        request = text_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        return list(unpack_token_ids((await self._unary(self._stub.Tokenize, request)).token_ids))

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        request = text_pb2.DetokenizeRequest(
            model=model, token_ids=_pack(token_ids), skip_special_tokens=skip_special_tokens
        )
        text: str = (await self._unary(self._stub.Detokenize, request)).text
        return text

    async def render_chat(self, messages: Sequence[Message], **kwargs: Any) -> tuple[str, list[int]]:
        """The prompt that a chat becomes: text and ids."""
        request = text_pb2.RenderChatRequest(chat=chat_request(messages, **kwargs))
        response = await self._unary(self._stub.RenderChat, request)
        return response.text, list(unpack_token_ids(response.token_ids))

    async def list_models(self) -> list[str]:
        response = await self._unary(self._stub.ListModels, text_pb2.ListModelsRequest())
        return [model.name for model in response.models]

    async def _unary(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self._timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise UnavailableError(f"{self._address} did not answer within {self._timeout_s:g} s") from None
            raise from_rpc_error(error) from None


class _Progress:
    """What was received of one request: enough to go on after it, and to drop what comes twice."""

    def __init__(self, request: text_pb2.ChatRequest | text_pb2.CompleteRequest) -> None:
        self._accepted: text_pb2.Accepted | None = None
        self._histories: dict[int, bytearray] = {}
        self._finished: set[int] = set()
        self._echoed: set[int] = set()
        self._echoes = EchoJoiner()
        self._prompt_logprobs = request.options.sampling.HasField("prompt_logprobs")
        self.done = False

    def is_new(self, event: text_pb2.TextEvent) -> bool:
        kind, choice = event.WhichOneof("event"), event.choice_index
        if event.token_ids:
            self._histories.setdefault(choice, bytearray()).extend(event.token_ids)
        if kind == "accepted":
            fresh = self._accepted is None
            self._accepted = event.accepted if fresh else self._accepted
            return fresh
        if kind == "echo":
            if choice in self._echoed or not self._echoes.join(choice, event.echo):
                return False
            self._echoed.add(choice)
            return True
        if kind == "finished":
            fresh = choice not in self._finished
            self._finished.add(choice)
            return fresh
        if kind == "usage":
            self.done = True
        return True

    def write_resume(self, request: text_pb2.ChatRequest | text_pb2.CompleteRequest) -> None:
        options = request.options
        options.attempt += 1
        if self._accepted is None:  # nothing was promised yet: it is still the first contact
            return
        options.sampling.seed = self._accepted.seed
        options.resume.CopyFrom(
            text_pb2.TextResume(
                choices=[
                    text_pb2.ChoiceHistory(choice_index=choice, token_ids=bytes(ids))
                    for choice, ids in sorted(self._histories.items())
                ],
                num_prompt_tokens=self._accepted.num_prompt_tokens,
                prompt_digest=self._accepted.prompt_digest,
                seed=self._accepted.seed,
                template_time_unix_s=self._accepted.template_time_unix_s,
                num_cached_tokens=self._accepted.num_cached_tokens,
                queue_time_us=self._accepted.queue_time_us,
                prompt_logprobs_delivered=self._prompt_logprobs and bool(self._echoed),
            )
        )


async def gather(events: AsyncIterator[text_pb2.TextEvent]) -> RequestOutput:
    """All events of one request as one result. Raises RorqualError where a choice ended by an error."""
    output = RequestOutput()
    choices: dict[int, CompletionOutput] = {}
    tools: dict[tuple[int, int], ToolCall] = {}
    async for event in events:
        kind = event.WhichOneof("event")
        if kind == "accepted":
            output.model = event.accepted.model
            output.prompt_token_ids = list(unpack_token_ids(event.accepted.prompt_token_ids))
            continue
        if kind == "usage":
            output.usage = Usage(
                num_prompt_tokens=event.usage.num_prompt_tokens,
                num_cached_tokens=event.usage.num_cached_tokens,
                num_generated_tokens=event.usage.num_generated_tokens,
                num_reasoning_tokens=event.usage.num_reasoning_tokens,
                queue_time_s=event.usage.queue_time_us / 1e6,
            )
            continue
        choice = choices.setdefault(event.choice_index, CompletionOutput(event.choice_index))
        choice.token_ids.extend(unpack_token_ids(event.token_ids))
        if event.logprobs:
            choice.logprobs = (choice.logprobs or []) + [_logprob(item) for item in event.logprobs]
        if kind == "content":
            choice.text += event.content
        elif kind == "reasoning":
            choice.reasoning += event.reasoning
        elif kind == "tool_call":
            delta = event.tool_call
            key = (event.choice_index, delta.tool_call_idx)
            call = tools.get(key, ToolCall("", "", ""))
            tools[key] = ToolCall(
                delta.id or call.id, delta.name or call.name, call.arguments + delta.arguments_json_delta
            )
        elif kind == "echo":
            choice.text += event.echo.text
            if event.echo.logprobs:
                output.prompt_logprobs = [_logprob(item) for item in event.echo.logprobs]
        elif kind == "finished":
            if event.finished.HasField("error"):
                raise from_error_proto(event.finished.error)
            choice.finish_reason = _FINISH_REASONS.get(event.finished.reason)
            stop = event.finished.WhichOneof("stop")
            choice.stop_reason = getattr(event.finished, stop) if stop else None
    for (index, _), tool_call in sorted(tools.items()):
        choices[index].tool_calls.append(tool_call)
    output.outputs = [choices[index] for index in sorted(choices)]
    return output


def chat_request(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> text_pb2.ChatRequest:
    """A ChatRequest from OpenAI-shaped messages and tools. Raises InvalidRequestError naming the message."""
    import json

    request = text_pb2.ChatRequest(continue_final_message=continue_final_message)
    if continue_final_message:
        request.add_generation_prompt = False
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"{where} must be a mapping with a role, got {message!r}", field=where)
        proto = request.messages.add(role=message["role"])
        for key in ("content", "reasoning_content", "tool_call_id", "name"):
            value = message.get(key)
            if value is None:
                continue
            if not isinstance(value, str):
                raise InvalidRequestError(
                    f"{where}.{key} must be text, got {type(value).__name__}", field=f"{where}.{key}"
                )
            setattr(proto, key, value)
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            arguments = function.get("arguments", "")
            proto.tool_calls.add(
                id=call.get("id", ""),
                name=function.get("name", ""),
                arguments_json=arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
            )
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters")
        proto_tool = request.tools.add(
            name=function.get("name", ""),
            description=function.get("description", ""),
            parameters_json=json.dumps(parameters, ensure_ascii=False) if parameters is not None else "",
        )
        if function.get("strict") is not None:
            proto_tool.strict = bool(function["strict"])
    if chat_template_kwargs:
        request.chat_template_kwargs_json = json.dumps(dict(chat_template_kwargs), ensure_ascii=False)
    return request


def _tool_choice(choice: str | Mapping[str, Any] | None) -> text_pb2.ToolChoice | None:
    """ "none", "auto", "required", or {"type": "function", "function": {"name": …}}."""
    if choice is None:
        return None
    if isinstance(choice, str) and choice in _TOOL_CHOICES:
        return text_pb2.ToolChoice(mode=_TOOL_CHOICES[choice])
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(
            f"tool_choice must be 'none', 'auto', 'required' or name a function, got {choice!r}", field="tool_choice"
        )
    return text_pb2.ToolChoice(function_name=name)


def _options(
    params: SamplingParams | None, model: str, cache_salt: str | None, priority: int, return_prompt_token_ids: bool
) -> text_pb2.TextOptions:
    limits.check_strings((("model", model), ("cache_salt", cache_salt or "")))
    limits.REQUEST["priority"].check(priority)
    options = (params or SamplingParams()).to_options(request_id=uuid.uuid4().hex, model=model)
    if cache_salt is not None:
        options.cache_salt = cache_salt
    options.priority = priority
    options.return_prompt_token_ids = return_prompt_token_ids
    return options


def _pack(token_ids: Sequence[int]) -> bytes:
    try:
        return pack_token_ids(token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequestError(f"token ids are whole numbers from 0 to 2**32 - 1: {error}", field="prompt") from None


def _logprob(proto: text_pb2.TokenLogprobText) -> Logprob:
    return Logprob(
        token_id=proto.token_id,
        token=proto.token,
        logprob=proto.logprob if proto.HasField("logprob") else None,
        top=tuple(_logprob(item) for item in proto.top),
    )
