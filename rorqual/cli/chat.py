"""The terminal chat's loop: read a line, stream the answer, remember both."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

from rorqual.core.errors import RorqualError

HELP = "/reset begins a new conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer."


def converse(stream: Callable[[Any, Any], Iterator[str]], params: Any, *, system: str = "") -> None:
    """Run until end of input. An answer that was stopped stays in the conversation as far as it came."""
    out = Console(highlight=False, soft_wrap=True)
    interactive = sys.stdin.isatty()
    if interactive:
        out.print(f"[dim]{HELP}[/dim]")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            out.print()
            return
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            messages = list(opening)
            continue
        if text == "/help":
            out.print(HELP)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        answer: list[str] = []
        pieces = stream(messages, params)
        try:
            for piece in pieces:
                answer.append(piece)
                out.print(piece, end="", markup=False)
        except KeyboardInterrupt:
            out.print(" [dim](stopped)[/dim]", end="")
        except RorqualError as error:
            out.print(f"[red]{error.message}[/red]")
            messages.pop()
            continue
        finally:
            close = getattr(pieces, "close", None)
            if close is not None:
                close()
        out.print()
        messages.append({"role": "assistant", "content": "".join(answer)})
