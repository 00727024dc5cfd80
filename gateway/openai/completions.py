"""/v1/completions: its requests, one a prompt, and the shape of its answer."""

from __future__ import annotations

import msgspec

from rorqual.core.limits import MAX_CHOICES
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.v1 import text_pb2

from ..policy import Dialect
from ..upstream.inbox import Piece, TokenLogprob, read_logprobs
from .answer import AnswerOptions, Progress, WholeChoice, gather
from .answer_schema import TextChoice, TextCompletion
from .chunks import DONE, ChunkTemplate
from .fields import BodyReader, invalid
from .logprobs import CompletionLogprobs
from .options import text_options
from .schema import MAX_PROMPTS, CompletionBody
from .usage import finish_reason, stop_reason, usage_object

_encode = msgspec.json.encode

READER = BodyReader(CompletionBody, Dialect.COMPLETIONS)

DEFAULT_MAX_TOKENS = 16
"""What OpenAI's endpoint takes where max_tokens is left out."""

_TEXT = b'"text":'


def completion_commands(body: CompletionBody, request_id: str) -> list[text_pb2.TextCommand]:
    """One command a prompt. Raises InvalidRequestError."""
    prompts = _prompts(body.prompt)
    num_prompts, n = len(prompts), body.n or 1
    if num_prompts > MAX_PROMPTS:
        raise invalid("prompt", f"at most {MAX_PROMPTS} prompts are taken in one request, got {num_prompts}")
    if num_prompts * n > MAX_PROMPTS + MAX_CHOICES:
        raise invalid(
            "n", f"at most {MAX_PROMPTS + MAX_CHOICES} choices are made in one request, got {num_prompts} x {n}"
        )
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "0 is only allowed with echo: true")
    commands = []
    for index, prompt in enumerate(prompts):
        unique_id = request_id if len(prompts) == 1 else f"{request_id}-{index}"
        options = text_options(body, unique_id, max_tokens)
        if body.logprobs is not None:
            options.sampling.logprobs = body.logprobs
            if body.echo:
                options.sampling.prompt_logprobs = max(body.logprobs, body.prompt_logprobs or 0)
        request = text_pb2.CompleteRequest(options=options, echo=bool(body.echo))
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids = pack_token_ids(prompt)
        commands.append(text_pb2.TextCommand(complete=request))
    return commands


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """A string, ids, or a list of either; a list of numbers is one prompt."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "it must not be empty")
    if all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    out: list[str | list[int]] = []
    for index, item in enumerate(prompt):
        if isinstance(item, int):
            raise invalid("prompt", "token ids and texts cannot stand beside each other in one list")
        if not item and not isinstance(item, str):
            raise invalid(f"prompt[{index}]", "it must not be empty")
        out.append(item)
    return out


class CompletionAnswer:
    """A text completion, streamed or whole."""

    def __init__(self, options: AnswerOptions) -> None:
        self.progress = Progress(options)
        self._options = options
        self._template: ChunkTemplate | None = None
        self._plain = not (options.continuous_usage or options.return_token_ids or options.num_top_logprobs is not None)
        self._logprobs = [CompletionLogprobs(options.num_top_logprobs or 0) for _ in range(options.num_choices)]
        self._prompt_ids_due = set(range(options.num_choices)) if options.return_token_ids else set()

    def chunks(self, piece: Piece) -> bytes:
        self.progress.see(piece)
        template = self._template or self._start()
        if self._plain:
            if piece.kind in ("content", "reasoning"):
                return template.plain(piece.choice_index, _TEXT, piece.text)
            if not piece.kind:
                return b""
        if piece.kind in ("accepted", "usage", "tool_call"):
            return b""
        index = piece.choice_index
        text, logprobs, echo = piece.text, piece.logprobs, ""
        if isinstance(piece.detail, text_pb2.PromptEcho):
            text, logprobs = self._echo(piece.detail)
            echo = piece.detail.text
        finished = piece.detail if isinstance(piece.detail, text_pb2.ChoiceFinished) else None
        prompt_ids = None
        if index in self._prompt_ids_due:
            self._prompt_ids_due.discard(index)
            prompt_ids = self.progress.prompt_token_ids(index)
        return template.full(
            index,
            _TEXT + _encode(text),
            logprobs=self._logprobs[index].take(logprobs, echo=echo) if logprobs else None,
            finish_reason=finish_reason(finished) if finished else None,
            stop_reason=stop_reason(finished, self._options.stop_token_ids),
            token_ids=piece.token_ids if self._options.return_token_ids else None,
            prompt_token_ids=prompt_ids,
            top={"usage": self.progress.usage_so_far()} if self._options.continuous_usage else None,
        )

    def _echo(self, echo: text_pb2.PromptEcho) -> tuple[str, list[TokenLogprob]]:
        wanted = self._options.echo and self._options.num_top_logprobs is not None
        return echo.text if self._options.echo else "", read_logprobs(echo.logprobs) if wanted else []

    def _start(self) -> ChunkTemplate:
        self._template = self._options.template("text_completion", self.progress.model)
        return self._template

    def last_chunks(self) -> bytes:
        if self._options.include_usage and self._template is not None:
            return self._template.usage(usage_object(self.progress.usages)) + DONE
        return DONE

    def whole(self, pieces: list[Piece]) -> bytes:
        options, progress = self._options, self.progress
        choices = gather(pieces, options.num_choices, progress)
        return _encode(
            TextCompletion(
                id=options.response_id,
                created=options.created,
                model=progress.model,
                choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
                usage=usage_object(progress.usages),
                system_fingerprint=options.fingerprint(progress.model),
            )
        )

    def _choice(self, index: int, choice: WholeChoice) -> TextChoice:
        options = self._options
        text, logprobs = self._echo(choice.echo) if choice.echo is not None else ("", [])
        columns = self._logprobs[index].take(logprobs + choice.logprobs, echo=text)
        answer = TextChoice(
            index=index,
            text=text + "".join(choice.content),
            logprobs=columns if options.num_top_logprobs is not None else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason(options),
            token_ids=choice.token_ids(options),
            prompt_logprobs=choice.prompt_logprobs(options),
        )
        if options.return_token_ids:
            answer.prompt_token_ids = unpack_token_ids(self.progress.prompt_token_ids(index)).tolist()
        return answer
