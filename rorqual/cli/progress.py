"""What a person sees while a stack starts and runs: a live table on a terminal, plain lines elsewhere. On stderr."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

from rorqual.launch import Event

# "2026-01-01 12:00:00,000 INFO    executor executor.weights: the message"
_LOG_LINE = re.compile(r"^\S+ \S+ (?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\S+ \S+: (?P<text>.*)$")
_LOUD = ("ERROR", "CRITICAL")


def split_log_line(line: str) -> tuple[str, str]:
    """Level and message of a process's log line; ("", line) for one in another form."""
    match = _LOG_LINE.match(line)
    return (match["level"], match["text"]) if match else ("", line)


class StartProgress:
    """Shows `Event`s (`on_event` may be called from any thread); a context that ends when the stack is up."""

    def __init__(self, names: Sequence[str], *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._names = tuple(names)
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._state: dict[str, str] = dict.fromkeys(names, "waiting")
        self._ready_s: dict[str, float] = {}
        self._said: dict[str, str] = {}
        self._starting = True
        self._quiet = quiet
        self._live: Live | None = None
        self._spinner = Spinner("dots")

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._quiet:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._starting = False
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        if kind is None and not self._quiet:
            times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._ready_s.items())
            self._print(f"[green]ready[/green] in {self.elapsed_s:.1f} s ({times})")

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def on_event(self, event: Event) -> None:
        with self._lock:
            if event.kind == "starting":
                self._state[event.name] = "starting"
                self._said.pop(event.name, None)
                if self._live is None and not self._quiet:
                    self._print(f"starting {event.name}")
            elif event.kind == "ready":
                self._state[event.name] = "ready"
                when = "again" if event.name in self._ready_s else f"after {self.elapsed_s:.1f} s"
                self._ready_s.setdefault(event.name, self.elapsed_s)
                if self._live is None and not self._quiet:
                    self._print(f"{event.name} is ready {when}")
            elif event.kind == "died":
                self._print(f"[red]{event.name} died[/red]: {escape(event.text)}")
            elif event.kind == "log":
                level, text = split_log_line(event.text)
                if level:
                    self._said[event.name] = text
                if level in _LOUD and not self._starting:
                    self._print(f"[red]{event.name}[/red] {escape(text)}")

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_column(width=2)
        table.add_column(width=10)
        table.add_column(no_wrap=True, overflow="ellipsis")
        for name in self._names:
            ready = self._state[name] == "ready"
            mark = "[green]✓[/green]" if ready else self._spinner
            after = f"[dim]{self._ready_s[name]:.1f} s[/dim]" if name in self._ready_s else ""
            table.add_row(mark, name, after or f"[dim]{escape(self._said.get(name, self._state[name]))}[/dim]")
        return table
