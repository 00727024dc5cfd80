"""A trial of grammar texts that nobody has tried: compiled and followed a little, in a process that may die of it."""

from __future__ import annotations

from pathlib import Path

from .grammar import GrammarCostError, GrammarError
from .grammar_bounds import bytes_fault
from .grammar_cache import OutcomeCache
from .grammar_process import Budget, GrammarProcess

CPU_S = 2.0
"""Of the processor's time, for one grammar."""
WALL_S = 10.0
"""For one grammar on a machine that has other things to do."""
TOO_LONG = f"it costs too much to compile: more than {CPU_S:.0f} s, or more memory or stack than one may take"


class GrammarTrial:
    """`trial(text)` returns where `GrammarEngine.compile(text)` may be called: it ends, and ends well.

    Blocks the calling thread; safe to use from several.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Of the checkpoint in `folder`. Its process is started by `start`, or by the first trial."""
        self._process = GrammarProcess(
            "rorqual.grammar_worker", {"folder": str(folder.resolve()), "vocab_size": vocab_size}
        )
        self._cache: OutcomeCache[bytes] = OutcomeCache()

    def start(self) -> None:
        """Load the vocabulary in the other process, so that the first trial does not wait for it."""
        self._process.start()

    def close(self) -> None:
        self._process.close()

    def __call__(self, text: str) -> None:
        """GrammarError where `text` cannot be compiled, GrammarCostError where that, or to follow it, costs too much.

        OSError where it could not be tried, which says nothing of `text`.
        """
        if fault := bytes_fault(text):
            raise GrammarCostError(fault)
        job = text.encode("utf-8", "surrogatepass")
        key = self._cache.key(job)
        reply = self._cache.get(key)
        if reply is None:
            outcome = self._process.run(job, Budget(CPU_S, WALL_S))
            if outcome.is_lost or (outcome.reply is None and not outcome.began):
                raise OSError("a grammar could not be tried: the process for it does not start, or ends")
            reply = outcome.reply if outcome.reply is not None else f"C{TOO_LONG}".encode()
            if not outcome.is_late:
                self._cache.put(key, reply, len(reply))
        if reply[:1] == b"C":
            raise GrammarCostError(reply[1:].decode())
        if reply:
            raise GrammarError(reply[1:].decode() or "there is no grammar engine for this checkpoint")
