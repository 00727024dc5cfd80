"""Prompts: a chat or a plain text becomes the token ids that the model sees. Pure; run it off the event loop."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from rorqual.core.errors import CheckpointError, InvalidRequestError, PreconditionError, TemplateError
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.v1 import text_pb2

from .checkpoint import TextCheckpoint
from .control_tokens import Markers, choose_markers, mark, split_marked, strings_in
from .conversation import Conversation, read_conversation
from .decoder import decode_all
from .formats.reasoning import CLOSE_TAG, OPEN_TAG, Start, start_of
from .template import ChatTemplate, compile_template
from .vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is given."""

    text: str
    packed_ids: bytes  # uint32 little-endian
    digest: bytes  # BLAKE2b-256 of packed_ids
    start: Start  # where a chat's answer begins

    @property
    def num_tokens(self) -> int:
        return len(self.packed_ids) // 4


@dataclass(frozen=True, slots=True)
class Rendered:
    """A template's text, in which markers keep the caller's spellings of control tokens apart."""

    marked_text: str
    markers: Markers
    continued: bool  # it ends inside the assistant's message

    @property
    def num_chars(self) -> int:
        """Characters without the markers, be they escaped as JSON."""
        text = self.marked_text
        return len(text) - sum(text.count(m) + 6 * text.count(f"\\u{ord(m):04x}") for m in self.markers.all)


def make_prompt(text: str, token_ids: Sequence[int], start: Start) -> Prompt:
    packed = pack_token_ids(token_ids)
    return Prompt(text, packed, hashlib.blake2b(packed, digest_size=32).digest(), start)


class PromptBuilder:
    """Renders with the checkpoint's templates and encodes with its vocabulary."""

    def __init__(self, checkpoint: TextCheckpoint, vocabulary: Vocabulary) -> None:
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

    def chat(self, request: text_pb2.ChatRequest, *, time_unix_s: int) -> Prompt:
        """The prompt of a chat: `render`, then `encode`."""
        return self.encode(self.render(request, time_unix_s=time_unix_s))

    def render(self, request: text_pb2.ChatRequest, *, time_unix_s: int) -> Rendered:
        """The template's text. INVALID_MESSAGES, TEMPLATE_ERROR, NO_CHAT_TEMPLATE."""
        conversation = read_conversation(request)
        template = self._template_for(request.chat_template, conversation)
        return self._render(template, conversation, time_unix_s)

    def complete(self, request: text_pb2.CompleteRequest) -> Prompt:
        """The prompt of a completion. EMPTY_PROMPT."""
        kind = request.WhichOneof("prompt")
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

    def _template_for(self, source: str, conversation: Conversation) -> ChatTemplate:
        if source:
            return compile_template(source)
        template = None
        if conversation.tools:
            template = self._templates.get("tool_use")
        template = template or self._templates.get("default")
        if template is None:
            raise PreconditionError(
                f"the checkpoint {self._folder.name} has no chat template: start the tokenizer with --chat-template FILE, "
                "send chat_template with the request, or use plain completions",
                reason="NO_CHAT_TEMPLATE",
                field="chat_template",
            )
        return template

    def _render(self, template: ChatTemplate, conversation: Conversation, time_unix_s: int) -> Rendered:
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
            messages[-1]["content"] += markers.here + " "
        rendered = template.render(
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
            rendered = _cut_here(rendered, markers.here)
        if vocabulary.add_bos and not rendered.startswith(vocabulary.bos_token):
            rendered = vocabulary.bos_token + rendered
        return Rendered(rendered, markers, continued)

    def encode(self, rendered: Rendered) -> Prompt:
        """The ids of a rendered chat. EMPTY_PROMPT; INVALID_MESSAGES where plain text cannot be kept plain."""
        vocabulary = self._vocabulary
        text = rendered.marked_text
        if any(marker in text for marker in rendered.markers.all) or "\\u" in text:
            segments = split_marked(text, vocabulary.control, rendered.markers)
            text = "".join(segment.text for segment in segments)
            token_ids = vocabulary.encode_segments(segments)
        else:
            token_ids = vocabulary.encode(text)
        if not token_ids:
            raise InvalidRequestError(
                "the chat template makes an empty prompt of these messages", reason="EMPTY_PROMPT", field="messages"
            )
        return make_prompt(text, token_ids, self._start(text, token_ids, rendered.continued))

    def _start(self, text: str, token_ids: Sequence[int], continued: bool) -> Start:
        vocabulary = self._vocabulary
        open_id, close_id = vocabulary.think_ids
        if open_id is None or close_id is None:  # tags as ordinary text
            tail = text.rstrip()
            if tail.endswith(OPEN_TAG):
                return Start.REASONING
            if tail.endswith(CLOSE_TAG):
                return Start.CONTENT
            return Start.CONTENT_CONTINUED if continued else Start.UNDECIDED
        place = next((n for n in range(len(token_ids) - 1, -1, -1) if token_ids[n] in vocabulary.control_ids), None)
        if place is None:
            return Start.CONTENT_CONTINUED if continued else Start.UNDECIDED
        after = decode_all(vocabulary.raw_text, token_ids[place + 1 :])
        return start_of(token_ids[place], open_id, close_id, text_follows=bool(after.strip()), continued=continued)


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
