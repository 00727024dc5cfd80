"""A peer measured beside ours: started and stopped, prompts of exact lengths by its own tokenizer, its row in the record."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.serving import bench_gpu
from benchmarks.serving.bench_gpu import RESULTS, Record, peer_part

RECORDED = json.loads((RESULTS / "vllm-0.26-h200-v2lite.json").read_text())
POINTS = [(512, 256, 1), (12, 5, 2)]
PEER = f"{sys.executable} -m tests.support.scripted_peer {{port}}"


@pytest.fixture
def args(tmp_path: Path) -> argparse.Namespace:
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps({"vocab_size": 2000}))
    return argparse.Namespace(
        model=shape,
        log_dir=tmp_path / "logs",
        peer_command=PEER,
        peer_start_timeout=30.0,
        run_timeout=100.0,
        per_slot=8,
        warmup=2,
    )


def ours(tok_s: float) -> dict[str, Any]:
    return {"output_tok_s": tok_s, "ttft_ms": {"mean": 5.0}, "tpot_ms": {"mean": 2.0}, "peak_gib": 100.0}


def children() -> list[str]:
    """Scripted peers that still run."""
    found = psutil.Process().children(recursive=True)
    return [
        " ".join(p.cmdline()) for p in found if p.status() != psutil.STATUS_ZOMBIE and "scripted" in str(p.cmdline())
    ]


def test_a_peer_is_measured_at_our_points_and_stopped(
    args: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record(tmp_path / "record.json", RECORDED)
    record.point("ours", POINTS[0], ours(1000.0))  # the other point is not ours of this call
    bodies: list[dict[str, Any]] = []
    make_job = bench_gpu.completion_job

    def spy(*values: Any, **fields: Any) -> Any:
        job = make_job(*values, **fields)
        bodies.append(json.loads(job.body))
        return job

    monkeypatch.setattr(bench_gpu, "completion_job", spy)
    peer_part(args, record, 8192, POINTS)
    rows = {row["input_len"]: row for row in json.loads((tmp_path / "record.json").read_text())["serving"]}
    peer = rows[512]["peer"]
    assert (peer["name"], peer["same_run"], peer["num_prompts"]) == ("peerless 1.2", True, 8)
    assert rows[512]["ratio"] == round(1000.0 / peer["output_tok_s"], 3)
    assert peer["recorded_output_tok_s"] == 294.3  # beside what was recorded of the peer on another day
    assert not rows[12]["peer"]["same_run"]
    assert rows[12]["peer"]["num_prompts"] == 16
    assert set(peer["cpu_share"]) == {"server", "client"}
    assert len({body["prompt"] for body in bodies}) == len(bodies)  # no prompt twice: no prefix cache answers
    assert {len(body["prompt"].split()) for body in bodies} == {511, 11}  # its tokenizer adds one
    assert children() == []
    assert "listening" in (tmp_path / "logs-peer.log").read_text()
    record.point("deterministic", POINTS[0], ours(900.0))
    assert record.value["serving"][1]["peer"]["same_run"]  # what this call measured stays
    again = Record(tmp_path / "record.json", RECORDED)
    again.point("ours", POINTS[0], ours(588.6))
    assert (again.value["serving"][1]["peer"]["same_run"], again.value["serving"][1]["ratio"]) == (False, 2.0)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"{sys.executable} -c 'raise SystemExit(\"no such weights\")'", "no such weights"),
        (PEER + " miscounts", "expected (tokens in, tokens out, finish reason) (512, "),
        ("sleep 60", "not ready after 1 s"),
        ("no-such-program {port}", "No such file or directory: 'no-such-program'"),
        ("serve 'half", "No closing quotation"),
    ],
)
def test_a_peer_that_fails_ends_the_benchmark(args: argparse.Namespace, command: str, said: str) -> None:
    args.peer_command = command
    args.peer_start_timeout = 1.0 if command == "sleep 60" else 30.0
    with pytest.raises(SystemExit) as error:
        peer_part(args, Record(None, RECORDED), 8192, POINTS)
    assert said in str(error.value)
    assert children() == []


def test_a_peer_that_will_not_stop_is_killed(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["peer_server"], "_STOP_S", 0.2)
    args.peer_command = PEER + " stays"
    peer_part(args, Record(None, RECORDED), 8192, POINTS[1:])
    assert children() == []


def test_it_ends_with_a_benchmark_that_is_told_to_end(tmp_path: Path) -> None:
    port = bench_gpu.free_ports(1)
    program = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, "benchmarks/serving")
from peer_server import end_blocks_on_sigterm, start_peer
end_blocks_on_sigterm()
with start_peer("{PEER.format(port=port)}", {port}, [], Path({str(tmp_path / "peer.log")!r}), 60) as peer:
    print(peer.process.pid, flush=True)
    time.sleep(100)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=bench_gpu.ROOT) as bench:
        assert bench.stdout is not None
        bench.stdout.readline()  # that it is ready
        peer = psutil.Process(int(bench.stdout.readline()))
        bench.terminate()
        assert bench.wait(60) == 143
    assert not peer.is_running() or peer.status() == psutil.STATUS_ZOMBIE
