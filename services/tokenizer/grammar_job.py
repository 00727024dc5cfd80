"""A request's grammar as a job for another process: what it needs of the request, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from rorqual.core.errors import InternalError, InvalidRequestError
from rorqual.grammar import GrammarEngine
from rorqual.v1 import text_pb2

from .constraint import compile_constraint
from .control_tokens import ControlTokens
from .conversation import may_call
from .formats import FORMATS
from .formats.reasoning import Start
from .prompt import make_prompt
from .tool_grammar import compile_calls

PING = b""
"""The job that does nothing but say whether there is an engine; its reply is empty, or why there is none."""


@dataclass(frozen=True, slots=True)
class GrammarJob:
    """What the grammar of an answer depends on."""

    constraint: text_pb2.Constraint | None
    calls: text_pb2.ChatRequest | None = None  # its tools, tool_choice and parallel_tool_calls; None: no calls
    chat_format: str = ""  # of the calls
    forced_ids: tuple[int, ...] = ()  # with which the prompt begins a call
    any_object: bool = False  # tools that are not strict take any object

    def packed(self) -> bytes:
        head = {"format": self.chat_format, "forced": self.forced_ids, "any_object": self.any_object}
        request = text_pb2.ChatRequest()
        if self.calls is not None:
            request.CopyFrom(self.calls)
        if self.constraint is not None:
            request.options.constraint.CopyFrom(self.constraint)
        return json.dumps(head).encode() + b"\n" + request.SerializeToString(deterministic=True)

    @property
    def any_object_helps(self) -> bool:
        """Whether less could be asked for than is: schemas of tools that are not strict."""
        return not self.any_object and self.calls is not None and not all(tool.strict for tool in self.calls.tools)


@dataclass(frozen=True, slots=True)
class GrammarMade:
    """A grammar's text, known to compile, and the token that opens what it holds for; or why there is none."""

    text: str = ""
    opening_token_id: int | None = None
    message: str = ""  # of an error; then reason and field are its own
    reason: str = ""
    field: str = ""

    def packed(self) -> bytes:
        return json.dumps([self.text, self.opening_token_id, self.message, self.reason, self.field]).encode()

    @staticmethod
    def unpacked(packed: bytes) -> GrammarMade:
        return GrammarMade(*json.loads(packed))

    def given(self) -> tuple[str, int | None]:
        """(the text, the opening token). Raises the error that it is instead."""
        if self.reason == InternalError.reason:
            raise InternalError(self.message)
        if self.message:
            raise InvalidRequestError(self.message, reason=self.reason, field=self.field)
        return self.text, self.opening_token_id


def calls_of(request: text_pb2.ChatRequest) -> text_pb2.ChatRequest:
    """What of `request` the grammar of its calls depends on."""
    calls = text_pb2.ChatRequest(tools=request.tools, tool_choice=request.tool_choice)
    if request.HasField("parallel_tool_calls"):
        calls.parallel_tool_calls = request.parallel_tool_calls
    return calls


def do_job(packed: bytes, engine: GrammarEngine, control: ControlTokens, tell: Callable[[bytes], None]) -> bytes:
    """In the process that may die: a packed GrammarMade. `tell` is given one that holds should a search take too long."""
    head, _, body = packed.partition(b"\n")
    asked = json.loads(head)
    request = text_pb2.ChatRequest.FromString(body)
    has_constraint = request.options.HasField("constraint")
    place = "constraint" if has_constraint else "tools"

    def on_fault(error: InvalidRequestError) -> None:
        tell(_made_of(error).packed())

    try:
        opening: int | None = None
        text = compile_constraint(request.options.constraint, engine, on_fault=on_fault) if has_constraint else None
        if may_call(request) and asked["format"]:
            prompt = make_prompt("", (), Start.CONTENT, asked["forced"])
            text, opening = compile_calls(
                request, FORMATS[asked["format"]], control, prompt, engine,
                beside=text, any_object=asked["any_object"], on_fault=on_fault,
            )  # fmt: skip
        assert text is not None
        return GrammarMade(text, opening).packed()
    except InvalidRequestError as error:
        return _made_of(error).packed()
    except (RecursionError, MemoryError):
        return too_complex(place).packed()
    except Exception as error:
        return GrammarMade(message=f"{type(error).__name__}: {error}", reason=InternalError.reason).packed()


def too_complex(place: str) -> GrammarMade:
    return GrammarMade(
        message=f"{place}: it costs too much to compile: give it fewer or smaller rules, references or repetitions",
        reason="CONSTRAINT_TOO_COMPLEX",
        field=place,
    )


def _made_of(error: InvalidRequestError) -> GrammarMade:
    return GrammarMade(message=error.message, reason=error.reason, field=error.field)
