"""The help page of a command with many flags: grouped, and whole flag names at any width."""

from __future__ import annotations

from typing import Any

import typer.core
from rich.console import Console
from rich.markup import escape
from rich.table import Table

FLAGS_WIDTH = 34


class GroupedCommand(typer.core.TyperCommand):
    """A command whose --help lists its flags under the headings of their `rich_help_panel`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        out = Console(highlight=False, markup=True)
        out.print(f"[bold]Usage:[/bold] {escape(' '.join([ctx.command_path, *self.collect_usage_pieces(ctx)]))}\n")
        out.print(self.help or "")
        groups: dict[str, list[Any]] = {"Command": []}
        for param in self.get_params(ctx):
            if not getattr(param, "hidden", False):
                groups.setdefault(getattr(param, "rich_help_panel", None) or "Command", []).append(param)
        for title, params in groups.items():
            out.print(f"\n[bold]{escape(title)}[/bold]")
            table = Table.grid(padding=(0, 1))
            table.add_column(width=FLAGS_WIDTH, no_wrap=True)
            table.add_column()
            for param in params:
                table.add_row(f"  {escape(_names(param))}", getattr(param, "help", None) or "")
            out.print(table)


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.name.upper())
    if param.secondary_opts:
        return f"--[no-]{param.opts[0].removeprefix('--')}"
    names = ", ".join(sorted(param.opts, key=len))
    return f"{names} {param.metavar}" if param.metavar else names
