"""The commands, and how their failures are told."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from rorqual import __version__
from rorqual.core.config_loader import ENV_PORT_FILE, EXIT_CONFIG, PROCESSES, resolve_config
from rorqual.core.errors import ConfigError, InvalidRequestError, RorqualError
from rorqual.core.suggestions import of_command, of_flag
from rorqual.launch import LogDir, Stack, StackError, checkout_root, make_plan, module_command
from rorqual.launch.plan import MODULES, WHOLE, WITHOUT_HTTP, module_environ

from .help import GroupedCommand
from .progress import StartProgress
from .settings import with_settings

SAMPLE_PROMPT = "Tell me a short story about a whale."
SAMPLE_TOKENS = 120

app = typer.Typer(
    name="rorqual",
    help="Rorqual serves DeepSeek-family models: tokenizer, scheduler, executor and an OpenAI-compatible gateway.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
serve_app = typer.Typer(
    help="Run one process of the chain in the foreground, for containers and hosts of its own.",
    rich_markup_mode="rich",
    no_args_is_help=False,
)
app.add_typer(serve_app, name="serve")

ConfigOption = Annotated[
    str, typer.Option("--config", metavar="FILE", help="TOML file with settings (or RORQUAL_CONFIG).")
]
UrlOption = Annotated[
    str,
    typer.Option(
        metavar="URL",
        help="A running server: grpc://host:port or http://host:port. Without it a private one is started.",
    ),
]
KeyOption = Annotated[str, typer.Option(metavar="KEY", help="Bearer key for an http:// server (or RORQUAL_API_KEY).")]
SAMPLING = "Sampling (left out: the model's own defaults)"
TemperatureOption = Annotated[
    float | None, typer.Option(metavar="X", help="0 is greedy.", rich_help_panel=SAMPLING, show_default=False)
]
TopPOption = Annotated[
    float | None,
    typer.Option("--top-p", metavar="X", help="Share of probability kept.", rich_help_panel=SAMPLING),
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", metavar="N", help="Likeliest tokens kept; 0: all.", rich_help_panel=SAMPLING)
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", metavar="N", help="Longest answer, in tokens.", rich_help_panel=SAMPLING),
]
SampleSeedOption = Annotated[
    int | None,
    typer.Option("--sampling-seed", metavar="N", help="Equal seeds draw equally.", rich_help_panel=SAMPLING),
]


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        code = app(list(argv) or ["--help"], prog_name="rorqual", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        return _fail(context.command_path if context else "rorqual", _usage_message(error, argv), error.exit_code)
    except StackError as error:
        return _fail("rorqual", error.message, error.exit_code)
    except (ConfigError, InvalidRequestError) as error:
        return _fail("rorqual", error.message, EXIT_CONFIG)
    except RorqualError as error:
        return _fail("rorqual", error.message, 1)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _fail(command: str, message: str, code: int) -> int:
    sys.stderr.write(f"{command}: error: {message}\n")
    return code


_NO_COMMAND = re.compile(r"No such command '(?P<name>.*)'\.", re.DOTALL)


def _usage_message(error: typer.TyperException, argv: Sequence[str]) -> str:
    """typer's own words, but for what is not there: what may have been meant."""
    name, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    message = error.format_message()
    if context is None:
        return message
    if isinstance(name, str) and type(error).__name__ == "NoSuchOption":
        if not name.startswith("--"):  # of -tp typer names -t
            name = next((token.split("=", 1)[0] for token in argv if token.startswith(name)), name)
        valid = [option for param in context.command.params for option in (*param.opts, *param.secondary_opts)]
        return f"unknown flag {name}{of_flag(name, valid)}"
    if (match := _NO_COMMAND.fullmatch(message)) is not None:
        return f"no such command: {match['name']}{of_command(match['name'], context.command.list_commands(context))}"
    if message.startswith("Got unexpected extra argument") and "model" in {p.name for p in context.command.params}:
        return f"{message.removesuffix('.')}: a checkpoint is given with --model"
    return message


def _version(show: bool) -> None:
    if show:
        sys.stdout.write(f"rorqual {__version__}\n")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    del version


# --- up -----------------------------------------------------------------------------------------------------------


@app.command(cls=GroupedCommand)
@with_settings(WHOLE)
def up(
    config: ConfigOption = "",
    sample: Annotated[bool, typer.Option("--sample/--no-sample", help="Stream one sample answer when ready.")] = True,
    grpc_port: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Port of the gRPC TextService on loopback; 0 takes a free one. [dim](default: 50051; where that is taken, a free one, and it is said)[/dim]",
            show_default=False,
        ),
    ] = None,
    gateways: Annotated[
        int, typer.Option(metavar="N", help="Gateways that share the HTTP port, for thousands of tokens a second.")
    ] = 1,
    log_dir: Annotated[
        str, typer.Option(metavar="DIR", help="Folder for the logs of the processes.", show_default=False)
    ] = "",
    *,
    settings: dict[str, Any],
) -> None:
    """Start tokenizer, scheduler, executor and gateway on this machine, and serve until Ctrl-C.

    With no flags it serves the model that ships with the project on [bold]http://127.0.0.1:8000[/bold].
    Another checkpoint: [bold]rorqual up --model /path/to/checkpoint --port 9000[/bold].
    A process that dies is started again, however often, and its requests go on; meanwhile what needs it waits, then gets
    503 with Retry-After. The waits between starts grow to 30 s.
    Every flag is also a variable (--max-model-len is RORQUAL_MAX_MODEL_LEN) and a key of the TOML file.
    """
    plan = make_plan(settings, config=config, grpc_port=grpc_port, num_gateways=gateways)
    try:
        logs = LogDir(Path(log_dir)) if log_dir else LogDir.first_free(checkout_root() / ".rorqual" / "logs")
    except ConfigError:
        plan.close()
        raise
    out = Console(highlight=False, soft_wrap=True)
    progress = StartProgress([spec.name for spec in plan.processes])
    stack = Stack(plan, log_dir=logs, on_event=progress.on_event)
    with _signals_end(stack) as asked:
        try:
            with progress:
                stack.start()
            _announce(stack, out, plan.api_key, plan.metrics, plan.notes)
            if port_file := os.environ.get(ENV_PORT_FILE):
                _write_whole(Path(port_file), str(stack.http_port))
            if sample:
                _show_sample(stack, out, plan.api_key)
            out.print("Ctrl-C ends all processes; their logs are in", str(stack.log_dir))
            while not stack.wait(1.0):
                pass
        except StackError:
            if not asked:
                raise
        finally:
            stack.stop()
    if stack.error is not None and not asked:
        raise stack.error


@contextlib.contextmanager
def _signals_end(stack: Stack) -> Iterator[list[int]]:
    """SIGINT, SIGTERM and SIGHUP end the stack; a second one kills it. Yields the signals received."""
    asked: list[int] = []

    def handle(number: int, frame: object) -> None:
        stack.request_stop(kill=bool(asked))
        asked.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_whole(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def _announce(stack: Stack, out: Console, api_key: str, metrics: Mapping[str, str], notes: Sequence[str]) -> None:
    from .http import model_name

    model = model_name(stack.url, api_key)
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": SAMPLE_PROMPT}], "stream": True}, ensure_ascii=False
    )
    for note in notes:
        out.print(f"\n[bold yellow]Note[/bold yellow]: {escape(note)}")
    key = " -H 'Authorization: Bearer YOUR_KEY'" if api_key else ""
    out.print(f"\n[bold]{model}[/bold] is served on [bold]{stack.url}[/bold] (gRPC: grpc://{stack.text_address})\n")
    if metrics:
        told = ", ".join(f"{name} {url}" for name, url in {**metrics, "gateway": f"{stack.url}/metrics"}.items())
        out.print(f"metrics: {told}\n", markup=False)
    out.print(
        f"curl -N {stack.url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n", markup=False
    )


def _show_sample(stack: Stack, out: Console, api_key: str) -> None:
    from rorqual.client import SamplingParams

    from .http import stream_chat

    out.print(f"[dim]> {SAMPLE_PROMPT}[/dim]")
    messages = [{"role": "user", "content": SAMPLE_PROMPT}]
    try:
        for text in stream_chat(stack.url, messages, SamplingParams(max_tokens=SAMPLE_TOKENS), api_key=api_key):
            out.print(text, end="", markup=False)
            if stack.wait(0):
                break
        out.print("\n")
    except RorqualError as error:
        if not stack.wait(0):  # else it was ended meanwhile
            out.print(f"[red]the sample failed[/red]: {error.message}\n")


# --- serve --------------------------------------------------------------------------------------------------------


def _serve(name: str, argv: Sequence[str]) -> None:
    resolve_config(PROCESSES[name], argv, os.environ, prog=f"rorqual serve {name}")  # refuses, or shows the help
    root = checkout_root()
    command = module_command(MODULES[name], argv)
    sys.stdout.flush()
    os.execve(command[0], command, module_environ(root, os.environ))


def _add_serve(name: str, what: str) -> None:
    @serve_app.command(
        name,
        help=f"{what} [dim](--help shows its flags)[/dim]",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    )
    def command(context: typer.Context) -> None:
        _serve(name, context.args)


_add_serve("tokenizer", "Text to tokens and back: TextService, which gateways dial.")
_add_serve("scheduler", "Admission, batching and KV blocks: GenerationService, which tokenizers and executors dial.")
_add_serve("executor", "The model, on a GPU or a CPU; dials the scheduler.")
_add_serve("gateway", "The OpenAI-compatible HTTP API; dials tokenizers.")


# --- simulate -------------------------------------------------------------------------------------------------------


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)
def simulate(context: typer.Context) -> None:
    """Replay an arrival trace through the scheduler on virtual time, without a GPU. [dim](--help shows its flags)[/dim]"""
    root = checkout_root()
    if not (root / "benchmarks" / "scheduler" / "__main__.py").is_file():
        raise ConfigError(
            "the simulator is part of a checkout of the project (benchmarks/scheduler), not of this folder"
        )
    command = module_command("benchmarks.scheduler", context.args)
    sys.stdout.flush()
    os.execve(command[0], command, module_environ(root, os.environ))


# --- chat and generate ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _source(url: str, api_key: str, settings: dict[str, Any]) -> Iterator[Callable[[Any, Any], Iterator[str]]]:
    """A function from (messages or prompt, SamplingParams) to pieces of text, over gRPC, HTTP or a private stack."""
    if url.startswith(("http://", "https://")):
        if settings:
            raise ConfigError("a running server has its own settings: give either --url, or settings of a new one")
        from . import http

        key = api_key or os.environ.get("RORQUAL_API_KEY", "").split(",")[0]
        model = http.model_name(url, key)

        def over_http(prompt: Any, params: Any) -> Iterator[str]:
            if isinstance(prompt, str):
                return http.stream_completion(url, prompt, params, api_key=key, model=model)
            return http.stream_chat(url, prompt, params, api_key=key, model=model)

        yield over_http
        return
    from rorqual import LLM

    with contextlib.ExitStack() as cleanup:
        if url:
            if settings:
                raise ConfigError("a running server has its own settings: give either --url, or settings of a new one")
            llm = cleanup.enter_context(LLM(url=url))
        else:
            with StartProgress(WITHOUT_HTTP, quiet=not sys.stderr.isatty()) as progress:
                llm = cleanup.enter_context(LLM(on_event=progress.on_event, **settings))

        def over_grpc(prompt: Any, params: Any) -> Iterator[str]:
            return llm.stream_generate(prompt, params) if isinstance(prompt, str) else llm.stream_chat(prompt, params)

        yield over_grpc


def _params(
    temperature: float | None, top_p: float | None, top_k: int | None, max_tokens: int | None, seed: int | None
) -> Any:
    from rorqual import SamplingParams

    return SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, seed=seed)


@app.command(cls=GroupedCommand)
@with_settings(WITHOUT_HTTP)
def chat(
    url: UrlOption = "",
    key: KeyOption = "",
    *,
    config: ConfigOption = "",
    system: Annotated[str, typer.Option(metavar="TEXT", help="System message to begin with.")] = "",
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    max_tokens: MaxTokensOption = None,
    sampling_seed: SampleSeedOption = None,
    settings: dict[str, Any],
) -> None:
    """Talk to the model in the terminal; answers stream.

    Ctrl-C stops an answer, Ctrl-D (or /exit) leaves, /reset begins a new conversation.
    """
    from .chat import converse

    params = _params(temperature, top_p, top_k, max_tokens, sampling_seed)
    with _terminable(), _source(url, key, _with_config(settings, config)) as stream:
        converse(stream, params, system=system)


@app.command(cls=GroupedCommand)
@with_settings(WITHOUT_HTTP)
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.", show_default=False)],
    url: UrlOption = "",
    key: KeyOption = "",
    *,
    config: ConfigOption = "",
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Take the prompt as a user's message, not as a text to continue.")
    ] = False,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    max_tokens: MaxTokensOption = None,
    sampling_seed: SampleSeedOption = None,
    settings: dict[str, Any],
) -> None:
    """Continue a text: [bold]rorqual generate "Once upon a time"[/bold]. The continuation streams to stdout."""
    params = _params(temperature, top_p, top_k, max_tokens, sampling_seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    with _terminable(), _source(url, key, _with_config(settings, config)) as stream:
        for piece in stream([{"role": "user", "content": text}] if as_chat else text, params):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")


def _with_config(settings: dict[str, Any], config: str) -> dict[str, Any]:
    return {**settings, "config": config} if config else settings


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like Ctrl-C, so that a private stack is ended."""

    def handle(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
