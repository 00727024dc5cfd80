"""The load client's figures mean what they say: times of scripted arrivals, lengths of made-up texts."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.serving import load_client
from benchmarks.serving.load_client import Answer, LoadError, LoadRun, completion_job
from benchmarks.serving.word_tokenizer import EOS, random_text, words, write_tokenizer

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


def chunk(text: str, reason: str = "null") -> bytes:
    return b'data: {"choices":[{"index":0,"text":%s,"finish_reason":%s}]}\n\n' % (
        json.dumps(text).encode(),
        reason.encode(),
    )


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3}}\n\n'


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        self.aborted = False

    def write(self, data: Any) -> None:
        self.written = data

    def abort(self) -> None:
        self.aborted = True


async def answered(
    monkeypatch: pytest.MonkeyPatch, reads: list[tuple[float, bytes]], cancel_after: int = 0
) -> tuple[Answer, Wire]:
    """The answer to one request, given when which bytes arrive."""
    now_s = 100.0
    monkeypatch.setattr(load_client.time, "perf_counter", lambda: now_s)
    connection, wire = load_client._Connection("host"), Wire()
    connection.connection_made(wire)
    done = connection.request(b"{}", cancel_after)
    for at_s, data in reads:
        now_s = at_s
        connection.data_received(data)
    return await done, wire


async def test_times_are_of_the_first_token_and_of_the_last_chunk_with_a_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer, _ = await answered(
        monkeypatch,
        [
            (100.1, HEAD + chunk("")),  # no token yet
            (100.5, chunk("a")),
            (101.0, chunk("b") + chunk("c")),
            (102.5, chunk("", '"length"')),
            (109.0, USAGE + END),
        ],
    )
    assert answer.ttft_s == pytest.approx(0.5)
    assert answer.tpot_s == pytest.approx((102.5 - 100.5) / 2)
    assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.finish_reason) == (7, 3, "length")
    summary = LoadRun([answer], wall_s=2.0, client_cpu_s=0.1).summary()
    assert summary["output_tok_s"] == 1.5
    assert summary["ttft_ms"] == {"mean": 500.0, "median": 500.0, "p99": 500.0}


async def test_what_is_no_whole_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [(101.0, HEAD + chunk("a")), (102.0, chunk("", '"length"') + USAGE + END)]
    with pytest.raises(LoadError, match="503"):
        await answered(monkeypatch, [(101.0, b"HTTP/1.1 503 Service Unavailable\r\n\r\n")])
    with pytest.raises(LoadError, match="fault"):
        await answered(monkeypatch, [whole[0], (102.0, b'data: {"error":{"message":"fault"}}\n\n')])
    with pytest.raises(LoadError, match="ended early"):
        await answered(monkeypatch, [whole[0], (102.0, b"\r\n0\r\n\r\n")])
    answer, _ = await answered(monkeypatch, whole)
    completion_job("x", 7, 3).check(answer)
    for wrong in (completion_job("x", 8, 3), completion_job("x", 7, 4)):
        with pytest.raises(LoadError, match="expected"):
            wrong.check(answer)


async def test_a_client_that_leaves_cuts_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = [(101.0, HEAD + chunk("a")), (102.0, chunk("b")), (103.0, chunk("c"))]
    answer, wire = await answered(monkeypatch, reads, cancel_after=2)
    assert answer.cancelled
    assert wire.aborted
    assert len(answer.arrivals_s) == 2


def test_percentiles_lie_between_neighbours() -> None:
    assert load_client.spread_ms([0.001 * n for n in range(1, 102)]) == {"mean": 51.0, "median": 51.0, "p99": 100.0}


@pytest.mark.parametrize("size", [1000, 8192, 102_400])
def test_texts_have_the_number_of_tokens_that_was_asked_for(size: int, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, size)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == size
    assert tokenizer.token_to_id(EOS) == size - 1
    vocab = words(size)
    for length in (1, 2, 513):
        text = random_text(vocab, length, random.Random(length))
        ids = tokenizer.encode(text).ids
        assert len(ids) == length
        assert tokenizer.decode(ids) == text
