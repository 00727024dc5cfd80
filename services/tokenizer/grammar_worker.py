"""`python -m services.tokenizer.grammar_worker FD`: grammars of requests, each made in a fork (see `rorqual.grammar_worker`)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from rorqual.grammar import GrammarEngine
from rorqual.grammar_worker import Tell, Work, serve

from .control_tokens import ControlTokens
from .grammar_job import PING, do_job

CRASH, HOG, SLEEP = b"\0crash", b"\0hog", b"\0sleep"
"""Jobs, in a worker that is configured for tests: one ends its process like a native fault, one takes memory without end,
one waits to be killed."""


def load(config: dict[str, Any]) -> Work:
    """The work of a configuration: `folder`, `vocab_size`, `control_tokens` (ids by spelling), `for_tests`."""
    control = ControlTokens(config["control_tokens"])
    fault = ""
    try:
        engine = GrammarEngine(Path(config["folder"]) / "tokenizer.json", config["vocab_size"], trial=True)
    except Exception as error:  # a missing package or file, a tokenizer that the engine does not know
        fault = str(error) or type(error).__name__

    def work(job: bytes, tell: Tell) -> bytes:
        if job == PING or fault:
            return fault.encode()
        if config["for_tests"]:
            _misbehave(job)
        return do_job(job, engine, control, tell)

    return work


def _misbehave(job: bytes) -> None:
    taken = []
    while job == HOG:
        taken.append(bytes(64 << 20))
    if job == CRASH:
        os.kill(os.getpid(), signal.SIGSEGV)
    if job == SLEEP:
        signal.pause()


if __name__ == "__main__":
    serve(load)
