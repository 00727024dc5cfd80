"""`python -m tests.support.lethal_tokenizer`: a tokenizer that dies, as by a fault of native code, of requests with a bias for LETHAL_ID."""

from __future__ import annotations

import os
import signal
from typing import Any

from rorqual.v1 import text_pb2
from services.tokenizer import engine, sampling
from services.tokenizer.__main__ import main

LETHAL_ID = 42

_check_options = sampling.check_options


def check_options(options: text_pb2.TextOptions, **rules: Any) -> None:
    if LETHAL_ID in options.sampling.logit_bias:
        os.kill(os.getpid(), signal.SIGKILL)
    _check_options(options, **rules)


setattr(engine, "check_options", check_options)  # noqa: B010  # the name that it has imported

if __name__ == "__main__":
    main()
