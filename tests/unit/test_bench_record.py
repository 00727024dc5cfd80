"""The record of a serving benchmark: rows replaced and kept, the peer beside ours, what fell short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.serving.bench_gpu import LONG, RESULTS, Record, plot, shortfalls, steps_between

PEER = json.loads((RESULTS / "vllm-0.26-h200-v2lite.json").read_text())


def row(tok_s: float, ttft: float = 5.0, peak: float = 100.0) -> dict[str, Any]:
    return {"output_tok_s": tok_s, "ttft_ms": {"mean": ttft}, "tpot_ms": {"mean": 2.0}, "peak_gib": peak}


def test_points_are_measured_against_the_peers_faster_run(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record = Record(path, PEER)
    record.point("ours", (512, 256, 256), row(12_082.1))
    record.point("ours", (512, 256, 1), row(441.45))
    record.point("ours", LONG, row(900.0, ttft=2000.0, peak=131.0))
    record.point("ours", (77, 5, 3), row(1.0))  # no peer's
    again = Record(path, PEER)
    again.point("ours", (512, 256, 1), row(588.6))
    again.point("deterministic", (512, 256, 1), row(294.3))
    rows = {(r["input_len"], r["concurrency"]): r for r in json.loads(path.read_text())["serving"]}
    assert len(rows) == 4
    assert rows[512, 256]["ratio"] == 1.0  # of two runs at 256 the faster
    assert rows[512, 256]["peer"]["name"] == "vLLM 0.26.0"
    assert rows[512, 1]["ratio"] == 2.0
    assert rows[512, 1]["deterministic_share"] == 0.5
    assert "ratio" not in rows[77, 3]
    assert shortfalls(again.value) == [
        "8192/256@16: 0.912 of the peer's tokens a second, 1.1 to reach",
        "8192/256@16: TTFT 2000.0 ms, the peer's 1024.4",
        "8192/256@16: peak 131.0 GiB, the peer's 129.86",
    ]
    again.transformers({"tok_s": {"1": 14.6, "32": 288.0}})
    assert again.value["transformers"]["ratio"] == {"1": 40.3}
    plot(again.value, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_step_times_are_of_the_run_between_two_scrapes() -> None:
    def metrics(count: float, total_s: float) -> dict[str, float]:
        return {
            'executor_step_seconds_count{kind="decode"}': count,
            'executor_step_seconds_sum{kind="decode"}': total_s,
            'executor_step_seconds_count{kind="mixed"}': 3.0,
            'executor_step_seconds_sum{kind="mixed"}': 1.0,
        }

    assert steps_between(metrics(10, 1.0), metrics(30, 1.1)) == {"decode": {"num": 20, "mean_ms": 5.0}}
