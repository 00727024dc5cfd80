"""What each process of a stack is started with: module, flags, ports. Nothing is started here."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rorqual
from rorqual.core.api_keys import read_api_keys
from rorqual.core.config import GatewayConfig
from rorqual.core.config_loader import PROCESSES, Setting, build, gather, settings_of
from rorqual.core.errors import ConfigError
from rorqual.core.otel import read_otel

MODULES: Mapping[str, str] = {
    "tokenizer": "services.tokenizer",
    "scheduler": "services.scheduler",
    "executor": "executor",
    "gateway": "gateway",
}
WHOLE = ("scheduler", "executor", "tokenizer", "gateway")
WITHOUT_HTTP = ("scheduler", "executor", "tokenizer")

DEFAULT_GRPC_PORT = 50051

_LOOPBACK = "127.0.0.1"
_WIRING = ("listen", "scheduler", "tokenizers")
"""Addresses between the processes: a stack chooses them itself."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start."""

    name: str
    module: str
    argv: tuple[str, ...]
    ready_variable: str  # RORQUAL_PORT_FILE or RORQUAL_READY_FILE: the file it writes when it is ready for others


@dataclass(frozen=True)
class StackPlan:
    """The processes of one stack, and the ports held for them until the plan is closed."""

    processes: tuple[ProcessSpec, ...]
    text_address: str  # "host:port" of the tokenizer's TextService
    scheduler_address: str  # "host:port" of the scheduler's GenerationService
    http_host: str  # "" without a gateway
    api_key: str = field(repr=False)  # one that the gateway takes; "" where it asks for none
    root: Path
    environ: Mapping[str, str]
    reserved: tuple[socket.socket, ...] = field(default=(), repr=False)
    metrics: Mapping[str, str] = field(
        default_factory=dict
    )  # process to URL of its metrics; the gateway's are beside its API
    notes: tuple[str, ...] = ()  # what is not as somebody may think, a sentence each

    def close(self) -> None:
        for held in self.reserved:
            held.close()


def checkout_root() -> Path:
    """The folder that holds the applications. Raises ConfigError in an installation that has only the library."""
    root = Path(rorqual.__file__).resolve().parent.parent
    if all((root / Path(*module.split(".")) / "__main__.py").is_file() for module in MODULES.values()):
        return root
    raise ConfigError(
        "this installation has only the client, which needs a running server (a URL): "
        "what starts a process needs a checkout of the project; run `make serve` there"
    )


def module_command(module: str, argv: Sequence[str]) -> list[str]:
    """`python -m module` with this interpreter; -P keeps the current folder's files from shadowing the modules."""
    return [sys.executable, "-P", "-m", module, *argv]


def module_environ(root: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with the checkout first on the module path."""
    path = [str(root), *(part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part)]
    return {
        "GRPC_VERBOSITY": "ERROR",  # a peer that goes away is no news for a log
        **environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "PYTHONUNBUFFERED": "1",
    }


def stack_settings(names: Sequence[str] = WHOLE) -> dict[str, tuple[str, Setting]]:
    """Every setting of these processes but the wiring, with the process that owns it ("telemetry" for the common)."""
    found: dict[str, tuple[str, Setting]] = {}
    for name in ("gateway", "executor", "tokenizer", "scheduler"):
        if name in names:
            for key, setting in settings_of(PROCESSES[name]).items():
                if key not in _WIRING:
                    found.setdefault(key, (setting.group or name, setting))
    # What all processes have in common comes last.
    return dict(sorted(found.items(), key=lambda item: item[1][0] == "telemetry"))


def reserve_port(port: int = 0, *, host: str = _LOOPBACK, shared: bool = False) -> socket.socket:
    """A port (on loopback) that is bound and not listened on: nobody else is given it, and a server may still take it.

    Linux lets a second socket bind while both have SO_REUSEADDR and none listens; gRPC's servers set it. So all
    processes can be started at once, each knowing the others' ports. `shared`: several servers will listen on it.
    Raises OSError where `port` is taken.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError:
        held.close()
        raise
    return held


def check_port(host: str, port: int) -> None:
    """Raises ConfigError, with the cure, where HTTP cannot be served on `host:port`."""
    if port == 0:
        return
    try:
        _probe(host, port)
    except OSError as error:
        raise _no_port(host, port, error, "--port (make: PORT=)", "port") from None


def check_listen(address: str, source: str) -> None:
    """Raises ConfigError where gRPC cannot be served on "host:port", which `source` named."""
    host, _, port = address.rpartition(":")
    try:
        _probe(host.strip("[]"), int(port))
    except OSError as error:
        raise _no_port(host, int(port), error, source, "listen") from None


def _probe(host: str, port: int) -> None:
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def _no_port(host: str, port: int, error: OSError, choice: str, name: str) -> ConfigError:
    """Why a port cannot be had, and the cure; `choice`: what another is chosen with."""
    if error.errno == errno.EADDRINUSE:
        cure = f"port {port} is taken on {host}: stop what uses it ({_show_port(port)} shows it), or choose another with {choice}"
    elif error.errno == errno.EACCES:
        cure = f"port {port} needs root: choose one above 1023 with {choice}"
    else:
        cure = f"cannot serve on {host}:{port}: {error.strerror or error}; choose another with {choice}"
    return ConfigError(cure, field=name)


def _show_port(port: int) -> str:
    return f"`ss -ltnp 'sport = :{port}'`"


def flags_for(name: str, flags: Mapping[str, Any]) -> list[str]:
    """`flags` (setting name to value) as the command line of process `name`; what it does not know is left out."""
    known = settings_of(PROCESSES[name])
    argv: list[str] = []
    for key, value in flags.items():
        if key not in known or value is None:
            continue
        setting = known[key]
        if setting.type is bool:
            argv.append(setting.flag if value else setting.flag.replace("--", "--no-", 1))
        elif isinstance(value, (tuple, list)):
            argv.append(f"{setting.flag}={','.join(map(str, value))}")
        else:
            argv.append(f"{setting.flag}={value}")
    return argv


def make_plan(
    flags: Mapping[str, Any],
    *,
    names: Sequence[str] = WHOLE,
    config: str = "",
    grpc_port: int | None = 0,
    num_gateways: int = 1,
    num_tokenizers: int = 1,
    environ: Mapping[str, str] = os.environ,
) -> StackPlan:
    """Check every process's settings and choose the ports between them.

    `flags`: setting name to value, for whichever processes know it. `grpc_port`: the tokenizer's; 0 takes a free one,
    None the default port or, where that is taken, a free one, which `notes` then tells. `num_gateways` share one HTTP port, and know all of
    `num_tokenizers` tokenizers, which have a port each (the first is `text_address`). Raises ConfigError
    before anything is started.
    """
    if not 1 <= num_gateways <= 64:
        raise ConfigError(f"--gateways must be 1 to 64, got {num_gateways}", field="gateways")
    root = checkout_root()
    base = [f"--config={Path(config).resolve()}"] if config else []
    environ = {k: v for k, v in environ.items() if k not in ("RORQUAL_PORT_FILE", "RORQUAL_READY_FILE")}
    given = {name: [*base, *flags_for(name, flags)] for name in names}
    sources = {name: gather(PROCESSES[name], given[name], environ) for name in names}
    settings: dict[str, Any] = {name: build(PROCESSES[name], sources[name]) for name in names}
    notes: list[str] = []

    reserved: list[socket.socket] = []
    try:
        http_host = api_key = ""
        if "gateway" in names:
            gateway: GatewayConfig = settings["gateway"]
            keys = read_api_keys(gateway.api_key, gateway.api_key_file)
            http_host, api_key = gateway.host, keys[0].key if keys else ""
            check_port(gateway.host, gateway.port)
            if num_gateways > 1:
                reserved.append(reserve_port(gateway.port, host=gateway.host, shared=True))
                given["gateway"] += [f"--port={reserved[0].getsockname()[1]}", "--reuse-port"]

        def reserve(port: int | None) -> str:
            try:
                held = reserve_port(DEFAULT_GRPC_PORT if port is None else port)
            except OSError as error:
                if port is not None:
                    raise ConfigError(
                        f"port {port} is taken on {_LOOPBACK} ({error.strerror}): stop what uses it, or choose another "
                        "with --grpc-port (0 takes a free one)",
                        field="grpc_port",
                    ) from None
                held = reserve_port()
                notes.append(
                    f"port {DEFAULT_GRPC_PORT}, where gRPC is served by default, is taken by another program "
                    f"({_show_port(DEFAULT_GRPC_PORT)} shows it): gRPC is on port {held.getsockname()[1]} this time, and who "
                    f"dials {DEFAULT_GRPC_PORT} reaches that program. Choose one with --grpc-port"
                )
            reserved.append(held)
            return f"{_LOOPBACK}:{held.getsockname()[1]}"

        def address(name: str, port: int | None) -> str:
            listen: str = settings[name].listen
            named = sources[name].get("listen")  # by somebody, in a variable or the file
            if named is None or listen.endswith(":0"):
                return reserve(port)
            check_listen(listen, named.source)
            return listen

        scheduler_address = address("scheduler", 0)
        text_address = address("tokenizer", grpc_port)
        if text_address == scheduler_address:
            raise ConfigError(
                f"scheduler and tokenizer cannot both listen on {text_address} (from "
                f"{sources['tokenizer']['listen'].source}): give each its own, in [scheduler] and [tokenizer] of a TOML file",
                field="listen",
            )
        text_addresses = [text_address, *(reserve(0) for _ in range(num_tokenizers - 1))]
        wiring = {
            "scheduler": [f"--listen={scheduler_address}"],
            "executor": [f"--scheduler={scheduler_address}"],
            "tokenizer": [f"--scheduler={scheduler_address}"],
            "gateway": [f"--tokenizers={','.join(text_addresses)}"],
        }
        metrics: dict[str, str] = {}
        for name, held in _reserve_metrics(settings).items():
            reserved.append(held)
            host, port = held.getsockname()[:2]
            wiring[name].append(f"--metrics-port={port}")
            metrics[name] = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
        wiring["gateway"].append("--metrics-port=-1")
        listen: list[tuple[str, ...]] = [(f"--listen={each}",) for each in text_addresses]
        listen[1:] = [(*argv, "--metrics-port=-1") for argv in listen[1:]]
        replicas: dict[str, list[tuple[str, ...]]] = {"tokenizer": listen, "gateway": [()] * num_gateways}
        processes = tuple(
            ProcessSpec(
                name if replica == 0 else f"{name}-{replica + 1}",
                MODULES[name],
                (*given[name], *wiring[name], *argv),
                "RORQUAL_READY_FILE" if name == "executor" else "RORQUAL_PORT_FILE",
            )
            for name in names
            for replica, argv in enumerate(replicas.get(name, [()]))
        )
    except BaseException:
        for held in reserved:
            held.close()
        raise
    return StackPlan(
        processes,
        text_address,
        scheduler_address,
        http_host,
        api_key,
        root,
        module_environ(root, environ),
        tuple(reserved),
        metrics,
        (*notes, *read_otel(settings["scheduler"].telemetry.otlp_endpoint, environ).notes),
    )


def _reserve_metrics(settings: Mapping[str, Any]) -> dict[str, socket.socket]:
    """A port for each process that serves metrics: its own or, where another has that one already, the next.

    (One --metrics-port cannot serve all of them. The gateway has /metrics beside its API.) Raises ConfigError.
    """
    held: dict[str, socket.socket] = {}
    http_port = settings["gateway"].port if "gateway" in settings else 0
    taken: set[int] = set()
    try:
        for name in ("scheduler", "executor", "tokenizer"):
            if name not in settings:  # the stack has none
                continue
            telemetry = settings[name].telemetry
            port = first = telemetry.metrics_port
            if port < 0:
                continue
            while port in taken:
                port += 1
            whose = f"the {name}'s metrics, from --metrics-port {first}"
            if port > 65535 or (port and port == http_port):
                why = "it is the port of HTTP" if port == http_port else "there is none above 65535"
                raise ConfigError(f"{whose}, cannot be on port {port}: {why}; choose another", field="metrics_port")
            try:
                held[name] = reserve_port(port, host=telemetry.metrics_host)
            except OSError as error:
                raise _no_port(
                    telemetry.metrics_host, port, error, f"--metrics-port ({whose})", "metrics_port"
                ) from None
            taken.add(port or held[name].getsockname()[1])
    except ConfigError:
        for each in held.values():
            each.close()
        raise
    return held
