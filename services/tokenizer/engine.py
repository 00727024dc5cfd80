"""From a request to a run: checks, rendering and encoding (off the event loop, but for short prompts), spans and counts."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode

from rorqual.core.clock import Clock
from rorqual.core.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    PreconditionError,
    PromptTooLongError,
    QueueFullError,
    RorqualError,
)
from rorqual.core.token_ids import unpack_token_ids
from rorqual.telemetry import (
    ATTR_CACHED_TOKENS,
    ATTR_FINISH_REASONS,
    ATTR_INPUT_TOKENS,
    ATTR_MODEL,
    ATTR_OUTPUT_TOKENS,
    ATTR_QUEUE_TIME_S,
    ATTR_REQUEST_ID,
    Telemetry,
    context_from_proto,
    context_to_proto,
)
from rorqual.v1 import common_pb2, text_pb2

from .abandon import abandoned_by, check_wanted
from .checkpoint import TextCheckpoint
from .choice import ChoiceRules
from .conversation import may_call
from .formats.events import CallSyntax
from .formats.output import OutputSyntax
from .grammar_job import GrammarJob, calls_of
from .grammars import Grammars, check_source
from .link import SchedulerLink
from .logprob_text import LogprobWriter
from .model_watch import ModelWatch
from .outbox import EventSink
from .prompt import Prompt, PromptBuilder, reasons_first
from .run import RunSpec, TextRun
from .sampling import check_options, check_token_ids, filled_sampling
from .stop_strings import compile_stop_strings
from .tool_grammar import is_strict, makes_one_call, must_call
from .vocabulary import Vocabulary

T = TypeVar("T")

MAX_PREPARING = 4096
"""Requests being rendered and encoded, or waiting for it; further ones are refused."""

MAX_TEXTS = 256
"""Texts being encoded or decoded for no answer, or waiting for it; further ones are refused."""

_TEXT_LIMITS = {"characters": (1 << 20, 16), "bytes": (4 << 20, 64), "tokens": (1 << 18, 4)}
"""Of such a text: (what is taken in any case, how many times the model's length is)."""

SHORT_BYTES = 1024
SHORT_ALONE_BYTES = 8 * 1024
"""Requests up to so many bytes (the latter while no other is under way) are rendered and encoded on the event loop: some
0.2 ms, and where no piece is known up to 1 ms (7 ms, in which nobody waits). It saves the two hand-overs to a thread and
back, 0.1 ms each where idle cores sleep."""
TURN_S = 0.002
"""Of requests that come together, once some took so long, the rest go to the pool: the event loop has streams to serve."""

TextRequest = text_pb2.ChatRequest | text_pb2.CompleteRequest


class TextEngine:
    """What the servicer needs: prompts, and runs of requests. Lives on one event loop."""

    def __init__(
        self,
        *,
        checkpoint: TextCheckpoint,
        vocabulary: Vocabulary,
        builder: PromptBuilder,
        link: SchedulerLink,
        watch: ModelWatch,
        telemetry: Telemetry,
        clock: Clock,
        served_model_name: str,
        grammars: Grammars | None = None,
        num_threads: int = 2,
    ) -> None:
        """`grammars`: None where structured output is refused."""
        self._grammars = grammars
        self.model_name = served_model_name
        self.vocabulary = vocabulary
        self.builder = builder
        self.created_unix_s = int(clock.time_s())
        self._checkpoint = checkpoint
        self._link = link
        self._watch = watch
        self._telemetry = telemetry
        self._tracer = telemetry.tracer
        self._clock = clock
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")
        self._text_pool = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._num_preparing = 0
        self._num_texts = 0
        self._turn_s = 0.0  # what short prompts took in this turn of the event loop
        self._num_output_tokens = 0
        self._prompt_tokens = telemetry.metric("tokenizer_prompt_tokens_total")
        self._output_tokens = telemetry.metric("tokenizer_output_tokens_total")
        self._render_seconds = telemetry.metric("tokenizer_render_seconds")
        self._streams = telemetry.metric("tokenizer_streams")
        self._resumes = telemetry.metric("tokenizer_resumes_total")

        link.on_frame = self.on_frame

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._text_pool.shutdown(wait=False, cancel_futures=True)

    def on_frame(self) -> None:
        """Counts are brought up to date once for each frame of the scheduler."""
        if self._num_output_tokens:
            self._output_tokens.inc(self._num_output_tokens)
            self._num_output_tokens = 0
        self._streams.set(self._link.num_streams)

    def model_info(self) -> common_pb2.ModelInfo:
        """What is served here; figures of the scheduler where it is known."""
        info = common_pb2.ModelInfo()
        if self._watch.last is not None:
            info.CopyFrom(self._watch.last)
        else:
            info.max_model_len = self._checkpoint.max_position_embeddings
            info.vocab_size = self._vocab_size
        info.name = self.model_name
        return info

    @property
    def missing(self) -> str:
        """What keeps requests from being served now, in words; empty where nothing does."""
        return self._watch.missing

    @property
    def max_model_len(self) -> int:
        """0 where it is not known."""
        return self._watch.last.max_model_len if self._watch.last is not None else 0

    @property
    def _vocab_size(self) -> int:
        if self._watch.last is not None:
            return self._watch.last.vocab_size
        return max(self._checkpoint.vocab_size, self.vocabulary.size)

    def check_model(self, name: str) -> None:
        """MODEL_NOT_FOUND unless `name` is empty or what is served."""
        served = {self.model_name} | ({self._watch.last.name} if self._watch.last is not None else set())
        if name and name not in served:
            raise ModelNotFoundError(
                f"the model {name!r} is not served here; ask for {self.model_name!r}",
                field="model",
                metadata={"model": name, "served": self.model_name},
            )

    def check_ids(self, field: str, token_ids: Sequence[int]) -> None:
        """TOKEN_OUT_OF_RANGE for an id that the model does not have."""
        check_token_ids(field, token_ids, self._vocab_size)

    async def in_pool(self, work: Callable[[], T]) -> T:
        """Run a prompt's `work` off the event loop. QUEUE_FULL where too many are waiting for that.

        Cancelled, it does not begin, or ends with its next slice.
        """
        if self._num_preparing >= MAX_PREPARING:
            raise QueueFullError(f"{MAX_PREPARING} prompts are being encoded already; try again later")
        self._num_preparing += 1
        try:
            return await _in_thread(self._pool, work)
        finally:
            self._num_preparing -= 1

    async def in_text_pool(self, work: Callable[[], T]) -> T:
        """As `in_pool`, for texts that are encoded or decoded without an answer: no prompt waits behind them."""
        if self._num_texts >= MAX_TEXTS:
            raise QueueFullError(f"{MAX_TEXTS} texts are being encoded or decoded already; try again later")
        self._num_texts += 1
        try:
            return await _in_thread(self._text_pool, work)
        finally:
            self._num_texts -= 1

    def check_text(self, num: int, *, unit: str, field: str) -> None:
        """TEXT_TOO_LONG for a text of `num` characters, or so many tokens, that is not for an answer."""
        least, factor = _TEXT_LIMITS[unit]
        limit = max(least, factor * self.max_model_len)
        if num > limit:
            raise InvalidRequestError(
                f"{field} has {num} {unit}; at most {limit} are taken ({factor} times the model's length of "
                f"{self.max_model_len}, and {least} at least): send it in parts",
                reason="TEXT_TOO_LONG",
                field=field,
                metadata={"num": str(num), "limit": str(limit), "max_model_len": str(self.max_model_len)},
            )

    def now_unix_s(self) -> int:
        return int(self._clock.time_s())

    async def start(
        self, request: TextRequest, sink: EventSink, *, parent: Context | None, time_left_s: float | None
    ) -> TextRun:
        """Check and encode `request`, then open it at the scheduler; its events go to `sink`.

        `parent` and `time_left_s` are the call's own; the request's fields win. RorqualError for a request that is
        refused; what fails later goes to the sink.
        """
        options = request.options
        is_chat = isinstance(request, text_pb2.ChatRequest)
        deadline_s = self._deadline(options, time_left_s)
        span = self._tracer.start_span(
            "tokenizer.chat" if is_chat else "tokenizer.complete",
            context=context_from_proto(options.trace) or parent or Context(),
            attributes={ATTR_REQUEST_ID: options.request_id, ATTR_MODEL: self.model_name},
        )
        try:
            self._watch.check_vocabulary()
            check_options(options, vocab_size=self._vocab_size, allow_no_tokens=not is_chat)
            self.check_model(options.model)
            _check_resume(options)
            if isinstance(request, text_pb2.ChatRequest):
                self._check_tools(request)
            constrains = await self._check_constraint(request)
            time_unix_s = options.resume.template_time_unix_s if options.HasField("resume") else self.now_unix_s()
            if self._is_short(request):
                prompt = self._in_turn(lambda: self._prepare(request, time_unix_s, span, constrains))
            else:
                prompt = await self.in_pool(lambda: self._prepare(request, time_unix_s, span, constrains))
            grammar = None
            if constrains:
                after = self._after_token(request, prompt)
                text, opening = await self._compile(request, prompt)
                grammar = common_pb2.Grammar(text=text, after_token_id=after, opening_token_id=opening)
            self._check_prompt(prompt, options, field="messages" if is_chat else "prompt")
            if not (isinstance(request, text_pb2.CompleteRequest) and request.echo):
                prompt = replace(prompt, text="")  # may be megabytes, and is not needed any more
            run = TextRun(
                self._spec(request, prompt, span, time_unix_s, deadline_s, grammar),
                self._link,
                sink,
                self._clock,
                on_tokens=self._count_tokens,
                on_reopened=self._resumes.inc,
                on_done=lambda run: self._end_span(span, run),
            )
        except BaseException as error:
            span.set_status(Status(StatusCode.ERROR, error.reason if isinstance(error, RorqualError) else "CANCELLED"))
            span.end()
            raise
        self._prompt_tokens.inc(prompt.num_tokens)
        run.start()
        return run

    def _is_short(self, request: TextRequest) -> bool:
        """Whether the event loop itself may render and encode it."""
        if self._num_preparing or self._turn_s > TURN_S:
            return False  # others came first
        if isinstance(request, text_pb2.ChatRequest) and request.chat_template:
            return False  # a caller's template may take any time
        return request.ByteSize() <= (SHORT_BYTES if self._link.num_streams else SHORT_ALONE_BYTES)

    def _in_turn(self, work: Callable[[], T]) -> T:
        """Run `work` on the event loop; its time counts until that turns to what has come meanwhile."""
        began_s = time.perf_counter()
        if not self._turn_s:
            asyncio.get_running_loop().call_soon(self._end_turn)
        try:
            return work()
        finally:
            self._turn_s += time.perf_counter() - began_s

    def _end_turn(self) -> None:
        self._turn_s = 0.0

    def _prepare(self, request: TextRequest, time_unix_s: int, span: Span, constrains: bool) -> Prompt:
        """What takes long for a long prompt: in the pool, but for short ones."""
        began_s = time.perf_counter()
        context = trace.set_span_in_context(span)
        if isinstance(request, text_pb2.ChatRequest):
            with self._tracer.start_as_current_span("tokenizer.render", context=context):
                rendered = self.builder.render(request, time_unix_s=time_unix_s, constrains=constrains)
            self._check_length(rendered.num_chars, field="messages")
            with self._tracer.start_as_current_span("tokenizer.encode", context=context):
                prompt = self.builder.encode(rendered)
        else:
            self._check_length(len(request.text), field="prompt")
            with self._tracer.start_as_current_span("tokenizer.encode", context=context):
                prompt = self.builder.complete(request)
        self._render_seconds.observe(time.perf_counter() - began_s)
        return prompt

    def check_chat(self, request: text_pb2.ChatRequest, *, field: str) -> None:
        """TEXT_TOO_LONG for a chat that is rendered without an answer, and is longer than may be encoded."""
        self.check_text(request.ByteSize(), unit="bytes", field=field)

    def render_chat(self, request: text_pb2.ChatRequest, time_unix_s: int) -> Prompt:
        """The prompt that `start` would send. In the texts' pool. TEXT_TOO_LONG where a template makes one of it."""
        rendered = self.builder.render(request, time_unix_s=time_unix_s, constrains=self.can_constrain)
        self.check_text(rendered.num_chars, unit="characters", field="messages")
        return self.builder.encode(rendered)

    def _check_length(self, num_chars: int, *, field: str) -> None:
        """PROMPT_TOO_LONG for a text that cannot fit, whatever it says: encoding megabytes takes a minute of a thread."""
        limit, longest = self.max_model_len, self.vocabulary.longest_token_chars
        if limit and longest and num_chars > limit * longest:
            raise PromptTooLongError(
                f"the prompt has {num_chars} characters, at least {num_chars // longest} tokens; the model takes "
                f"{limit} with the generated ones: shorten it",
                field=field,
                metadata={
                    "num_chars": str(num_chars),
                    "min_prompt_tokens": str(num_chars // longest),
                    "max_model_len": str(limit),
                },
            )

    def _check_prompt(self, prompt: Prompt, options: text_pb2.TextOptions, *, field: str) -> None:
        self.check_ids("prompt", unpack_token_ids(prompt.packed_ids))
        if options.HasField("resume"):
            resume = options.resume
            if resume.prompt_digest != prompt.digest or resume.num_prompt_tokens != prompt.num_tokens:
                raise PreconditionError(
                    f"the prompt has {prompt.num_tokens} tokens and another digest here than the {resume.num_prompt_tokens} "
                    "tokens it began with: replicas must serve the same checkpoint and chat template",
                    reason="PROMPT_DIGEST_MISMATCH",
                    metadata={
                        "num_prompt_tokens": str(prompt.num_tokens),
                        "resumed_num_prompt_tokens": str(resume.num_prompt_tokens),
                    },
                )
        limit = self.max_model_len
        wanted = 0 if options.HasField("max_tokens") and options.max_tokens == 0 else 1
        if limit and prompt.num_tokens + wanted > limit:
            raise PromptTooLongError(
                f"the prompt has {prompt.num_tokens} tokens; the model takes {limit} with the generated ones: shorten it",
                field=field,
                metadata={"num_prompt_tokens": str(prompt.num_tokens), "max_model_len": str(limit)},
            )

    def _spec(
        self,
        request: TextRequest,
        prompt: Prompt,
        span: Span,
        time_unix_s: int,
        deadline_s: float | None,
        grammar: common_pb2.Grammar | None,
    ) -> RunSpec:
        options, vocabulary = request.options, self.vocabulary
        resume = options.resume if options.HasField("resume") else None
        seed = (
            resume.seed
            if resume is not None
            else options.sampling.seed
            if options.sampling.HasField("seed")
            else secrets.randbits(63)
        )
        sampling = filled_sampling(options, self._checkpoint.sampling_defaults, vocabulary.eos_ids, seed)
        if grammar is not None:
            sampling.grammar.CopyFrom(grammar)
        skip_special = options.skip_special_tokens if options.HasField("skip_special_tokens") else True
        syntax, max_calls = None, None
        table = vocabulary.plain_text if skip_special else vocabulary.raw_text
        if isinstance(request, text_pb2.ChatRequest):
            calls = self._call_syntax(request)
            syntax = OutputSyntax(vocabulary.marks, calls, show_marks=not skip_special)
            table = vocabulary.chat_table(calls=calls is not None, show_marks=not skip_special)
            if calls is not None and makes_one_call(request):
                max_calls = 1
        max_tokens = options.max_tokens if options.HasField("max_tokens") else None
        budget = max_tokens
        if self.max_model_len:
            room = self.max_model_len - prompt.num_tokens
            budget = room if budget is None else min(budget, room)
        stop_ids = frozenset(sampling.stop_token_ids)
        wants_logprobs = sampling.HasField("logprobs") or sampling.HasField("prompt_logprobs")
        return RunSpec(
            request_id=options.request_id or f"req-{uuid.uuid4().hex}",
            model=self.model_name,
            prompt=prompt,
            rules=ChoiceRules(
                table=table,
                stop_token_ids=stop_ids,
                stop_strings=(
                    compile_stop_strings(options.stop, include_in_output=options.include_stop_str_in_output)
                    if options.stop
                    else None
                ),
                min_tokens=sampling.min_tokens,
                max_tokens=budget,
                syntax=syntax,
                start=prompt.start,
                forced_ids=prompt.forced_ids,
                max_calls=max_calls,
                stop_in_reasoning=options.stop_in_reasoning,
            ),
            sampling=sampling,
            num_choices=max(options.num_choices, 1),
            max_tokens=max_tokens,
            priority=options.priority,
            cache_salt=options.cache_salt,
            attempt=options.attempt,
            template_time_unix_s=time_unix_s,
            deadline_s=deadline_s,
            trace=context_to_proto(span),
            echo=isinstance(request, text_pb2.CompleteRequest) and request.echo,
            return_prompt_token_ids=options.return_prompt_token_ids,
            logprob_writer=LogprobWriter(vocabulary, table, stop_ids) if wants_logprobs else None,
            eos_ids=frozenset(vocabulary.eos_ids),
            resume=resume,
        )

    def _check_tools(self, request: text_pb2.ChatRequest) -> None:
        """UNSUPPORTED_TOOLS: a call that is not read would come back as content, and be taken for an answer."""
        if may_call(request) and self._call_syntax(request) is None:
            raise InvalidRequestError(
                "tools: how this checkpoint writes calls is not known here: name its format with --chat-format, leave "
                "tools out, or forbid them (tool_choice: 'none')",
                reason="UNSUPPORTED_TOOLS",
                field="tools",
            )

    @property
    def can_constrain(self) -> bool:
        """Whether what serves the model keeps to grammars."""
        has_engine = self._grammars is not None and self._grammars.is_available
        return has_engine and (self._watch.last is None or self._watch.last.takes_grammars)

    async def _check_constraint(self, request: TextRequest) -> bool:
        """Whether a grammar holds for the answer.

        UNSUPPORTED_CONSTRAINT where one that is asked for could not be kept: free text is never given in its place.
        CONSTRAINT_TOO_COMPLEX where one is too long.
        """
        check_source(request.options.constraint)
        wants = "constraint" if request.options.HasField("constraint") else ""
        if isinstance(request, text_pb2.ChatRequest) and not wants:
            wants = "tools" if is_strict(request) else "tool_choice" if must_call(request) else ""
        if wants and self._grammars is not None:
            await self._grammars.ready()
        if not wants or self.can_constrain:
            return bool(wants)
        if wants == "tool_choice":  # the prompt begins the call, which is as much as can be done
            return False
        what = "structured output" if wants == "constraint" else "strict"
        raise _unsupported(f"{what} is not supported by what serves this model", field=wants)

    async def _compile(self, request: TextRequest, prompt: Prompt) -> tuple[str, int | None]:
        """(the grammar of the answer, or of what follows its reasoning; the token that opens what it holds for)."""
        assert self._grammars is not None
        constraint = request.options.constraint if request.options.HasField("constraint") else None
        chat_format = self.builder.format_of(request) if isinstance(request, text_pb2.ChatRequest) else None
        if not isinstance(request, text_pb2.ChatRequest) or chat_format is None or not may_call(request):
            return await self._grammars.compile(GrammarJob(constraint))
        job = GrammarJob(constraint, calls_of(request), chat_format.name, prompt.forced_ids)
        return await self._grammars.compile(job)

    def _after_token(self, request: TextRequest, prompt: Prompt) -> int | None:
        """The token that ends the reasoning, which a constraint leaves alone; None where the answer has none."""
        if not isinstance(request, text_pb2.ChatRequest):
            return None
        if prompt.forced_ids or not reasons_first(self.builder.format_of(request), prompt.start):
            return None
        close_id = self.vocabulary.think_ids[1]
        if close_id is None:
            field = "constraint" if request.options.HasField("constraint") else "tools"
            raise _unsupported("this vocabulary has no token that ends the reasoning: switch thinking off", field=field)
        return close_id

    def _call_syntax(self, request: text_pb2.ChatRequest) -> CallSyntax | None:
        """How calls are read from the answer; None where the model has no tools."""
        chat_format = self.builder.format_of(request)
        return chat_format.calls(self.vocabulary.marks) if chat_format is not None and may_call(request) else None

    def _deadline(self, options: text_pb2.TextOptions, time_left_s: float | None) -> float | None:
        now_s = self._clock.monotonic_s()
        left = [options.time_left_us / 1e6] if options.HasField("time_left_us") else []
        if time_left_s is not None:
            left.append(time_left_s)
        return now_s + min(left) if left else None

    def _count_tokens(self, num_tokens: int) -> None:
        self._num_output_tokens += num_tokens

    def _end_span(self, span: Span, run: TextRun) -> None:
        stats = run.stats
        self._streams.set(self._link.num_streams)
        if span.is_recording():
            if stats.first_token_unix_ns:
                context = trace.set_span_in_context(span)
                self._tracer.start_span(
                    "tokenizer.detokenize", context=context, start_time=stats.first_token_unix_ns
                ).end()
            span.set_attributes(
                {
                    ATTR_INPUT_TOKENS: run.spec.prompt.num_tokens,
                    ATTR_OUTPUT_TOKENS: sum(choice.machine.num_tokens for choice in run.choices),
                    ATTR_CACHED_TOKENS: stats.num_cached_tokens or 0,
                    ATTR_QUEUE_TIME_S: stats.queue_time_us / 1e6,
                    ATTR_FINISH_REASONS: [
                        common_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
                        for reason in stats.finish_reasons
                    ],
                }
            )
            if stats.error is not None:
                span.set_status(Status(StatusCode.ERROR, stats.error.reason))
            elif stats.cancelled:
                span.set_status(Status(StatusCode.ERROR, "CANCELLED"))
        span.end()


async def _in_thread(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """What `work` returns or raises in `pool`. Cancelled, it is told that nobody waits for it."""
    gone = threading.Event()

    def run() -> T:
        with abandoned_by(gone):
            check_wanted()
            return work()

    try:
        return await asyncio.get_running_loop().run_in_executor(pool, run)
    except asyncio.CancelledError:
        gone.set()
        raise


def _unsupported(message: str, *, field: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {message}", reason="UNSUPPORTED_CONSTRAINT", field=field)


def _check_resume(options: text_pb2.TextOptions) -> None:
    """INVALID_RESUME where it does not fit the request."""
    seen: set[int] = set()
    for history in options.resume.choices:
        index = history.choice_index
        if index >= max(options.num_choices, 1) or index in seen or len(history.token_ids) % 4:
            raise InvalidRequestError(
                f"resume.choices: choice {index} is named twice, is not one of the request's "
                f"{max(options.num_choices, 1)}, or its ids are not 4 bytes each",
                reason="INVALID_RESUME",
                field="resume.choices",
            )
        seen.add(index)
