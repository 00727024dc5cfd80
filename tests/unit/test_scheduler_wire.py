"""What the scheduler writes to a session, byte for byte what its events are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rorqual.core.errors import CapacityError
from rorqual.core.token_ids import pack_token_ids
from rorqual.v1 import common_pb2, generation_pb2
from services.scheduler.stream_events import (
    FinishReason,
    StreamEvent,
    StreamFailed,
    StreamFinished,
    StreamStarted,
    StreamTokens,
)
from services.scheduler.wire import fill_frame

LOGPROBS = [common_pb2.TokenLogprobs(token_id=5, logprob=-1.5, rank=1)]
TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70).map(pack_token_ids)
EVENTS = st.one_of(
    TOKENS.map(lambda ids: StreamTokens(1, ids)),
    TOKENS.map(lambda ids: StreamTokens(1, bytearray(ids))),
    TOKENS.map(lambda ids: StreamTokens(1, ids, LOGPROBS)),
    TOKENS.map(lambda ids: StreamTokens(1, ids, LOGPROBS, LOGPROBS)),
    st.just(StreamTokens(1, b"", None, LOGPROBS)),
    st.just(StreamStarted(1, 64, 1000, 2**63)),
    st.just(StreamFinished(1, FinishReason.STOP, 0, 64, 1000, 12)),
    st.just(StreamFailed(1, CapacityError("too large"))),
)


def entry(stream_id: int, event: StreamEvent) -> generation_pb2.GenerationEvent:
    """The event as a message, field by field."""
    out = generation_pb2.GenerationEvent(stream_id=stream_id)
    if isinstance(event, StreamTokens):
        out.delta.token_ids = bytes(event.token_ids)
        out.delta.logprobs.extend(event.logprobs or ())
        out.delta.prompt_logprobs.extend(event.prompt_logprobs or ())
    elif isinstance(event, StreamStarted):
        out.started.num_cached_tokens, out.started.queue_time_us, out.started.seed = event[1:]
    elif isinstance(event, StreamFinished):
        out.finished.reason, out.finished.stop_token_id = common_pb2.FINISH_REASON_STOP, 0
        out.finished.num_cached_tokens, out.finished.queue_time_us, out.finished.num_generated_tokens = 64, 1000, 12
    elif isinstance(event, StreamFailed):
        out.error.code, out.error.reason = 8, event.error.reason
    return out


@given(st.lists(st.tuples(st.integers(1, 2**40), EVENTS), max_size=12), st.booleans())
def test_a_frame_has_every_event_in_order(events: list[tuple[int, StreamEvent]], beats: bool) -> None:
    frame = generation_pb2.GenerationServiceSessionResponse()
    if beats:
        frame.heartbeat.SetInParent()
    fill_frame(frame, events)
    assert frame.HasField("heartbeat") == beats
    got = list(frame.events)
    for message in got:
        if message.HasField("error"):
            assert message.error.reason == "KV_CACHE_TOO_SMALL"
    kept = [message for message in got if not message.HasField("error")]
    assert kept == [entry(*pair) for pair in events if not isinstance(pair[1], StreamFailed)]
    assert [message.stream_id for message in got] == [stream_id for stream_id, _ in events]
