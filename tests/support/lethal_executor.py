"""`python -m tests.support.lethal_executor`: an executor (--backend sim) that a bias for token LETHAL_ID kills, as native code may."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from executor.__main__ import main
from executor.sim import device
from rorqual.v1 import executor_pb2

LETHAL_ID = 42


class LethalSequence(device._Sequence):
    """Dies of what it is admitted with."""

    def __init__(self, admit: executor_pb2.Admit, tables: Any) -> None:
        if LETHAL_ID in admit.sampling.logit_bias:
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(admit, tables)


device._Sequence = LethalSequence  # type: ignore[misc]

if __name__ == "__main__":
    sys.exit(main())
