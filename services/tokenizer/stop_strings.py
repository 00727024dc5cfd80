"""Stop strings: where a choice's text ends, though a match may lie across any number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopPattern:
    """One stop string with its failure function (Knuth, Morris, Pratt)."""

    text: str
    failure: tuple[int, ...]  # failure[i]: longest proper prefix of text[:i + 1] that is also its suffix


@dataclass(frozen=True, slots=True)
class StopStrings:
    """The compiled stop strings of a request; shared by its choices."""

    patterns: tuple[StopPattern, ...]
    first_chars: frozenset[str]
    include_in_output: bool


def compile_stop_strings(strings: Sequence[str], *, include_in_output: bool) -> StopStrings:
    """Linear in the strings' length. No string may be empty."""
    patterns = []
    for text in dict.fromkeys(strings):
        failure = [0] * len(text)
        k = 0
        for i in range(1, len(text)):
            while k and text[i] != text[k]:
                k = failure[k - 1]
            if text[i] == text[k]:
                k += 1
            failure[i] = k
        patterns.append(StopPattern(text, tuple(failure)))
    return StopStrings(tuple(patterns), frozenset(p.text[0] for p in patterns), include_in_output)


class StopMatcher:
    """Follows the text of one choice, token by token.

    After each token the text so far is searched; the match that begins earliest wins, of those the one that ends
    first. Held back is the longest end of the text that is a proper prefix of a stop string, never more; nothing
    is held back when the stop string stays in the output. A character costs amortised O(stop strings).
    """

    __slots__ = ("_held", "_states", "_stop")

    def __init__(self, stop: StopStrings) -> None:
        self._stop = stop
        self._states = [0] * len(stop.patterns)  # characters of each pattern that the text's end matches
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that ended it or None). Nothing is pushed after a match."""
        if not any(self._states) and self._stop.first_chars.isdisjoint(text):
            return text, None
        buffer = self._held + text
        base = len(self._held)
        best: tuple[int, int, str] | None = None  # begin and end in `buffer`, stop string
        held = 0
        for index, pattern in enumerate(self._stop.patterns):
            wanted, failure, state = pattern.text, pattern.failure, self._states[index]
            for position, char in enumerate(text, base + 1):
                while state and char != wanted[state]:
                    state = failure[state - 1]
                if char == wanted[state]:
                    state += 1
                    if state == len(wanted):
                        found = (position - state, position, wanted)
                        if best is None or found < best:
                            best = found
                        break
            else:
                self._states[index] = state
                held = max(held, state)
        if best is not None:
            begin, end, wanted = best
            self._held = ""
            if self._stop.include_in_output:
                return buffer[:end], wanted
            return buffer[:begin], wanted
        if self._stop.include_in_output:
            return text, None
        cut = len(buffer) - held
        self._held = buffer[cut:]
        return buffer[:cut], None

    def flush(self) -> str:
        """The end of the text came first: what was held back is released."""
        held, self._held = self._held, ""
        return held
