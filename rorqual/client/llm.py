"""LLM: the blocking Python API, over a stack of its own or a running server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from rorqual.core.errors import ConfigError, InvalidRequestError, UnavailableError

from .aio import AsyncClient, Message, Prompt, parse_grpc_url
from .outputs import RequestOutput
from .params import SamplingParams

if TYPE_CHECKING:
    from rorqual.launch import Event, Stack

T = TypeVar("T")

MAX_CONCURRENCY = 256
"""Requests in flight at once, unless asked for otherwise; the scheduler batches what it is given."""


class LLM:
    """Generates text from Python.

    `LLM(model="models/tiny", max_model_len=2048)` starts tokenizer, scheduler and executor as processes of its own;
    every setting of theirs is accepted by its name, `config` names a TOML file with more. `LLM(url="grpc://host:port")` uses a running tokenizer service.
    Close it (a `with` block, `close()`, or the end of the program) and no process is left. Raises RorqualError.
    """

    def __init__(
        self,
        model: str = "",
        *,
        url: str = "",
        config: str = "",
        max_concurrency: int = MAX_CONCURRENCY,
        on_event: Callable[[Event], None] | None = None,
        **settings: Any,
    ) -> None:
        if max_concurrency < 1:
            raise ConfigError(f"max_concurrency must be at least 1, got {max_concurrency}", field="max_concurrency")
        stack: Stack | None = None
        if url:
            if model or config or settings:
                names = ", ".join([*(["model"] if model else []), *(["config"] if config else []), *settings])
                raise ConfigError(f"a running server has its own settings: give either url, or {names}")
            address = parse_grpc_url(url)
        else:
            stack = _start_stack({"model": model or None, **settings}, config, on_event)
            address = stack.text_address
        self._max_concurrency = max_concurrency
        self._stack = stack
        self._loop = _LoopThread()
        self._client: AsyncClient = self._loop.run(_open(address))
        # Runs once: on close(), when the object is collected, or at the program's end.
        self._finalizer = weakref.finalize(self, _close, self._loop, self._client, stack)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt (a text, or token ids); the outputs are in the prompts' order.

        A single prompt gives a list of one. `sampling_params`: one for all, or one for each prompt. `use_tqdm`
        shows a progress bar on stderr. The first request that fails ends the others and raises its RorqualError.
        """
        many: list[Prompt] = [cast(Prompt, prompts)] if _is_prompt(prompts) else list(cast(Sequence[Prompt], prompts))
        params = _params_for(many, sampling_params)
        return self._run_all(
            [partial(self._client.complete, p, s) for p, s in zip(many, params, strict=True)], use_tqdm
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Message] = (),
        tool_choice: str | Message | None = None,
        parallel_tool_calls: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Message | None = None,
        reasoning_effort: str = "",
    ) -> list[RequestOutput]:
        """Answer each conversation, a list of messages such as {"role": "user", "content": "Hello"}.

        One conversation gives a list of one. All else is as in `generate`.
        """
        single = not messages or hasattr(messages[0], "keys")
        many = cast(list[Sequence[Message]], [messages] if single else list(messages))
        params = _params_for(many, sampling_params)

        def job(conversation: Sequence[Message], one: SamplingParams) -> Coroutine[Any, Any, RequestOutput]:
            return self._client.chat(
                conversation,
                one,
                tools=tools,
                tool_choice=tool_choice,
                parallel_tool_calls=parallel_tool_calls,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                reasoning_effort=reasoning_effort,
            )

        return self._run_all([partial(job, m, s) for m, s in zip(many, params, strict=True)], use_tqdm)

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Iterator[str]:
        """One answer's text, piece by piece (reasoning left out). Closing the iterator cancels the request."""
        return self._stream(lambda: self._client.stream_chat(messages, params))

    def stream_generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """One continuation's text, piece by piece. Closing the iterator cancels the request."""
        return self._stream(lambda: self._client.stream_complete(prompt, params))

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        return self._loop.run(self._client.tokenize(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self._loop.run(self._client.detokenize(token_ids))

    @property
    def url(self) -> str:
        """Where the TextService is, for a second client of a private stack; "" when given."""
        return f"grpc://{self._stack.text_address}" if self._stack else ""

    @property
    def pids(self) -> dict[str, int]:
        """The processes of a private stack."""
        return self._stack.pids if self._stack else {}

    def close(self) -> None:
        """End running requests and, for a private stack, its processes; returns when they have ended."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run_all(self, jobs: Sequence[Callable[[], Coroutine[Any, Any, T]]], use_tqdm: bool) -> list[T]:
        self._check_open()
        with _progress_bar(len(jobs), use_tqdm) as advance:
            return self._loop.run(_bounded(jobs, self._max_concurrency, advance))

    def _stream(self, open_stream: Callable[[], Any]) -> Iterator[str]:
        self._check_open()
        events = open_stream()
        try:
            while (event := self._loop.run(_next_event(events))) is not None:
                if event.WhichOneof("event") == "content":
                    yield event.content
        finally:
            self._loop.run(events.aclose())

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise UnavailableError("this LLM has been closed")
        if self._stack is not None and self._stack.error is not None:
            raise self._stack.error


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rorqual-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run to the end and return its result; Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
            raise

    def close(self) -> None:
        async def cancel_rest() -> None:
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            await self._loop.shutdown_asyncgens()

        self.run(cancel_rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _open(address: str) -> AsyncClient:
    return AsyncClient(address)


async def _next_event(events: Any) -> Any:
    return await anext(events, None)


async def _bounded(
    jobs: Sequence[Callable[[], Coroutine[Any, Any, T]]], limit: int, advance: Callable[[], None]
) -> list[T]:
    """Run all jobs, at most `limit` at once; results in order. The first failure cancels the others."""
    slots = asyncio.Semaphore(limit)

    async def one(job: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with slots:
            result = await job()
        advance()
        return result

    tasks = [asyncio.ensure_future(one(job)) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _close(loop: _LoopThread, client: AsyncClient, stack: Stack | None) -> None:
    try:
        loop.run(client.close())
        loop.close()
    finally:
        if stack is not None:
            stack.stop()


def _start_stack(settings: dict[str, Any], config: str, on_event: Callable[[Event], None] | None) -> Stack:
    from rorqual.core.suggestions import of_flag
    from rorqual.launch import Stack, make_plan, stack_settings
    from rorqual.launch.plan import WITHOUT_HTTP

    valid = stack_settings(WITHOUT_HTTP)
    for name in settings:
        if name not in valid:
            raise ConfigError(f"unknown setting {name}{of_flag(name, valid)}", field=name)
    stack = Stack(make_plan(settings, names=WITHOUT_HTTP, config=config), on_event=on_event)
    stack.start()
    return stack


def _is_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _params_for(
    requests: Sequence[object], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(requests)
    if len(params) != len(requests):
        raise InvalidRequestError(
            f"one SamplingParams for all, or one for each: got {len(params)} for {len(requests)} requests",
            field="sampling_params",
        )
    return list(params)


@contextlib.contextmanager
def _progress_bar(total: int, show: bool) -> Iterator[Callable[[], None]]:
    if not show or total == 0:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=False) as progress:
        task = progress.add_task("prompts", total=total)
        yield lambda: progress.advance(task)
