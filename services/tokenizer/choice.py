"""One choice of a request: its tokens become text and tool calls, until they end. Pure.

What has been given after tokens t1…tk is a function of t1…tk alone, however they came. So a lost stream is opened
again by running the tokens that were delivered through a fresh machine and dropping what it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .decoder import IncrementalDecoder
from .formats.events import Event, Kind
from .formats.output import OutputParser, OutputSyntax
from .formats.reasoning import Start
from .stop_strings import StopMatcher, StopStrings
from .token_text import TokenText


@dataclass(frozen=True, slots=True)
class ChoiceRules:
    """What ends a choice, and how its tokens become text; the same for all choices of a request."""

    table: TokenText
    stop_token_ids: frozenset[int]
    stop_strings: StopStrings | None
    min_tokens: int  # stop strings are not looked for in what so many tokens bring
    max_tokens: int | None  # None: the scheduler ends it
    syntax: OutputSyntax | None = None  # None: plain text
    start: Start = Start.CONTENT_CONTINUED
    forced_ids: tuple[int, ...] = ()  # the prompt's last tokens, where they begin the answer's first call
    max_calls: int | None = None  # the choice ends after so many
    stop_in_reasoning: bool = False  # stop strings are looked for in the reasoning, too; never in calls


@dataclass(frozen=True, slots=True)
class End:
    """Why a choice ended by its own tokens: a stop token, a stop string, its last call, or none of them (its budget)."""

    stop_token_id: int | None = None
    stop_string: str | None = None
    by_calls: bool = False

    @property
    def is_length(self) -> bool:
        return self.stop_token_id is None and self.stop_string is None and not self.by_calls


@dataclass(slots=True)
class Piece:
    """What neighbouring tokens brought of one kind."""

    kind: Kind | None  # None: nothing yet
    num_tokens: int = 0  # consumed
    parts: list[str] = field(default_factory=list)
    call_idx: int = 0
    call_id: str = ""  # of a call that begins, where the model writes it

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(slots=True)
class Output:
    """What a run of tokens brought."""

    num_tokens: int  # consumed; fewer than were given only where `end` is set
    pieces: list[Piece]  # in order; they consume `num_tokens` together
    end: End | None


class ChoiceMachine:
    """Decoder, parser and stop strings of one choice, and its count of tokens."""

    __slots__ = ("_decoder", "_due", "_parser", "_rules", "_stops", "end", "num_reasoning_tokens", "num_tokens")

    def __init__(self, rules: ChoiceRules) -> None:
        self._rules = rules
        self._decoder = IncrementalDecoder(rules.table)
        self._stops = _StopSearch(rules) if rules.stop_strings is not None else None
        self._parser = OutputParser(rules.syntax, rules.start) if rules.syntax is not None else None
        self._due: list[Event] = []  # of the prompt's own beginning of a call; given with the first token
        for token_id in rules.forced_ids:
            self._due += self._parse(self._decoder.push(token_id))
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.end: End | None = End() if rules.max_tokens == 0 else None

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls if self._parser is not None else 0

    def push(self, token_ids: Sequence[int]) -> Output:
        """Consume tokens up to the end of the text; after `end` is set nothing is consumed."""
        rules, decoder, parser = self._rules, self._decoder, self._parser
        stop_ids, max_tokens, max_calls = rules.stop_token_ids, rules.max_tokens, rules.max_calls
        pieces: list[Piece] = []
        consumed = 0
        for token_id in token_ids:
            if self.end is not None:
                break
            consumed += 1
            self.num_tokens += 1
            if token_id in stop_ids:  # counted and named, not shown
                self.end = End(stop_token_id=token_id)
                text = ""
            else:
                text = decoder.push(token_id)
            was_reasoning = parser is not None and parser.in_reasoning
            events = self._parse(text)
            if self._due:
                events, self._due = [*self._due, *events], []
            events = self._search(events)
            if self.end is None and self.num_tokens == max_tokens:
                self.end = End()
            _add_token(pieces, events)
            if parser is None:
                continue
            if was_reasoning and parser.in_reasoning:
                self.num_reasoning_tokens += 1
            if max_calls is not None and parser.num_closed_calls >= max_calls and self.end in (None, End()):
                self.end = End(by_calls=True)
        if self.end is not None and consumed:
            _add_events(pieces, self.flush())
        if max_calls is not None and self.num_calls > max_calls:
            _drop_calls(pieces, max_calls)
        return Output(consumed, pieces, self.end)

    def flush(self) -> list[Event]:
        """What was still held back; called by `push` at an end of its own, else by whoever ends it.

        Sets `end` where a stop string shows in it.
        """
        if self.end is not None and self.end.stop_string is not None:
            return []  # all of it stands behind the stop string
        events, self._due = [*self._due, *self._parse(self._decoder.flush())], []
        if self._parser is not None:
            events += self._parser.flush()
        events = self._search(events)
        if self._stops is not None and (self.end is None or self.end.stop_string is None):
            events += self._stops.flush()
        return events

    def _search(self, events: list[Event]) -> list[Event]:
        """`events` up to a stop string, which sets `end`."""
        if self._stops is None or not events or self.num_tokens <= self._rules.min_tokens:
            return events
        events, stop_string = self._stops.push(events)
        if stop_string is not None:
            self.end = End(stop_string=stop_string)
        return events

    def _parse(self, text: str) -> list[Event]:
        if not text:
            return []
        return self._parser.push(text) if self._parser is not None else [Event(Kind.CONTENT, text)]


class _StopSearch:
    """Looks for a choice's stop strings in what its text turned out to be: content, and reasoning where that is asked for.

    A match lies in one stretch of one kind: what a call divides is two texts.
    """

    __slots__ = ("_kind", "_kinds", "_matcher", "_stop_strings")

    def __init__(self, rules: ChoiceRules) -> None:
        assert rules.stop_strings is not None
        self._stop_strings = rules.stop_strings
        self._kinds = (Kind.CONTENT, Kind.REASONING) if rules.stop_in_reasoning else (Kind.CONTENT,)
        self._matcher = StopMatcher(rules.stop_strings)
        self._kind = Kind.CONTENT  # of the stretch that the matcher is in

    def push(self, events: list[Event]) -> tuple[list[Event], str | None]:
        """(what may be given of `events`, the stop string that was found in them or None)."""
        shown: list[Event] = []
        for event in events:
            if event.kind is not self._kind:
                shown += self.flush()
                self._kind = event.kind
            if event.kind not in self._kinds:
                shown.append(event)
                continue
            text, stop_string = self._matcher.push(event.text)
            if text:
                shown.append(Event(event.kind, text))
            if stop_string is not None:
                return shown, stop_string
        return shown, None

    def flush(self) -> list[Event]:
        """The stretch ended: what may have begun a stop string did not."""
        held = self._matcher.flush()
        self._matcher = StopMatcher(self._stop_strings)
        return [Event(self._kind, held)] if held else []


def _add_token(pieces: list[Piece], events: Iterable[Event]) -> None:
    """Add what one token brought; it is consumed by the first piece that tells of it."""
    place = len(pieces)
    _add_events(pieces, events)
    if place == len(pieces):
        if not pieces:
            pieces.append(Piece(None))
        pieces[-1].num_tokens += 1
    elif place and pieces[place - 1].kind is None:  # tokens that brought nothing go with the first that does
        pieces[place].num_tokens += pieces.pop(place - 1).num_tokens + 1
    else:
        pieces[place].num_tokens += 1


def _add_events(pieces: list[Piece], events: Iterable[Event]) -> None:
    for event in events:
        last = pieces[-1] if pieces else None
        if last is None or last.kind is not event.kind or last.call_idx != event.call_idx or event.kind is Kind.CALL:
            last = Piece(event.kind, call_idx=event.call_idx, call_id=event.call_id)
            pieces.append(last)
        last.parts.append(event.text)


def _drop_calls(pieces: list[Piece], max_calls: int) -> None:
    """Forget calls beyond the last one that is wanted: the token that ended that one began another."""
    for piece in pieces:
        if piece.kind in (Kind.CALL, Kind.ARGUMENTS) and piece.call_idx >= max_calls:
            piece.kind = None
            piece.parts.clear()


def pieces_of(events: Iterable[Event]) -> list[Piece]:
    """`events` as pieces that consume no tokens."""
    pieces: list[Piece] = []
    _add_events(pieces, events)
    return pieces
