"""The ledger: what a resume carries, and that no event is lost or said twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.upstream.ledger import Ledger
from rorqual.core.errors import PreconditionError
from rorqual.core.token_ids import unpack_token_ids
from rorqual.v1 import text_pb2
from tests.support.scripted_tokenizer import Script, event, finish, rest_of, say

ACCEPTED = text_pb2.Accepted(
    num_prompt_tokens=5,
    prompt_digest=b"d" * 32,
    seed=9,
    template_time_unix_s=123,
    num_cached_tokens=4,
    queue_time_us=7,
    prompt_token_ids=b"\1\0\0\0",
)


def record(ledger: Ledger, *events: text_pb2.TextEvent) -> list[text_pb2.TextEvent]:
    return [e for e in events if ledger.record(e, e.WhichOneof("event"))]


def test_nothing_to_resume_before_the_request_was_accepted() -> None:
    assert Ledger(1).resume() is None


def test_a_resume_carries_what_was_fixed_on_first_contact_and_the_ids_of_each_choice() -> None:
    ledger = Ledger(3)
    record(
        ledger,
        text_pb2.TextEvent(accepted=ACCEPTED),
        event(0, [10, 11], content="a"),
        event(2, [12]),
        event(0, [13], reasoning="b"),
        event(2, content="held back before"),
    )
    resume = ledger.resume()
    assert resume is not None
    assert {c.choice_index: list(unpack_token_ids(c.token_ids)) for c in resume.choices} == {0: [10, 11, 13], 2: [12]}
    assert (resume.num_prompt_tokens, resume.prompt_digest, resume.seed) == (5, b"d" * 32, 9)
    assert (resume.template_time_unix_s, resume.num_cached_tokens, resume.queue_time_us) == (123, 4, 7)
    assert not resume.prompt_logprobs_delivered
    assert ledger.num_tokens == 4


def test_echoes_count_as_delivered_once_every_choice_has_one() -> None:
    ledger = Ledger(2, echo_expected=True)
    echo = text_pb2.PromptEcho(text="p")
    record(ledger, text_pb2.TextEvent(accepted=ACCEPTED), event(0, echo=echo))
    assert not ledger.resume().prompt_logprobs_delivered  # type: ignore[union-attr]
    assert record(ledger, event(0, echo=echo)) == []
    assert len(record(ledger, event(1, echo=echo))) == 1
    assert ledger.resume().prompt_logprobs_delivered  # type: ignore[union-attr]


def test_a_choice_that_has_ended_says_nothing_more() -> None:
    ledger = Ledger(1)
    record(ledger, text_pb2.TextEvent(accepted=ACCEPTED), finish(0))
    assert record(ledger, finish(0), event(0, content="late")) == []


def test_another_prompt_is_refused() -> None:
    ledger = Ledger(1)
    record(ledger, text_pb2.TextEvent(accepted=ACCEPTED))
    other = text_pb2.Accepted(prompt_digest=b"x" * 32)
    with pytest.raises(PreconditionError) as caught:
        record(ledger, text_pb2.TextEvent(accepted=other))
    assert caught.value.reason == "PROMPT_DIGEST_MISMATCH"


def test_a_choice_beyond_n_is_a_fault_of_the_peer() -> None:
    with pytest.raises(PreconditionError):
        record(Ledger(1), event(1, content="x"))


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    texts = draw(st.lists(st.text(max_size=4), max_size=6))
    reasoning = draw(st.lists(st.text(max_size=3), max_size=3))
    return say(*texts, n=draw(st.integers(1, 3)), reasoning=reasoning, length=draw(st.booleans()))


@settings(deadline=None)
@given(scripts(), st.lists(st.integers(0, 12), max_size=4))
def test_however_a_stream_is_cut_the_joined_events_are_those_of_an_uncut_one(script: Script, cuts: list[int]) -> None:
    num_choices = 1 + max(step[0].choice_index for step in script.steps)

    def run(cuts: list[int]) -> dict[int, list[tuple[str | None, str]]]:
        ledger = Ledger(num_choices)
        heard: dict[int, list[tuple[str | None, str]]] = {}
        for cut in [*cuts, None]:
            resume = ledger.resume()
            held = {c.choice_index: len(c.token_ids) // 4 for c in resume.choices} if resume else {}
            assert len(record(ledger, text_pb2.TextEvent(accepted=ACCEPTED))) == (resume is None)
            for step in rest_of(script, held)[:cut]:
                for e in record(ledger, *step):
                    heard.setdefault(e.choice_index, []).append((e.WhichOneof("event"), e.content or e.reasoning))
        return heard

    assert run(cuts) == run([])


def echo_parts(num_ids: int, *sizes: int) -> list[text_pb2.PromptEcho]:
    """An echo of `num_ids` tokens as events with so many log-probabilities each."""
    entries = iter([text_pb2.TokenLogprobText(token_id=n) for n in range(num_ids)])
    parts = [text_pb2.PromptEcho(logprobs=[next(entries) for _ in range(size)]) for size in sizes]
    parts[0].text, parts[0].token_ids = "prompt", bytes(4 * num_ids)
    return parts


def test_an_echo_in_several_events_is_one() -> None:
    ledger = Ledger(2, echo_expected=True)
    record(ledger, text_pb2.TextEvent(accepted=ACCEPTED))
    one, two, three = echo_parts(7, 3, 3, 1)
    assert record(ledger, event(0, echo=one), event(1, echo=one), event(0, echo=two)) == []
    assert not ledger.resume().prompt_logprobs_delivered  # type: ignore[union-attr]
    [whole] = record(ledger, event(0, echo=three))
    assert (whole.echo.text, len(whole.echo.token_ids)) == ("prompt", 28)
    assert [entry.token_id for entry in whole.echo.logprobs] == list(range(7))
    # A resume begins what was not whole anew, perhaps in one piece; what was whole is not said twice.
    assert record(ledger, event(0, echo=one), event(0, echo=two), event(0, echo=three)) == []
    [whole] = record(ledger, event(1, echo=one), event(1, echo=echo_parts(7, 7)[0]))
    assert len(whole.echo.logprobs) == 7
    assert ledger.resume().prompt_logprobs_delivered  # type: ignore[union-attr]
