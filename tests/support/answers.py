"""A choice's machine driven by text, for tests of what formats read from an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from services.tokenizer.choice import ChoiceMachine, ChoiceRules, End, Piece
from services.tokenizer.formats import FORMATS
from services.tokenizer.formats.events import Event, Kind
from services.tokenizer.formats.output import OutputParser, OutputSyntax
from services.tokenizer.formats.reasoning import Start
from tests.support.vocabularies import vocabulary_of

EOS = 1


@dataclass
class Call:
    name: str
    call_id: str = ""
    arguments: str = ""


@dataclass
class Answer:
    """What was given, joined. Equality is that of all a caller can see."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    order: list[tuple[Kind, int]] = field(default_factory=list)  # kinds and calls as they came, without repeats

    def add(self, events: Iterable[Event | Piece]) -> Answer:
        for event in events:
            if event.kind is None:
                continue
            if event.kind is Kind.REASONING:
                self.reasoning += event.text
            elif event.kind is Kind.CONTENT:
                self.content += event.text
            elif event.kind is Kind.CALL:
                assert event.call_idx == len(self.calls), "calls count up from 0 without gaps"
                self.calls.append(Call(event.text, event.call_id))
            else:
                assert event.call_idx == len(self.calls) - 1, "arguments belong to the call that is open"
                self.calls[-1].arguments += event.text
            kind = event.kind, event.call_idx
            if not self.order or self.order[-1] != kind:
                self.order.append(kind)
        return self

    @property
    def plain(self) -> tuple[str, str, list[tuple[str, str]]]:
        return self.reasoning, self.content, [(call.name, call.arguments) for call in self.calls]


@cache
def syntax_of(format_name: str, *, calls: bool = True, show_marks: bool = False) -> OutputSyntax:
    marks = vocabulary_of(format_name).marks
    return OutputSyntax(marks, FORMATS[format_name].calls(marks) if calls else None, show_marks=show_marks)


def rules_of(format_name: str, start: Start, *, calls: bool = True, show_marks: bool = False) -> ChoiceRules:
    return ChoiceRules(
        table=vocabulary_of(format_name).chat_table(calls=calls, show_marks=show_marks),
        stop_token_ids=frozenset({EOS}),
        stop_strings=None,
        min_tokens=0,
        max_tokens=None,
        syntax=syntax_of(format_name, calls=calls, show_marks=show_marks),
        start=start,
    )


def stream_text(format_name: str, text: str) -> str:
    """`text` as the parser sees it: control tokens are sentinels."""
    vocabulary = vocabulary_of(format_name)
    table = vocabulary.chat_table(calls=True, show_marks=False)
    place, parts = 0, []
    for start, end in vocabulary.control.find(text):
        parts += [text[place:start], table.texts[vocabulary.control.ids[text[start:end]]] or ""]
        place = end
    return "".join([*parts, text[place:]])


def read_pieces(syntax: OutputSyntax, start: Start, pieces: Iterable[str]) -> Answer:
    """What the parser alone makes of a text that comes in `pieces`."""
    parser = OutputParser(syntax, start)
    answer = Answer()
    for piece in pieces:
        answer.add(parser.push(piece))
    return answer.add(parser.flush())


def read_tokens(rules: ChoiceRules, chunks: Iterable[Sequence[int]], *, ends: bool = True) -> tuple[Answer, End | None]:
    """What a machine makes of tokens; with `ends`, what is held back is released after them."""
    machine = ChoiceMachine(rules)
    answer = Answer()
    for chunk in chunks:
        answer.add(machine.push(chunk).pieces)
    if ends and machine.end is None:
        answer.add(machine.flush())
    return answer, machine.end
