"""One typed configuration from flags, environment and a TOML file.

Precedence: flags over `RORQUAL_*` variables over the file (`--config FILE` or `RORQUAL_CONFIG`) over the default.
Field `max_model_len` is `--max-model-len`, `RORQUAL_MAX_MODEL_LEN` and `max_model_len`; a nested dataclass is
flattened. A file may hold keys for all processes at its top level and a table for each (`[scheduler]`), which wins.
Environment and file may be shared: what another process knows is accepted and left alone, what none knows is refused
with the nearest valid name.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import sys
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from .config import ExecutorConfig, GatewayConfig, SchedulerConfig, TokenizerConfig
from .errors import ConfigError
from .suggestions import nearest, of_flag

T = TypeVar("T")

PROCESSES: Mapping[str, type] = {
    "tokenizer": TokenizerConfig,
    "scheduler": SchedulerConfig,
    "executor": ExecutorConfig,
    "gateway": GatewayConfig,
}

ENV_PREFIX = "RORQUAL_"
ENV_CONFIG = "RORQUAL_CONFIG"
ENV_PORT_FILE = "RORQUAL_PORT_FILE"
ENV_READY_FILE = "RORQUAL_READY_FILE"
_INTERNAL_ENV = (ENV_CONFIG, ENV_PORT_FILE, ENV_READY_FILE)

EXIT_CONFIG = 2
"""Exit code of a process that was started wrongly: nobody should start it again as it was."""

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_TYPE_NAMES: Mapping[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple[str, ...]: "text, separated by commas",
}
_METAVARS: Mapping[Any, str] = {str: "TEXT", int: "N", float: "X", tuple[str, ...]: "TEXT,…"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf field of a configuration, with the nested dataclass it lies in."""

    name: str
    type: Any  # str, int, float, bool or tuple[str, ...]
    default: Any
    help: str
    choices: tuple[str, ...]
    secret: bool
    group: str  # field name of the nested dataclass; "" at the top

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def metavar(self) -> str:
        return "{" + ",".join(self.choices) + "}" if self.choices else _METAVARS[self.type]

    def show(self, value: object) -> str:
        """The value as a person would type it; a secret stays hidden."""
        if self.secret:
            return "(hidden)"
        return ",".join(value) if isinstance(value, tuple) else str(value)

    @property
    def default_text(self) -> str:
        """The default for a help page; "" where there is nothing to show."""
        if self.type is bool:
            return "on" if self.default else "off"
        return "" if self.secret or self.default in ("", ()) else self.show(self.default)


@dataclass(frozen=True, slots=True)
class Given:
    """A value that somebody set, and where."""

    value: Any
    source: str


def settings_of(cls: type) -> Mapping[str, Setting]:
    """The leaf fields of a configuration class by name, nested dataclasses flattened, in their order."""
    return _settings_of(cls)


@functools.cache
def _settings_of(cls: type) -> Mapping[str, Setting]:
    found: dict[str, Setting] = {}

    def walk(cls: type, group: str) -> None:
        hints = typing.get_type_hints(cls)
        for item in dataclasses.fields(cls):
            kind = hints[item.name]
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                walk(kind, item.name)
                continue
            if kind not in _TYPE_NAMES:
                raise TypeError(f"{cls.__name__}.{item.name}: settings of type {kind} are not supported")
            if item.name in found:
                raise TypeError(f"{cls.__name__}.{item.name}: the name is used twice")
            meta = item.metadata
            found[item.name] = Setting(
                name=item.name,
                type=kind,
                default=item.default,
                help=meta.get("help", ""),
                choices=tuple(meta.get("choices", ())),
                secret=bool(meta.get("secret", False)),
                group=group,
            )

    walk(cls, "")
    return MappingProxyType(found)


def canonical(name: str, known: Mapping[str, Setting]) -> str:
    """`name` with a time's unit added where only that is missing (`peer_timeout` is `peer_timeout_s`)."""
    return f"{name}_s" if name not in known and f"{name}_s" in known else name


def parse_text(setting: Setting, text: str, source: str) -> Given:
    """The value that `text` (of a flag or a variable) stands for. Raises ConfigError."""
    wrong = ConfigError(f"{source} must be {_TYPE_NAMES[setting.type]}, got {setting.show(text)!r}", field=setting.name)
    value: Any
    if setting.type is bool:
        word = text.strip().lower()
        if word not in _TRUE + _FALSE:
            raise wrong
        value = word in _TRUE
    elif setting.type in (int, float):
        try:
            value = setting.type(text)
        except ValueError:
            raise wrong from None
    elif setting.type is str:
        value = text
    else:
        value = tuple(part for part in (part.strip() for part in text.split(",")) if part)
    return _checked(setting, value, source)


def parse_toml(setting: Setting, value: object, source: str) -> Given:
    """The value that a TOML file holds. Raises ConfigError."""
    ok: bool
    if setting.type is float and type(value) is int:
        value = float(value)
    if setting.type == tuple[str, ...]:
        if isinstance(value, str):
            return parse_text(setting, value, source)
        ok = isinstance(value, list) and all(isinstance(part, str) for part in value)
    else:
        ok = type(value) is setting.type
    if not ok:
        kind = "a list of texts" if setting.type == tuple[str, ...] else _TYPE_NAMES[setting.type]
        shown = "(hidden)" if setting.secret else repr(value)
        raise ConfigError(f"{source} must be {kind}, got {shown}", field=setting.name)
    return _checked(setting, tuple(value) if isinstance(value, list) else value, source)


def _checked(setting: Setting, value: Any, source: str) -> Given:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{source} must be a finite number, got {value}", field=setting.name)
    if setting.choices and value not in setting.choices:
        raise ConfigError(
            f"{source} must be one of {', '.join(setting.choices)}, got {value!r}{nearest(str(value), setting.choices)}",
            field=setting.name,
        )
    return Given(value, source)


def _known_elsewhere() -> dict[str, Setting]:
    known: dict[str, Setting] = {}
    for cls in PROCESSES.values():
        for name, setting in settings_of(cls).items():
            known.setdefault(name, setting)
    return known


def from_environ(known: Mapping[str, Setting], environ: Mapping[str, str]) -> dict[str, Given]:
    """The settings that `RORQUAL_*` variables give; an empty variable counts as not set. Raises ConfigError."""
    everywhere = {**_known_elsewhere(), **known}
    given: dict[str, Given] = {}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX) or variable in _INTERNAL_ENV:
            continue
        name = canonical(variable.removeprefix(ENV_PREFIX).lower(), everywhere)
        if name not in everywhere or variable != variable.upper():
            valid = [setting.env for setting in everywhere.values()] + [ENV_CONFIG]
            raise ConfigError(f"unknown variable {variable}{of_flag(variable, valid)}", field=name)
        if name in known and environ[variable] != "":
            given[name] = parse_text(known[name], environ[variable], variable)
    return given


def from_file(known: Mapping[str, Setting], path: str, process: str) -> dict[str, Given]:
    """The settings that the TOML file gives the process called `process` ("" for none). Raises ConfigError."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    everywhere = {**_known_elsewhere(), **known}
    tables = dict(PROCESSES)
    shared: dict[str, Given] = {}
    own: dict[str, Given] = {}
    for key, value in document.items():
        if key in tables:
            # `scheduler` is a table here and an address elsewhere: the type tells them apart.
            if isinstance(value, dict):
                table = settings_of(tables[key])
                for raw, inner in value.items():
                    name = canonical(raw, table)
                    if name not in table:
                        raise ConfigError(f"unknown key {raw} in [{key}] of {path}{of_flag(raw, table)}", field=raw)
                    parsed = parse_toml(table[name], inner, f"{name} in [{key}] of {path}")
                    if key == process and name in known:
                        own[name] = parsed
                continue
            if key not in everywhere:
                raise ConfigError(f"[{key}] in {path} must be a table, got {value!r}", field=key)
        name = canonical(key, everywhere)
        if name not in everywhere:
            what = "table" if isinstance(value, dict) else "key"
            raise ConfigError(f"unknown {what} {key} in {path}{of_flag(key, [*everywhere, *tables])}", field=key)
        parsed = parse_toml(everywhere[name], value, f"{name} in {path}")
        if name in known:
            shared[name] = parsed
    return {**shared, **own}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument ").replace(": expected one argument", " needs a value"))


def _make_parser(known: Mapping[str, Setting], prog: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        add_help=False,
        usage=f"{prog} [--config FILE] [flags]",
        epilog="Every flag is also a variable (--max-model-len is RORQUAL_MAX_MODEL_LEN) and a key of the TOML file "
        "(max_model_len). Flags win over variables, variables over the file, the file over the default.",
    )
    general = parser.add_argument_group("general")
    general.add_argument("-h", "--help", action="help", help="show this and exit")
    general.add_argument("--config", metavar="FILE", help="TOML file with settings (or RORQUAL_CONFIG)")
    groups: dict[str, Any] = {}
    for setting in known.values():
        title = setting.group or "settings"
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        flags = [setting.flag, *([setting.flag.removesuffix("-s")] if setting.name.endswith("_s") else [])]
        default = f" [default: {setting.default_text}]" if setting.default_text else ""
        text = (setting.help + default).replace("%", "%%")
        if setting.type is bool:
            negated = setting.flag.replace("--", "--no-", 1)
            group.add_argument(
                *flags, dest=setting.name, action="store_const", const="true", default=argparse.SUPPRESS, help=text
            )
            group.add_argument(
                negated,
                dest=setting.name,
                action="store_const",
                const="false",
                default=argparse.SUPPRESS,
                help="switch it off",
            )
        else:
            group.add_argument(*flags, dest=setting.name, metavar=setting.metavar, default=argparse.SUPPRESS, help=text)
    return parser


def from_flags(
    known: Mapping[str, Setting], argv: Sequence[str], *, prog: str = "rorqual", description: str = ""
) -> tuple[dict[str, Given], str]:
    """The settings that `argv` gives, and its --config ("" if none). Raises ConfigError; --help exits with 0."""
    parser = _make_parser(known, prog, description)
    namespace, rest = parser.parse_known_args(list(argv))
    if rest:
        flag = rest[0].split("=", 1)[0]
        if flag.startswith("-"):
            valid = [option for action in parser._actions for option in action.option_strings]
            raise ConfigError(f"unknown flag {flag}{of_flag(flag, valid)}", field=flag)
        raise ConfigError(f"unexpected argument {rest[0]!r}: settings are given as --flag value")
    values = vars(namespace)
    config = values.pop("config") or ""
    return {name: parse_text(known[name], text, known[name].flag) for name, text in values.items()}, config


def process_name(cls: type) -> str:
    """The table of `cls` in a file: "scheduler" for SchedulerConfig; "" for a class that has none."""
    return next((name for name, known in PROCESSES.items() if issubclass(cls, known)), "")


def build(cls: type[T], given: Mapping[str, Given]) -> T:
    """An instance of `cls` from what was given, defaults elsewhere. Raises ConfigError naming the source."""

    def make(cls: type) -> Any:
        hints = typing.get_type_hints(cls)
        kwargs: dict[str, Any] = {}
        for item in dataclasses.fields(cls):
            kind = hints[item.name]
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                kwargs[item.name] = make(kind)
            elif item.name in given:
                kwargs[item.name] = given[item.name].value
        return cls(**kwargs)

    try:
        return typing.cast(T, make(cls))
    except ConfigError as error:
        source = given[error.field].source if error.field in given else ""
        if source and not source.startswith("--"):
            error = ConfigError(f"{error.message} (from {source})", field=error.field)
        raise error from None


def resolve_config(
    cls: type[T], argv: Sequence[str], environ: Mapping[str, str], *, prog: str = "rorqual", description: str = ""
) -> T:
    """`load_config` without the exit: raises ConfigError. --help still prints and exits with 0."""
    return build(cls, gather(cls, argv, environ, prog=prog, description=description))


def gather(
    cls: type, argv: Sequence[str], environ: Mapping[str, str], *, prog: str = "rorqual", description: str = ""
) -> dict[str, Given]:
    """What flags, environment and file give for `cls`, and which of them does. Raises ConfigError."""
    known = settings_of(cls)
    flags, config = from_flags(known, argv, prog=prog, description=description)
    variables = from_environ(known, environ)
    path = config or environ.get(ENV_CONFIG, "")
    file = from_file(known, path, process_name(cls)) if path else {}
    return {**file, **variables, **flags}


def load_config(
    cls: type[T], argv: Sequence[str] | None = None, *, prog: str, environ: Mapping[str, str] = os.environ
) -> T:
    """The configuration of this process, for its `main()`.

    `argv`: the flags, without the program's name; None takes `sys.argv[1:]`. A wrong flag, variable, key or value
    prints one line on stderr and exits with 2; --help prints the settings and exits with 0.
    """
    try:
        return resolve_config(cls, sys.argv[1:] if argv is None else argv, environ, prog=prog)
    except ConfigError as error:
        exit_with(prog, error)


def exit_with(prog: str, error: Exception) -> NoReturn:
    """End a process that was started wrongly: one line on stderr, exit code 2."""
    sys.stderr.write(f"{prog}: error: {' '.join(str(error).split())}\n")
    raise SystemExit(EXIT_CONFIG)
