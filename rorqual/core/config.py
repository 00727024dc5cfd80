"""The settings of every process: one frozen dataclass each, checked when it is built.

Field `max_model_len` is `--max-model-len` on the command line, `RORQUAL_MAX_MODEL_LEN` in the environment and
`max_model_len` in a TOML file (`rorqual.core.config_loader` reads them). A field's metadata holds its help.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from .api_keys import KEY_PATTERN
from .errors import ConfigError
from .limits import REQUEST

MOST_TIMEOUT_S = 1e9
"""32 years: as microseconds it is within what a request may carry."""

CHAT_FORMATS = (
    "deepseek-v2",
    "deepseek-v2.5",
    "deepseek-v3",
    "deepseek-r1",
    "deepseek-r1-0528",
    "deepseek-v3.1",
    "deepseek-v3.2",
    "deepseek-v4",
    "deepseek-v4-pro",
    "deepseek-v4.1",
    "kimi-k2",
    "kimi-k2-thinking",
)
"""What the tokenizer service knows by name."""


def setting(default: Any, help: str, *, choices: tuple[str, ...] = (), secret: bool = False) -> Any:
    """A dataclass field with its default and the help a person reads."""
    metadata = {"help": help, "choices": choices, "secret": secret}
    if isinstance(default, (list, dict)):
        raise TypeError("a default must be immutable: use a tuple")
    return field(default=default, metadata=metadata)


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ConfigError(f"--{name.replace('_', '-')} must be {rule}, got {value!r}", field=name)


def _check_address(name: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    _require(
        bool(host) and port.isdigit() and 0 <= int(port) < 65536, name, address, "host:port with a port below 65536"
    )


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Tracing, metrics and logs: the same in every process."""

    otlp_endpoint: str = setting(
        "",
        "OTLP/gRPC collector for traces, e.g. http://127.0.0.1:4317; empty: OTEL_EXPORTER_OTLP_ENDPOINT's, or no traces are sent",
    )
    trace_sample_ratio: float = setting(1.0, "share of requests traced, 0 to 1, where the client sent no trace context")
    log_level: str = setting("info", "least severe level that is logged", choices=("debug", "info", "warning", "error"))
    metrics_port: int = setting(
        -1,
        "port on metrics_host for Prometheus; 0 takes a free one, -1 serves none (the gateway has /metrics on its own port)",
    )
    metrics_host: str = setting("127.0.0.1", "interface that the metrics port binds to")

    def __post_init__(self) -> None:
        _require(
            0.0 <= self.trace_sample_ratio <= 1.0, "trace_sample_ratio", self.trace_sample_ratio, "between 0 and 1"
        )
        _require(
            self.log_level in ("debug", "info", "warning", "error"),
            "log_level",
            self.log_level,
            "debug, info, warning or error",
        )
        _require(-1 <= self.metrics_port < 65536, "metrics_port", self.metrics_port, "-1 to 65535")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """`python -m services.scheduler`."""

    listen: str = setting("127.0.0.1:50052", "address that tokenizers, callers and executors dial")
    max_model_len: int = setting(
        0, "longest history, prompt and generated tokens together; 0: what the executor's model allows"
    )
    max_num_seqs: int = setting(0, "sequences running at once; 0: what the executor allows")
    max_num_batched_tokens: int = setting(
        0, "tokens computed a step, decodes and prefill chunks together; 0: what the executor allows"
    )
    enable_prefix_caching: bool = setting(True, "reuse the KV blocks of equal prefixes")
    max_queue_len: int = setting(4096, "requests that may wait; further ones are refused with RESOURCE_EXHAUSTED")
    priority_ageing_s: float = setting(
        30.0,
        "a request that waits so long while a better priority is served gets a better one itself: by 1, then 2, 4, 8 … with "
        "each such time more; 0: never",
    )
    peer_timeout_s: float = setting(30.0, "silence of an executor that counts as its death")
    restart_wait_s: float = setting(
        2.0, "after a restart, how long executors may take to offer their cached blocks before requests are placed"
    )
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        _check_address("listen", self.listen)
        _require(
            self.max_model_len == 0 or self.max_model_len >= 2, "max_model_len", self.max_model_len, "0, or at least 2"
        )
        _require(self.max_num_seqs >= 0, "max_num_seqs", self.max_num_seqs, "0 or more")
        _require(
            self.max_num_batched_tokens == 0 or self.max_num_batched_tokens >= 64,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            "0, or at least 64",
        )
        _require(self.max_queue_len >= 1, "max_queue_len", self.max_queue_len, "at least 1")
        _require(
            self.priority_ageing_s == 0.0 or 1.0 <= self.priority_ageing_s <= 86400.0,
            "priority_ageing_s",
            self.priority_ageing_s,
            "0, or 1 to 86400",
        )
        _require(
            self.peer_timeout_s > 1.0, "peer_timeout_s", self.peer_timeout_s, "above 1 (a heartbeat comes each second)"
        )
        _require(0.0 <= self.restart_wait_s <= 60.0, "restart_wait_s", self.restart_wait_s, "0 to 60")


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """`python -m executor`."""

    model: str = setting(
        "", "folder of the checkpoint, in the Hugging Face layout; empty: the model that ships with the project"
    )
    served_model_name: str = setting("", "name that clients ask for; empty: the folder's name")
    scheduler: str = setting("127.0.0.1:50052", "address of the scheduler to dial")
    device: str = setting("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    backend: str = setting(
        "auto",
        "what computes: auto, the compiled kernels where they can and PyTorch elsewhere; sim, nothing: tokens are made up "
        "at a steady rate, for tests and benchmarks of everything around",
        choices=("auto", "sim"),
    )
    dtype: str = setting(
        "auto",
        "type of weights and KV cache; auto: the checkpoint's, or float32 on a CPU without BF16 arithmetic",
        choices=("auto", "bfloat16", "float32"),
    )
    load_format: str = setting(
        "safetensors", "dummy fills the weights with random numbers", choices=("safetensors", "dummy")
    )
    max_model_len: int = setting(0, "longest history; 0: the checkpoint's max_position_embeddings")
    max_num_seqs: int = setting(0, "sequences in the decode set; 0: 64 on a CPU, 256 on a GPU")
    max_num_batched_tokens: int = setting(
        0, "tokens a step, decodes and prefill chunks together; 0: 2,048 on a CPU, 8,192 on a GPU"
    )
    kv_cache_bytes: int = setting(0, "memory of the KV cache; 0: from gpu_memory_utilization, or 1 GiB on a CPU")
    gpu_memory_utilization: float = setting(0.9, "share of the device's memory the process may use")
    deterministic: bool = setting(False, "equal tokens whatever the batch: fixed tiles and splits, at a price")
    num_threads: int = setting(0, "CPU threads for the model; 0: all cores")
    seed: int = setting(0, "seed of dummy weights")
    sim_step_ms: float = setting(5.0, "milliseconds that a step of backend sim takes")
    sim_chunk_token_us: float = setting(0.0, "microseconds that each token of a prompt adds to a step of backend sim")
    sim_num_blocks: int = setting(4096, "KV blocks of 64 tokens that backend sim has")
    sim_num_drafts: int = setting(0, "drafts a sequence that each step of backend sim verifies")
    peer_timeout_s: float = setting(30.0, "silence of the scheduler that counts as its death")
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        _check_address("scheduler", self.scheduler)
        _require(self.device in ("auto", "cpu", "cuda"), "device", self.device, "auto, cpu or cuda")
        _require(self.dtype in ("auto", "bfloat16", "float32"), "dtype", self.dtype, "auto, bfloat16 or float32")
        _require(self.load_format in ("safetensors", "dummy"), "load_format", self.load_format, "safetensors or dummy")
        _require(
            self.max_model_len == 0 or self.max_model_len >= 2, "max_model_len", self.max_model_len, "0, or at least 2"
        )
        _require(0 <= self.max_num_seqs <= 4096, "max_num_seqs", self.max_num_seqs, "1 to 4096, or 0")
        _require(
            self.max_num_batched_tokens == 0 or self.max_num_batched_tokens >= self.max_num_seqs + 64,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"at least max_num_seqs + 64 (= {self.max_num_seqs + 64}), so that a chunk fits beside a full decode set",
        )
        _require(self.kv_cache_bytes >= 0, "kv_cache_bytes", self.kv_cache_bytes, "0 or more")
        _require(
            0.0 < self.gpu_memory_utilization <= 1.0,
            "gpu_memory_utilization",
            self.gpu_memory_utilization,
            "above 0 and at most 1",
        )
        _require(self.num_threads >= 0, "num_threads", self.num_threads, "0 or more")
        _require(self.backend in ("auto", "sim"), "backend", self.backend, "auto or sim")
        _require(self.sim_step_ms >= 0.0, "sim_step_ms", self.sim_step_ms, "0 or more")
        _require(self.sim_chunk_token_us >= 0.0, "sim_chunk_token_us", self.sim_chunk_token_us, "0 or more")
        _require(self.sim_num_blocks >= 1, "sim_num_blocks", self.sim_num_blocks, "at least 1")
        _require(0 <= self.sim_num_drafts <= 64, "sim_num_drafts", self.sim_num_drafts, "0 to 64")
        _require(
            self.peer_timeout_s > 1.0, "peer_timeout_s", self.peer_timeout_s, "above 1 (a heartbeat comes each second)"
        )

    def sized(self, *, on_gpu: bool) -> ExecutorConfig:
        """The same with a size wherever one was left to the device. Raises ConfigError where a given one does not fit."""
        max_num_seqs = self.max_num_seqs or (256 if on_gpu else 64)
        default_tokens = max(8192 if on_gpu else 2048, max_num_seqs + 64)
        return dataclasses.replace(
            self,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or default_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """`python -m services.tokenizer`."""

    listen: str = setting("127.0.0.1:50051", "address that gateways and callers dial")
    scheduler: str = setting("127.0.0.1:50052", "address of the scheduler")
    model: str = setting(
        "",
        "folder of the checkpoint: tokenizer.json, chat template, generation_config; empty: the model that ships with the project",
    )
    served_model_name: str = setting("", "name that clients ask for; empty: the folder's name")
    chat_template: str = setting("", "file of a Jinja template in place of the checkpoint's own")
    chat_format: str = setting(
        "auto", "how chats are written and read; auto: as the checkpoint shows", choices=("auto", *CHAT_FORMATS)
    )
    peer_timeout_s: float = setting(30.0, "how long streams wait for a lost scheduler to come back")
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        _check_address("listen", self.listen)
        _check_address("scheduler", self.scheduler)
        formats = ("auto", *CHAT_FORMATS)
        _require(self.chat_format in formats, "chat_format", self.chat_format, f"one of {', '.join(formats)}")
        _require(
            self.peer_timeout_s > 1.0, "peer_timeout_s", self.peer_timeout_s, "above 1 (a heartbeat comes each second)"
        )


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """`python -m gateway`."""

    host: str = setting("127.0.0.1", "interface to serve HTTP on")
    port: int = setting(8000, "port to serve HTTP on; 0 takes a free one")
    reuse_port: bool = setting(
        False, "share the port with other gateways that say the same; the kernel spreads connections over them"
    )
    tokenizers: tuple[str, ...] = setting(
        ("127.0.0.1:50051",), "addresses of the tokenizer replicas, separated by commas"
    )
    api_key: tuple[str, ...] = setting(
        (), "keys that clients may send as Bearer, separated by commas; none: no key is asked for", secret=True
    )
    api_key_file: str = setting(
        "",
        "file of further keys, 'KEY [TENANT] [best-priority=N]' a line; keys of one tenant share its cached prefixes",
    )
    best_priority: int = setting(
        0,
        "lowest priority that clients may ask for (lower runs earlier), where their key's line in api_key_file says no other",
    )
    cors_allow_origins: tuple[str, ...] = setting(
        (), "origins whose pages may call from a browser, separated by commas; *: any; none: no page may"
    )
    max_body_bytes: int = setting(32 * 1024 * 1024, "largest request body; larger ones get 413")
    head_timeout_s: float = setting(30.0, "longest a request's line and headers may take to arrive")
    body_timeout_s: float = setting(60.0, "longest a request's body may take to arrive")
    request_timeout_s: float = setting(3600.0, "longest a request may take, queue included")
    keep_alive_s: float = setting(10.0, "silence of a stream after which a comment or ping is sent; 0: none is")
    peer_timeout_s: float = setting(30.0, "how long streams wait for a lost tokenizer to come back")
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)

    def __post_init__(self) -> None:
        _require(0 <= self.port < 65536, "port", self.port, "0 to 65535")
        _require(len(self.tokenizers) >= 1, "tokenizers", self.tokenizers, "at least one address")
        for address in self.tokenizers:
            _check_address("tokenizers", address)
        for key in self.api_key:
            _require(bool(KEY_PATTERN.fullmatch(key)), "api_key", "(hidden)", "printable ASCII without blanks")
        for origin in self.cors_allow_origins:
            _require(
                origin == "*" or bool(re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s,]+", origin)),
                "cors_allow_origins",
                origin,
                "* or scheme://host[:port] without a path",
            )
        number = REQUEST["priority"]
        _require(number.admits(self.best_priority), "best_priority", self.best_priority, number.rule)
        _require(self.max_body_bytes >= 1024, "max_body_bytes", self.max_body_bytes, "at least 1024")
        _require(
            0 < self.request_timeout_s <= MOST_TIMEOUT_S,
            "request_timeout_s",
            self.request_timeout_s,
            "above 0, up to 1e9",
        )
        _require(0 <= self.keep_alive_s <= 3600, "keep_alive_s", self.keep_alive_s, "0 to 3600")
        for name in ("head_timeout_s", "body_timeout_s"):
            _require(0 < getattr(self, name) <= 3600, name, getattr(self, name), "above 0, up to 3600")
        _require(
            self.peer_timeout_s > 1.0, "peer_timeout_s", self.peer_timeout_s, "above 1 (a heartbeat comes each second)"
        )
