"""The command `rorqual`: up, serve, chat, generate."""

from __future__ import annotations

import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code. What is wrong with a command line is one line on stderr and code 2."""
    if sys.version_info < (3, 11):  # noqa: UP036  (an old interpreter that runs from the source tree)
        sys.stderr.write(f"rorqual: error: needs Python 3.11 or 3.12, this is {sys.version.split()[0]}\n")
        return 2
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # its notes about connections are not for a terminal
    from .app import run

    return run(sys.argv[1:] if argv is None else argv)
