"""Becomes a process of the stack, bound to its launcher: `python child.py LAUNCHER_PID COMMAND…`.

The kernel kills it when the launcher's thread that started it ends, even by SIGKILL: no launcher, no orphan. Run as a
file with -I -S, which takes 15 ms, so that nothing has to happen between fork and exec in a process with threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # it ended before the call above
            raise SystemExit(1)
    os.execv(command[0], command)


main()
