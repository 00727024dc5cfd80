"""Which tokenizers are kept for suspects, and when somebody must look again. Streams and sessions are stand-ins."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.upstream.isolation import IN_FLIGHT_TOKENS, Isolation
from rorqual.core.quarantine import CLEARED_BY, MAX_GROUP, WINDOW_S
from tests.unit.test_gateway_replicas import ManualClock


@dataclass(eq=False)
class Stream:
    session: Session | None = None
    model: str = "m"
    num_tokens: int = 0
    is_guilty: bool = False

    def move(self) -> None:
        assert self.session is not None
        self.session.readers.remove(self)
        self.session = None

    def convict(self) -> None:
        self.is_guilty = True


@dataclass(eq=False)
class Session:
    readers: list[Stream] = field(default_factory=list)

    @property
    def num_streams(self) -> int:
        return len(self.readers)

    def enter(self, isolation: Isolation, *streams: Stream) -> None:
        for stream in streams:
            assert isolation.admits(stream, self)
            stream.session = self
            self.readers.append(stream)
            isolation.opened(stream, self)

    def end(self, isolation: Isolation, *, died: bool = True) -> set[Stream]:
        streams, self.readers = self.readers, []
        for stream in streams:
            stream.session = None
        return set(isolation.session_ended(self, streams, died=died))  # type: ignore[arg-type]


def any_model(model: str) -> bool:
    return True


def suspects(isolation: Isolation, count: int) -> list[Stream]:
    streams = [Stream() for _ in range(count)]
    for _ in range(2):
        session = Session()
        session.enter(isolation, *streams)
        assert not session.end(isolation)
    return streams


def test_sessions_that_end_by_their_own_wish_make_no_suspects() -> None:
    isolation, streams = Isolation(ManualClock()), [Stream(), Stream()]
    for _ in range(5):
        session = Session()
        session.enter(isolation, *streams)
        assert not session.end(isolation, died=False)
    assert not isolation.is_active


def test_without_a_tokenizer_nobody_has_to_look_again_at_once() -> None:
    clock = ManualClock()
    isolation = Isolation(clock)
    suspects(isolation, 3)
    for _ in range(5):
        clock.now_s += 60.0
        isolation.arrange({})
        assert isolation.next_s > clock.now_s
    isolation.arrange({Session(): lambda model: False})  # it serves another model
    assert isolation.next_s > clock.now_s


def test_at_most_half_of_the_tokenizers_are_kept_and_those_with_the_fewest_streams() -> None:
    clock = ManualClock()
    isolation = Isolation(clock)
    waiting = suspects(isolation, 30)
    sessions = [Session() for _ in range(5)]
    for number, session in enumerate(sessions):
        session.enter(isolation, *(Stream() for _ in range(number)))
    moved = sessions[1].readers[:]
    isolation.arrange(dict.fromkeys(sessions, any_model))
    assert [isolation.admits(None, session) for session in sessions] == [False, False, True, True, True]
    assert moved[0].session is None
    groups = [[stream for stream in waiting if isolation.admits(stream, session)] for session in sessions]
    assert all(1 <= len(group) <= MAX_GROUP for group in groups[:2])
    assert not any(groups[2:])
    isolation.arrange(dict.fromkeys(sessions, any_model))
    assert sum(isolation.admits(None, session) for session in sessions) == 3


def test_the_only_tokenizer_is_emptied_for_one_group_after_another_and_is_then_everybodys() -> None:
    clock = ManualClock()
    isolation, session = Isolation(clock), Session()
    waiting = suspects(isolation, 20)
    num_groups = 0
    while isolation.is_active:
        isolation.arrange({session: any_model})
        group = [stream for stream in waiting if isolation.admits(stream, session)]
        assert group
        assert not session.readers  # those that were cleared have made room
        num_groups += 1
        session.enter(isolation, *group)
        for stream in group:
            assert not isolation.progressed(stream)
            stream.num_tokens += IN_FLIGHT_TOKENS + CLEARED_BY
            assert isolation.progressed(stream)
            waiting.remove(stream)
    assert num_groups >= 20 / MAX_GROUP
    assert isolation.admits(None, session)


def test_a_group_that_gets_nowhere_keeps_others_out_for_a_while_only() -> None:
    clock = ManualClock()
    isolation, session = Isolation(clock), Session()
    (stream,) = suspects(isolation, 1)
    isolation.arrange({session: any_model})
    session.enter(isolation, stream)
    assert not isolation.admits(Stream(), session)
    clock.now_s = isolation.next_s
    assert clock.now_s <= 100.0 + WINDOW_S
    isolation.arrange({session: any_model})
    assert isolation.admits(Stream(), session)


def test_a_killer_is_convicted_and_nobody_beside_it() -> None:
    isolation = Isolation(ManualClock())
    waiting = suspects(isolation, 10)
    killer, guilty = waiting[7], set[Stream]()
    for _ in range(30):
        session = Session()
        isolation.arrange({session: any_model})
        group = [stream for stream in waiting if isolation.admits(stream, session)]
        session.enter(isolation, *group)
        if killer in group:
            guilty |= session.end(isolation)
            if guilty:
                break
        else:
            for stream in group:
                assert isolation.ended(stream)
                waiting.remove(stream)
    assert guilty == {killer}
