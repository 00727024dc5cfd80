"""Turns the processes' settings into the flags of a typer command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from rorqual.launch import stack_settings

PANELS: Mapping[str, str] = {
    "gateway": "HTTP (gateway)",
    "executor": "Model and memory (executor)",
    "tokenizer": "Text (tokenizer)",
    "scheduler": "Queue (scheduler)",
    "telemetry": "Traces, metrics, logs (all processes)",
}


def with_settings(names: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, whose last parameter is `settings`, a flag for every setting of these processes.

    It is called with `settings`: name to text (True or False for a switch) of those given. Values are checked by the
    configuration's own loader, which also reads the environment and the file.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        known = stack_settings(names)

        def wrapper(**kwargs: Any) -> None:
            settings = {name: kwargs.pop(name) for name in known}
            command(**kwargs, settings={name: value for name, value in settings.items() if value is not None})

        signature = inspect.signature(command, eval_str=True)
        parameters = [p for p in signature.parameters.values() if p.name != "settings"]
        for name, (owner, setting) in known.items():
            flags = setting.flag
            if setting.type is bool:
                flags = f"{flags}/{flags.replace('--', '--no-', 1)}"
            default = f" [dim](default: {escape(setting.default_text)})[/dim]" if setting.default_text else ""
            choices = f"{', '.join(setting.choices)}: " if setting.choices else ""
            option = typer.Option(
                flags,
                help=escape(choices + setting.help) + default,
                rich_help_panel=PANELS[owner],
                metavar=None if setting.type is bool else "NAME" if setting.choices else setting.metavar,
                show_default=False,
            )
            kind = bool if setting.type is bool else str
            parameters.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
                )
            )
        wrapper.__signature__ = signature.replace(parameters=_keyword_only(parameters))  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        wrapper.__name__ = command.__name__
        wrapper.__doc__ = command.__doc__
        return wrapper

    return decorate


def _keyword_only(parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    return [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
