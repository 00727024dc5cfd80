"""A prompt's echo, put together where it comes in several events (see PromptEcho)."""

from __future__ import annotations

from rorqual.v1 import text_pb2


class EchoJoiner:
    """Of one request: what of each choice's echo has come, while that is not all."""

    __slots__ = ("_begun",)

    def __init__(self) -> None:
        self._begun: dict[int, text_pb2.PromptEcho] = {}

    def join(self, choice_index: int, echo: text_pb2.PromptEcho) -> bool:
        """Whether the echo is whole with this event; then `echo` holds all of it."""
        begun = self._begun.get(choice_index)
        if begun is not None and not echo.token_ids:
            begun.logprobs.extend(echo.logprobs)
            if 4 * len(begun.logprobs) < len(begun.token_ids):
                return False
            echo.CopyFrom(self._begun.pop(choice_index))
            return True
        if not 0 < 4 * len(echo.logprobs) < len(echo.token_ids):
            return True
        self._begun[choice_index] = text_pb2.PromptEcho()
        self._begun[choice_index].CopyFrom(echo)
        return False
