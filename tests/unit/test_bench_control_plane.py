"""The control plane benchmark's figures mean what they say, and its plan has the replicas that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serving.bench_control_plane import added_latency_ms, head, paused_share
from benchmarks.serving.load_client import Answer
from rorqual.launch import make_plan


def test_the_paused_share_is_of_the_sequence_steps_inside_the_window() -> None:
    steps = [[0.0, 100, 50], [1.0, 200, 50], [2.0, 290, 60], [3.0, 380, 70], [4.0, 900, 900]]
    assert paused_share([{"steps": steps}], 1.0, 3.5) == (round(20 / 200, 5), 180)
    assert paused_share([{"steps": steps}, {"steps": steps}], 1.0, 3.5) == (round(20 / 200, 5), 360)
    assert paused_share([{"steps": []}], 1.0, 3.5) == (0.0, 0)


def answer(arrivals_s: list[float], num_output_tokens: int) -> Answer:
    return Answer(0.0, num_prompt_tokens=8, num_output_tokens=num_output_tokens, arrivals_s=arrivals_s)


def test_added_latency_is_from_made_to_read_and_of_tokens_read_together_to_the_first_read_after() -> None:
    made = {"8+3": [1.0, 2.0, 3.0], "8+4": [1.0, 2.0, 3.0, 4.0]}
    assert added_latency_ms([answer([1.001, 2.002, 3.003], 3)], made)["p50"] == pytest.approx(2.0)
    # The second and third token came in one read, half a second after the third was made.
    late = added_latency_ms([answer([1.001, 3.5, 4.001], 4)], made)
    assert late["p50"] == pytest.approx((1 + 500) / 2, abs=1)
    assert late["p99"] == pytest.approx(1500, rel=0.05)


def test_the_head_is_of_the_rows_that_have_targets() -> None:
    rows = [
        {"streams": n, "gateway_us_per_token": n / 10, "added_latency_ms": {"p50": n}, "paused_share": 0.5}
        for n in (1, 32, 256, 1024)
    ]
    result = {"rows": rows, "session": [{"paused_share": 0.001}, {"paused_share": 0.003}]}
    assert head(result) == {
        "streams": 256,
        "gateway_us_per_token": 25.6,
        "paused_share": 0.003,
        "added_latency_ms": {"p50": 32},
    }


def test_replicas_have_ports_of_their_own_and_every_gateway_knows_all_tokenizers(tmp_path: Path) -> None:
    plan = make_plan(
        {"port": 0, "model": tmp_path},
        names=("scheduler", "tokenizer", "gateway"),
        num_gateways=2,
        num_tokenizers=3,
        environ={},
    )
    try:
        argv = {process.name: process.argv for process in plan.processes}
        assert list(argv) == ["scheduler", "tokenizer", "tokenizer-2", "tokenizer-3", "gateway", "gateway-2"]
        listening = [
            next(flag.partition("=")[2] for flag in argv[name] if flag.startswith("--listen="))
            for name in ("tokenizer", "tokenizer-2", "tokenizer-3")
        ]
        assert len(set(listening)) == 3
        assert listening[0] == plan.text_address
        for name in ("gateway", "gateway-2"):
            assert f"--tokenizers={','.join(listening)}" in argv[name]
    finally:
        plan.close()
