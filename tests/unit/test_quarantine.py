"""Requests that kill the process which runs them are found, and nobody else is blamed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.core.quarantine import (
    CLEARED_BY,
    MAX_GROUP,
    MAX_WINDOW_S,
    PATIENCE_S,
    WINDOW_S,
    Quarantine,
)

CHUNK = 64
STEP_S = 0.02


@dataclass
class Job:
    """A request: a prompt computed in chunks, then a token a step. It kills at position `kills_at`, if at any."""

    key: int
    prompt: int
    total: int
    kills_at: int | None = None
    held: int = 0  # delivered tokens, which survive a death
    position: int = 0
    process: int | None = None


@dataclass
class World:
    """Processes that run jobs in steps, with as many places each as there are jobs."""

    jobs: list[Job]
    num_processes: int = 1
    kills: dict[int, set[int]] = field(default_factory=dict)  # from outside: process -> steps of its life
    down_steps: int = 10  # between a death and the next life
    quarantine: Quarantine[int, int] = field(default_factory=Quarantine)
    failed: list[int] = field(default_factory=list)
    num_deaths: int = 0
    step_count: int = 0

    def __post_init__(self) -> None:
        self.waiting = list(self.jobs)
        self.running: list[list[Job]] = [[] for _ in range(self.num_processes)]
        self.up_at = [0] * self.num_processes
        self.age = [0] * self.num_processes
        self.done: list[int] = []

    def run(self, most_steps: int = 100_000) -> None:
        while len(self.done) + len(self.failed) < len(self.jobs):
            self.step()
            self.step_count += 1
            assert self.step_count < most_steps, f"stuck: {self.quarantine._records}"

    @property
    def now_s(self) -> float:
        return self.step_count * STEP_S

    def step(self) -> None:
        self.quarantine.expire(self.now_s)
        if self.quarantine.wants_a_process(self.now_s):
            up = [p for p in range(self.num_processes) if self.is_up(p)]
            if up:
                emptied = min(up, key=lambda p: len(self.running[p]))
                self.quarantine.close(emptied, self.now_s)
                for job in list(self.running[emptied]):
                    self.leave(job)
                    self.waiting.append(job)
        for process in range(self.num_processes):
            if self.is_up(process):
                self.admit(process)
                self.work(process)
        self.quarantine.check()

    def is_up(self, process: int) -> bool:
        return self.step_count >= self.up_at[process]

    def admit(self, process: int) -> None:
        if self.quarantine.pending and not self.running[process]:
            self.quarantine.assign(process, self.now_s)
        for job in list(self.waiting):
            if self.quarantine.admits(job.key, process):
                self.waiting.remove(job)
                job.process, job.position = process, 0
                self.running[process].append(job)
                self.quarantine.entered(job.key, process, 0)
                if self.quarantine.is_held(process):
                    assert len([j for j in self.running[process] if self.quarantine.watches(j.key)]) <= MAX_GROUP

    def leave(self, job: Job) -> None:
        assert job.process is not None
        self.running[job.process].remove(job)
        job.process = None

    def goal(self, job: Job) -> int:
        prefill = job.prompt + job.held
        return min(job.position + CHUNK, prefill) if job.position < prefill else job.position + 1

    def work(self, process: int) -> None:
        self.age[process] += 1
        killed = self.age[process] in self.kills.get(process, ())
        if killed or any(job.kills_at is not None and job.kills_at <= self.goal(job) for job in self.running[process]):
            self.die(process)
            return
        for job in list(self.running[process]):
            job.position = self.goal(job)
            if job.position >= job.prompt + job.held:
                job.held = job.position - job.prompt
            self.quarantine.progressed(job.key, job.position)
            if job.position >= job.total:
                self.quarantine.ended(job.key)
                self.leave(job)
                self.done.append(job.key)

    def die(self, process: int) -> None:
        self.num_deaths += 1
        self.age[process] = 0
        self.up_at[process] = self.step_count + self.down_steps
        jobs, self.running[process] = self.running[process], []
        guilty = self.quarantine.died(process, {job.key: self.goal(job) for job in jobs}, self.now_s)
        for job in jobs:
            job.process = None
            if job.key in guilty:
                self.failed.append(job.key)
            else:
                self.waiting.append(job)


def innocents(num: int, rng: random.Random) -> list[Job]:
    jobs = []
    for key in range(num):
        prompt = rng.choice((1, 5, 70, 300))
        jobs.append(Job(key, prompt, prompt + rng.randint(1, 200)))
    return jobs


def slowest_of(jobs: list[Job]) -> int:
    """Steps in which any of them gets past any point: its whole history again, and a few tokens."""
    return max(job.total for job in jobs) // CHUNK + CLEARED_BY + 4


AT = {"admission": 0, "prefill": 200, "first token": 301, "decode": 340}


@pytest.mark.parametrize("where", AT)
@pytest.mark.parametrize("num_processes", [1, 3])
@pytest.mark.parametrize("num", [1, 2, 9, 64])
def test_a_killer_is_found_in_few_deaths_and_nobody_else_is_blamed(where: str, num: int, num_processes: int) -> None:
    jobs = innocents(num, random.Random(num))
    jobs[num // 2] = Job(num // 2, 300, 500, kills_at=AT[where])
    world = World(jobs, num_processes)
    world.run()
    assert world.failed == [num // 2]
    assert len(world.done) == num - 1
    assert world.num_deaths <= 8


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 1 << 32), st.integers(1, 5), st.integers(1, 4))
def test_several_killers_are_found_at_a_bounded_price(seed: int, num_killers: int, num_processes: int) -> None:
    rng = random.Random(seed)
    jobs = innocents(64, rng)
    killers = rng.sample(range(64), num_killers)
    for key in killers:
        jobs[key].total = jobs[key].prompt + 300
        jobs[key].kills_at = rng.randint(0, jobs[key].prompt + 200)
    world = World(jobs, num_processes)
    world.run()
    assert sorted(world.failed) == sorted(killers)
    # Two each that go unnoticed, its group's, two alone; and one where another that killed it cost it a trial.
    assert world.num_deaths <= 6 * num_killers + 2


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 1 << 32), st.integers(1, 64))
def test_kills_from_outside_never_fail_a_request_that_gets_on(seed: int, num: int) -> None:
    """Each life of the process is long enough for one request to get past its last point, and no more is asked."""
    rng = random.Random(seed)
    jobs = innocents(num, rng)
    world = World(jobs, 1)
    slowest = slowest_of(jobs)
    lives = 0
    while len(world.done) + len(world.failed) < num:
        world.kills = {0: {rng.randint(slowest, 3 * slowest)}} if lives < 500 else {}
        deaths = world.num_deaths
        while world.num_deaths == deaths and len(world.done) + len(world.failed) < num:
            world.step()
            world.step_count += 1
            assert world.step_count < 200_000
        lives += 1
    assert world.failed == []


@pytest.mark.parametrize("seed", range(40))
def test_kills_of_several_processes_at_random_fail_nobody(seed: int) -> None:
    """Lives end by chance; one in seven is too short for anybody to get on."""
    rng = random.Random(seed)
    world = World(innocents(64, rng), 3)
    short = slowest_of(world.jobs)
    deaths = -1
    while len(world.done) + len(world.failed) < 64:
        if world.num_deaths != deaths:
            deaths = world.num_deaths
            world.kills = {p: {world.age[p] + 1 + int(rng.expovariate(0.15 / short))} for p in range(3)}
        world.step()
        world.step_count += 1
        assert world.step_count < 200_000
    assert world.failed == []
    assert world.num_deaths > 0


def test_one_more_death_than_rules_allow_is_needed() -> None:
    quarantine: Quarantine[str, int] = Quarantine()
    assert quarantine.died(0, {"a": 10, "b": 10}, 0.0) == []
    assert quarantine.admits("a", 0)  # one death says nothing
    assert quarantine.died(0, {"a": 10, "b": 10}, 0.0) == []
    assert not quarantine.admits("a", 0)
    assert quarantine.admits("c", 0)
    assert quarantine.assign(0, 0.0) == ["a", "b"]
    assert not quarantine.admits("c", 0)
    assert quarantine.died(0, {"a": 10, "b": 10}, 0.0) == []
    assert quarantine.assign(0, 0.0) == ["a"]
    assert not quarantine.admits("b", 0)
    assert quarantine.died(0, {"a": 10}, 0.0) == []
    assert quarantine.assign(0, 0.0) == ["a"]
    assert quarantine.died(0, {"a": 10}, 0.0) == ["a"]
    assert quarantine.assign(0, 0.0) == ["b"]
    quarantine.entered("b", 0, 0)
    assert not quarantine.progressed("b", 10 + CLEARED_BY - 1)
    assert quarantine.progressed("b", 10 + CLEARED_BY)
    assert quarantine.admits("c", 0)
    assert not quarantine.watches("b")


def test_what_a_cache_holds_already_clears_nobody() -> None:
    quarantine: Quarantine[str, int] = Quarantine()
    quarantine.died(0, {"a": 64}, 0.0)
    quarantine.entered("a", 1, 640)
    assert not quarantine.progressed("a", 640)
    assert quarantine.progressed("a", 640 + CLEARED_BY)


def test_a_process_that_leaves_by_itself_is_no_death() -> None:
    quarantine: Quarantine[str, int] = Quarantine()
    for _ in range(2):
        quarantine.died(0, {"a": 1}, 0.0)
    for _ in range(10):
        assert quarantine.assign(0, 0.0) == ["a"]
        quarantine.gone(0, 0.0)
    assert quarantine.pending == ["a"]


def test_a_long_prompt_under_suspicion_keeps_a_process_for_a_bounded_time() -> None:
    """Others enter when the window is over; it doubles with each further death, so a late killer is alone in the end."""
    quarantine: Quarantine[str, int] = Quarantine()
    now_s, windows = 0.0, []
    for deaths in range(12):
        quarantine.died(0, {"long": 100_000, f"other {deaths}": 1}, now_s)
        if deaths:
            assert quarantine.assign(0, now_s) == ["long"]
            quarantine.entered("long", 0, 0)
            window_end = quarantine.next_s()
            assert window_end is not None
            windows.append(window_end - now_s)
            assert not quarantine.admits("new", 0)
            assert quarantine.expire(window_end - 0.001) == []
            assert quarantine.expire(window_end) == [0]
            assert quarantine.admits("new", 0)
            assert quarantine.watches("long")
            now_s = window_end
        quarantine.check()
    assert windows == [min(MAX_WINDOW_S, WINDOW_S * 2**n) for n in range(11)]


def test_suspects_that_find_no_empty_process_get_one_emptied() -> None:
    quarantine: Quarantine[str, int] = Quarantine()
    for _ in range(2):
        quarantine.died(0, {"a": 1}, 5.0)
    assert quarantine.next_s() == 5.0 + PATIENCE_S
    assert not quarantine.wants_a_process(5.0 + PATIENCE_S - 0.001)
    assert quarantine.wants_a_process(5.0 + PATIENCE_S)
    quarantine.close(1, 15.0)
    assert not quarantine.wants_a_process(99.0)
    assert not quarantine.admits("new", 1)
    assert not quarantine.admits("a", 1)
    assert quarantine.assign(1, 15.5) == ["a"]
    assert quarantine.admits("a", 1)


def test_who_fits_nowhere_is_left_out_and_who_ends_is_forgotten() -> None:
    quarantine: Quarantine[str, int] = Quarantine()
    for _ in range(2):
        quarantine.died(0, {"a": 1, "b": 1}, 0.0)
    assert quarantine.assign(0, 0.0, lambda key: key == "b") == ["b"]
    quarantine.ended("b")
    assert not quarantine.is_held(0)
    quarantine.ended("a")
    assert quarantine.pending == []
    assert quarantine.next_s() is None
