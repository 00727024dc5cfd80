"""Prompts: a chat or a plain text becomes the token ids that the model sees. Pure; run it off the event loop."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from rorqual.core.errors import CheckpointError, InvalidRequestError, PreconditionError, TemplateError
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.v1 import text_pb2

from .checkpoint import TextCheckpoint
from .control_tokens import Segment, choose_markers, mark, split_marked, strings_in
from .conversation import Conversation, may_call, read_conversation
from .decoder import decode_all
from .formats import FORMATS
from .formats.base import ChatFormat, PromptWriter, Thinking
from .formats.detect import find_format, format_of_template
from .formats.marks import END_THINK, THINK
from .formats.reasoning import Start, start_of
from .template import ChatTemplate, compile_template
from .template_probe import writes_as
from .vocabulary import Vocabulary

_FORCED = text_pb2.TOOL_CHOICE_MODE_REQUIRED


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is given."""

    text: str
    packed_ids: bytes  # uint32 little-endian
    digest: bytes  # BLAKE2b-256 of packed_ids
    start: Start  # where a chat's answer begins
    forced_ids: tuple[int, ...] = ()  # the last of the ids: the beginning of a call, which belongs to the answer

    @property
    def num_tokens(self) -> int:
        return len(self.packed_ids) // 4


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered chat: the caller's plain text apart from control tokens."""

    segments: list[Segment]
    start: Start
    forced: list[Segment]  # what makes the model go on inside a call; follows `segments`
    in_one_go: bool = False  # the tokenizer itself may tell control tokens from text

    @property
    def num_chars(self) -> int:
        return sum(len(segment.text) for segment in (*self.segments, *self.forced))


def make_prompt(text: str, token_ids: Sequence[int], start: Start, forced_ids: Sequence[int] = ()) -> Prompt:
    packed = pack_token_ids(token_ids)
    return Prompt(text, packed, hashlib.blake2b(packed, digest_size=32).digest(), start, tuple(forced_ids))


class PromptBuilder:
    """Renders with the checkpoint's format or templates, and encodes with its vocabulary."""

    def __init__(self, checkpoint: TextCheckpoint, vocabulary: Vocabulary, *, chat_format: str = "") -> None:
        """`chat_format`: a name of FORMATS in place of what the checkpoint shows."""
        self._folder = checkpoint.folder
        self._vocabulary = vocabulary
        self._special_tokens = {
            name: token
            for name, token in (
                ("bos_token", checkpoint.bos_token),
                ("eos_token", checkpoint.eos_token),
                ("pad_token", checkpoint.pad_token),
                ("unk_token", checkpoint.unk_token),
            )
            if token
        }
        try:
            self._templates = {name: ChatTemplate(source) for name, source in checkpoint.chat_templates.items()}
        except TemplateError as error:
            raise CheckpointError(
                f"{checkpoint.folder}: {error.message}; mend it, or give another with --chat-template FILE",
                field="model",
            ) from error
        self.chat_format = FORMATS[chat_format] if chat_format else find_format(checkpoint, vocabulary.control.ids)
        """None: the checkpoint's is not known, and no calls can be read."""
        self._renders_itself = self.chat_format is not None and self._format_is_right(
            self.chat_format, checkpoint.has_own_template, named=bool(chat_format)
        )
        """The prompt is the format's own rendering, not a template's."""

    def _format_is_right(self, chat_format: ChatFormat, has_own_template: bool, *, named: bool) -> bool:
        """Whether the format says what the checkpoint's template says, or there is no better witness."""
        if not self._templates:
            return True
        if not has_own_template:  # a template that was given by hand is meant
            return False
        template = self._templates.get("default")
        return named or (
            template is not None and writes_as(chat_format, template, self._vocabulary.control, self._special_tokens)
        )

    def chat(self, request: text_pb2.ChatRequest, *, time_unix_s: int, constrains: bool = False) -> Prompt:
        """The prompt of a chat: `render`, then `encode`."""
        return self.encode(self.render(request, time_unix_s=time_unix_s, constrains=constrains))

    def render(self, request: text_pb2.ChatRequest, *, time_unix_s: int, constrains: bool = False) -> Rendered:
        """`constrains`: a grammar will hold for the answer, which can force a call after its reasoning.

        INVALID_MESSAGES, TEMPLATE_ERROR, NO_CHAT_TEMPLATE, UNSUPPORTED_TOOLS, UNSUPPORTED_TOOL_CHOICE."""
        conversation = read_conversation(request)
        chat_format = self.format_of(request)
        if chat_format is not None and self._renders_itself and not request.chat_template:
            _check_thinking(chat_format, conversation)
            out = PromptWriter(self._vocabulary.control)
            chat_format.render(conversation, out)
            segments, in_one_go = out.segments(), False
            start = self._start(segments, conversation)
            if start is Start.UNDECIDED:
                start = chat_format.start(conversation)
        else:
            template = self._template_for(request.chat_template, conversation)
            segments, in_one_go = self._render_template(template, conversation, time_unix_s)
            start = self._start(segments, conversation)
        return Rendered(segments, start, self._forced(request, chat_format, start, constrains), in_one_go)

    def format_of(self, request: text_pb2.ChatRequest) -> ChatFormat | None:
        """The format in which the answer to `request` is written."""
        if request.chat_template:
            return format_of_template(request.chat_template) or self.chat_format
        return self.chat_format

    def complete(self, request: text_pb2.CompleteRequest) -> Prompt:
        """The prompt of a completion. EMPTY_PROMPT."""
        kind = request.WhichOneof("prompt")
        if kind is None:  # an empty text is one that was given: it is the begin-of-sequence token
            raise InvalidRequestError(
                "the request has no prompt: give text or token_ids", reason="EMPTY_PROMPT", field="prompt"
            )
        if kind == "token_ids":
            try:
                token_ids: Sequence[int] = unpack_token_ids(request.token_ids)
            except ValueError as error:
                raise InvalidRequestError(str(error), reason="INVALID_PROMPT", field="prompt") from error
            text = decode_all(self._vocabulary.plain_text, token_ids) if request.echo else ""
        else:
            text = request.text
            token_ids = self._vocabulary.encode_prompt(text)
        if not token_ids:
            raise InvalidRequestError(
                "the prompt is empty: give at least one token", reason="EMPTY_PROMPT", field="prompt"
            )
        return make_prompt(text, token_ids, Start.CONTENT_CONTINUED)

    def encode(self, rendered: Rendered) -> Prompt:
        """The ids of a rendered chat. EMPTY_PROMPT; INVALID_MESSAGES where plain text cannot be kept plain."""
        vocabulary = self._vocabulary
        text = "".join(segment.text for segment in rendered.segments)
        token_ids = vocabulary.encode(text) if rendered.in_one_go else vocabulary.encode_segments(rendered.segments)
        forced_ids: list[int] = []
        if rendered.forced:
            text += "".join(segment.text for segment in rendered.forced)
            forced_ids = vocabulary.encode_segments(rendered.forced)
            token_ids = [*token_ids, *forced_ids]
        if not token_ids:
            raise InvalidRequestError(
                "the chat template makes an empty prompt of these messages", reason="EMPTY_PROMPT", field="messages"
            )
        return make_prompt(text, token_ids, rendered.start, forced_ids)

    def _template_for(self, source: str, conversation: Conversation) -> ChatTemplate:
        if source:
            return compile_template(source)
        template = None
        if conversation.tools:
            template = self._templates.get("tool_use")
        template = template or self._templates.get("default")
        if template is None:
            raise PreconditionError(
                f"the checkpoint {self._folder.name} has no chat template and no chat format that is known here: start the "
                "tokenizer with --chat-format NAME or --chat-template FILE, send chat_template with the request, or use "
                "plain completions",
                reason="NO_CHAT_TEMPLATE",
                field="chat_template",
            )
        return template

    def _render_template(
        self, template: ChatTemplate, conversation: Conversation, time_unix_s: int
    ) -> tuple[list[Segment], bool]:
        """(segments, whether they may be tokenized in one go)."""
        vocabulary = self._vocabulary
        messages = conversation.messages
        if "developer" not in template.source:  # the newer name of the same role
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        from_caller = (messages, conversation.tools, conversation.variables)
        try:
            markers = choose_markers(strings_in(from_caller))
            messages, tools, variables = mark(from_caller, vocabulary.control, markers)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(str(error), reason="INVALID_MESSAGES", field="messages") from error
        continued = conversation.continue_final_message
        if continued:
            messages[-1]["content"] = f"{messages[-1]['content']}{markers.here} "
        text = template.render(
            {
                **self._special_tokens,
                **variables,
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": conversation.add_generation_prompt,
            },
            time_unix_s=time_unix_s,
        )
        if continued:
            text = _cut_here(text, markers.here)
        if vocabulary.add_bos and not text.startswith(vocabulary.bos_token):
            text = vocabulary.bos_token + text
        in_one_go = not (vocabulary.cuts_exactly or "\\u" in text or any(marker in text for marker in markers.all))
        return split_marked(text, vocabulary.control, markers), in_one_go

    def _start(self, segments: Sequence[Segment], conversation: Conversation) -> Start:
        """Where the answer begins, from the control token that comes last and what follows it."""
        vocabulary = self._vocabulary
        open_id, close_id = vocabulary.think_ids
        last = next((n for n in range(len(segments) - 1, -1, -1) if segments[n].is_control), -1)
        after = "".join(segment.text for segment in segments[last + 1 :])
        continued = conversation.continue_final_message
        if open_id is None or close_id is None:  # tags as ordinary text
            tail = after.rstrip()
            if tail.endswith(THINK):
                return Start.REASONING
            if tail.endswith(END_THINK):
                return Start.CONTENT
            return Start.CONTENT_CONTINUED if continued else Start.UNDECIDED
        last_id = vocabulary.control.ids[segments[last].text] if last >= 0 else None
        return start_of(last_id, open_id, close_id, text_follows=bool(after.strip()), continued=continued)

    def _forced(
        self, request: text_pb2.ChatRequest, chat_format: ChatFormat | None, start: Start, constrains: bool
    ) -> list[Segment]:
        """The beginning of the call that the request demands; nothing where it demands none, or reasoning comes first."""
        choice = request.tool_choice
        if not may_call(request) or not (choice.function_name or choice.mode == _FORCED):
            return []
        names = [tool.name for tool in request.tools]
        name = choice.function_name or (names[0] if len(names) == 1 else None)
        if name is not None and name not in names:
            raise _refuse_choice(f"none of the tools is called {name[:64]!r}")
        if chat_format is None or chat_format.shape is None:
            raise _refuse_choice("a call cannot be forced in this checkpoint's chat format")
        if request.continue_final_message or (
            request.HasField("add_generation_prompt") and not request.add_generation_prompt
        ):
            raise _refuse_choice("a call can only be forced at the beginning of an answer")
        if constrains and reasons_first(chat_format, start):
            return []
        if start in (Start.REASONING, Start.REASONING_CONTINUED):
            raise _refuse_choice("a call cannot be forced before the reasoning has ended: switch thinking off")
        out = PromptWriter(self._vocabulary.control)
        out.literal(chat_format.shape.begin)
        if name is not None:  # else the model goes on with the name it chooses
            out.text(name)
            out.literal(chat_format.shape.after_name.replace("{index}", "0"))
        return out.segments()


def reasons_first(chat_format: ChatFormat | None, start: Start) -> bool:
    """Whether an answer that begins at `start` holds its reasoning first."""
    return start in (Start.REASONING, Start.REASONING_CONTINUED) or (
        start is Start.UNDECIDED and chat_format is not None and chat_format.thinking is not Thinking.NEVER
    )


def _refuse_choice(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"tool_choice: {message}", reason="UNSUPPORTED_TOOL_CHOICE", field="tool_choice")


def _check_thinking(chat_format: ChatFormat, conversation: Conversation) -> None:
    """INVALID_MESSAGES where the switch asks for what the format does not have. An effort alone asks for nothing."""
    asked = conversation.thinking
    if asked is None or chat_format.thinking is Thinking.SWITCH:
        return
    fault = ""
    if not asked and chat_format.thinking is Thinking.ALWAYS:
        fault = f"off: answers in the format {chat_format.name} always begin with reasoning"
    elif asked and not conversation.reasoning_effort and chat_format.thinking is Thinking.NEVER:
        fault = f"on: answers in the format {chat_format.name} have no reasoning"
    if fault:
        by_effort = conversation.variables.get("reasoning_effort") == "none"
        raise InvalidRequestError(
            f"thinking cannot be switched {fault}",
            reason="INVALID_MESSAGES",
            field="reasoning_effort" if by_effort else "chat_template_kwargs",
        )


def _cut_here(rendered: str, here: str) -> str:
    """The text up to the end of the message that is to be continued."""
    place = rendered.rfind(here)
    if place < 0:
        raise TemplateError(
            "continue_final_message: the chat template does not show the last message's content", field="messages"
        )
    # A blank was put after the mark: where the template trimmed it, it trims the message's own end too.
    trimmed = rendered[place + 1 : place + 2] != " "
    rendered = rendered[:place]
    return rendered.rstrip() if trimmed else rendered
