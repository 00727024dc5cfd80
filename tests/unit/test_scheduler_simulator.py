"""The simulator: every request ends once, equal seeds give equal figures, and a trace file says what was generated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scheduler.__main__ import main, summary
from benchmarks.scheduler.executor_model import DEFAULT_MODEL, StepModel
from benchmarks.scheduler.simulator import Simulation, SimulationConfig
from benchmarks.scheduler.traces import TraceError, TraceRequest, make_trace, read_trace, write_trace
from services.scheduler.core import CoreConfig
from services.scheduler.drain_rate import DrainRate

SOURCES = [
    "poisson:rate=50,requests=60,input=32-700,output=1-60",
    "bursts:size=30,every=0.5,requests=60,input=64-300,output=8-40,limit=900",
    "flood:rate=50,requests=60,others=6,input=32-300,output=8-40",
    "chat:sessions=12,turns=3,rate=6,output=20-90",
    "agents:sessions=4,turns=3,rate=4,tools=300,context=2000,result=50-200,output=20-90",
]


def run(source: str, **fields: object) -> dict[str, object]:
    config = SimulationConfig(**{"num_executors": 2, **fields})  # type: ignore[arg-type]
    figures = summary(Simulation(make_trace(source, 3), config).run(), slo_ttft_s=1.0, slo_tpot_ms=30.0)
    del figures["core_us_per_event"]
    return figures


@pytest.mark.parametrize("source", SOURCES)
def test_equal_seeds_give_equal_figures_and_every_request_ends(source: str) -> None:
    first = run(source)
    assert first == run(source)
    assert first["finished"] == first["requests"] == len(make_trace(source, 3))
    assert make_trace(source, 3) != make_trace(source, 4)


@pytest.mark.parametrize("source", [*SOURCES, "bursts:size=40,requests=40,input=64-200,output=200-300"])
def test_memory_for_few_requests_serves_all(source: str) -> None:
    """The simulation raises unless each request gets exactly its tokens; in the last one many are displaced."""
    model = replace(StepModel.load(), num_blocks=45, max_num_seqs=12, max_num_batched_tokens=12 + 256)
    figures = run(source, model=model, num_executors=1)
    assert figures["finished"] == figures["requests"]
    if source not in SOURCES:
        assert figures["preemptions"] > 0  # type: ignore[operator]
        assert figures["queue_depth"]["max"] >= 28  # type: ignore[index]


@pytest.mark.parametrize("source", SOURCES)
def test_a_trace_file_says_the_same(source: str, tmp_path: Path) -> None:
    trace = make_trace(source, 5)
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "t.jsonl:1:"),
        (['{"id": "a", "at_s": 0, "prompt": [["p", 4]]}'], "output_tokens"),
        (['{"id": "a", "at_s": 0, "prompt": [["p", 4]], "output_tokens": 1, "at": 3}'], "at"),
        (['{"id": "a", "at_s": 0, "prompt": [["p", 4]], "output_tokens": 1, "after": "b"}'], "not an earlier line"),
        (['{"id": "a", "at_s": 0, "prompt": [["p", 4]], "output_tokens": 1}'] * 2, "comes twice"),
        ([], "empty"),
    ],
)
def test_a_bad_trace_file_is_refused_with_its_place(lines: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("source", "message"),
    [("nothing", "neither a file"), ("chat:turn=3", "no 'turn'; it has"), ("chat:turns=x", "not a int"),
     ("poisson:rate=0", "above 0"), ("poisson:input=9-2", "span")],
)  # fmt: skip
def test_a_bad_source_is_refused(source: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        make_trace(source, 0)


def test_turns_find_their_history_and_cut_off_ones_take_their_followers_along() -> None:
    chat = "chat:sessions=6,turns=4,rate=2,system=640,output=100"
    assert run(chat)["prefix_hit_rate"] > 0.6  # type: ignore[operator]
    assert run(chat, core=CoreConfig(enable_prefix_caching=False))["prefix_hit_rate"] == 0.0
    first = TraceRequest(id="a", at_s=0.0, prompt=(("p", 100),), output_tokens=2000, time_limit_s=0.5)
    later = TraceRequest(id="b", at_s=0.0, prompt=(("p", 100), ("a", 2000)), output_tokens=5, after="a")
    last = TraceRequest(id="c", at_s=0.0, prompt=(("p", 100),), output_tokens=5, after="b")
    figures = summary(Simulation([first, later, last]).run(), slo_ttft_s=1.0, slo_tpot_ms=30.0)
    assert (figures["failed"], figures["skipped"], figures["finished"]) == ({"DEADLINE_EXCEEDED": 1}, 2, 0)


@pytest.mark.parametrize(
    "source", ["poisson:rate=80,requests=300,output=60,limit=1-6", "bursts:size=150,every=3,requests=300,limit=2-9"]
)
def test_refusing_deadlines_early_costs_no_answer(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused because of the queue would not have been in time: as many are served without it."""
    model = replace(StepModel.load(), max_num_seqs=8)
    early = run(source, model=model, num_executors=1)
    monkeypatch.setattr(DrainRate, "least_wait_s", lambda _self, _ahead, _now_s: None)
    late = run(source, model=model, num_executors=1)
    assert early["failed"]["DEADLINE_UNREACHABLE"] > 20  # type: ignore[index]
    assert set(late["failed"]) == {"DEADLINE_EXCEEDED"}  # type: ignore[call-overload]
    assert early["finished"] >= late["finished"] > 20  # type: ignore[operator]


def first_token_waits(ageing_s: float, better: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token in a flood of twice what one executor can serve: of the flood, and of the others."""
    config = SimulationConfig(
        num_executors=1,
        model=replace(StepModel.load(), max_num_seqs=8),
        core=CoreConfig(max_queue_len=1_000_000, priority_ageing_s=ageing_s),
    )
    trace = make_trace(f"flood:rate=14,requests=500,better={better},others=12,input=64,output=200", 1)
    outcomes = Simulation(trace, config).run().outcomes
    assert len(outcomes) == len(trace)
    flood = [outcome.ttft_s for outcome in outcomes if outcome.request.priority]
    return flood, [outcome.ttft_s for outcome in outcomes if not outcome.request.priority]


@pytest.mark.parametrize(("better", "periods"), [(1, 1), (3, 3), (1000, 11), (2**31, 32)])
def test_a_flood_of_a_better_class_delays_others_by_a_bounded_time(better: int, periods: int) -> None:
    ageing_s = 2.0 if better < 1000 else 0.2
    flood, others = first_token_waits(ageing_s, better)
    without = first_token_waits(0.0, better)[1]
    assert max(others) <= max(flood) + ageing_s * periods + 0.5  # (at worst one answer has to end first)
    assert max(without) > max(others) + 5.0
    assert len(others) == len(without) == 12


def test_step_times_pass_through_what_was_recorded() -> None:
    model, recorded = StepModel.load(), json.loads(DEFAULT_MODEL.read_text())
    for rows, ms in recorded["decode_ms"]:
        assert model.decode_step_ms(rows, rows * recorded["decode_context"]) == pytest.approx(ms)
    for num_tokens, ms in recorded["prefill_ms"]:
        assert model.step_ms(0, 0, [(0, num_tokens)]) == pytest.approx(ms, rel=0.01)
    assert model.step_ms(256, 256 * 30_000, []) > model.step_ms(256, 256 * 640, []) > model.step_ms(255, 255 * 640, [])
    assert model.step_ms(8, 5000, [(4096, 4608)]) > model.step_ms(8, 5000, [(0, 512)]) > model.step_ms(8, 5000, [])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [f"--trace={SOURCES[0]}", f"--save-trace={tmp_path / 't.jsonl'}"]
    assert main([*argv, f"--plot={tmp_path / 'p.png'}"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert any("TTFT" in line for line in table)
    assert main(["--trace", str(tmp_path / "t.jsonl"), "--json"]) == 0
    (again,) = capsys.readouterr().out.splitlines()
    first, second = json.loads(last), json.loads(again)
    assert {k for k in first if first[k] != second[k]} <= {"trace", "core_us_per_event"}
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
