"""What is held of one request: enough to open it again elsewhere, and to drop what is then said twice."""

from __future__ import annotations

from rorqual.core.errors import PreconditionError
from rorqual.rpc.prompt_echo import EchoJoiner
from rorqual.v1 import text_pb2


class Ledger:
    """The token history of each choice, and what was fixed on first contact. Pure."""

    __slots__ = ("_echo_expected", "_echoed", "_echoes", "_finished", "accepted", "ended", "num_choices", "token_ids")

    def __init__(self, num_choices: int, *, echo_expected: bool = False) -> None:
        self.num_choices = num_choices
        self.accepted: text_pb2.Accepted | None = None
        self.token_ids: list[bytearray] = [bytearray() for _ in range(num_choices)]  # uint32 little-endian
        self.ended = False  # the usage, last of the request, has come
        self._echo_expected = echo_expected
        self._echoed: set[int] = set()
        self._echoes = EchoJoiner()
        self._finished: set[int] = set()

    @property
    def num_tokens(self) -> int:
        """Generated tokens held, over all choices."""
        return sum(map(len, self.token_ids)) // 4

    def record(self, event: text_pb2.TextEvent, which: str | None) -> bool:
        """Take in `event`, of kind `which`. False where it was said before the resume, so it must be dropped.

        Raises PreconditionError where a resumed stream turns out to answer another prompt.
        """
        choice = event.choice_index
        if which == "accepted":
            return self._accept(event.accepted)
        if which == "usage":
            first, self.ended = not self.ended, True
            return first
        if choice >= self.num_choices:
            raise PreconditionError(f"the tokenizer sent choice {choice} of {self.num_choices}", reason="BAD_CHOICE")
        if choice in self._finished:
            return False
        if which == "echo":
            if choice in self._echoed or not self._echoes.join(choice, event.echo):
                return False
            self._echoed.add(choice)
        elif which == "finished":
            self._finished.add(choice)
        if event.token_ids:
            self.token_ids[choice] += event.token_ids
        return True

    def _accept(self, accepted: text_pb2.Accepted) -> bool:
        if self.accepted is not None:
            if accepted.prompt_digest != self.accepted.prompt_digest:
                raise PreconditionError(
                    "the replica that resumed this request renders another prompt", reason="PROMPT_DIGEST_MISMATCH"
                )
            return False
        self.accepted = text_pb2.Accepted()
        self.accepted.CopyFrom(accepted)  # a copy of its own: an event keeps its whole frame in memory
        self.accepted.prompt_token_ids = b""
        return True

    def resume(self) -> text_pb2.TextResume | None:
        """What opens the request again after the tokens held; None where it never was accepted."""
        accepted = self.accepted
        if accepted is None:
            return None
        return text_pb2.TextResume(
            choices=[
                text_pb2.ChoiceHistory(choice_index=index, token_ids=bytes(ids))
                for index, ids in enumerate(self.token_ids)
                if ids
            ],
            num_prompt_tokens=accepted.num_prompt_tokens,
            prompt_digest=accepted.prompt_digest,
            seed=accepted.seed,
            template_time_unix_s=accepted.template_time_unix_s,
            num_cached_tokens=accepted.num_cached_tokens,
            queue_time_us=accepted.queue_time_us,
            prompt_logprobs_delivered=self._echo_expected and len(self._echoed) == self.num_choices,
        )
