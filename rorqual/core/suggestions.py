"""What somebody may have meant by a flag, setting or command that is not there: one that is spelled or means alike."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_TLS = "TLS is not served here: put a proxy that ends it (nginx, Caddy, a load balancer) before the gateway"
_ONE_DEVICE = "an executor runs the whole model on one device: there is no parallelism to set"
_TOKENIZER = "the tokenizer is the one in the folder that --model names"
_FORMAT = "reasoning and tool calls are read as the checkpoint's own format has them, see --chat-format"
_ALWAYS_CHUNKED = "prompts are always computed in chunks, see --max-num-batched-tokens"
_BLOCKS = "a block has 64 tokens, always"
_DTYPE_OF_KV = "the KV cache has the dtype of the model, see --dtype"
_QUANTIZED = "how the weights are stored is read from the checkpoint (BF16, or FP8 in blocks)"
_GRAMMARS = "there is one engine for structured output, and nothing to choose"
_TEXT_ONLY = "text generation is all that is served"
_NO_LORA = "adapters are not served: merge them into the checkpoint"
_NO_DRAFTS = "speculative decoding is not served"
_NO_CODE = "nothing of a checkpoint is executed, so there is nothing to trust"
_NO_OFFLOAD = "weights and KV cache stay on the device: nothing is swapped out"
_FOLDER = "a checkpoint is a folder that --model names: download it first (`hf download`)"
_CONFIG_JSON = "it is read from the checkpoint's config.json"
_DEFAULTS = "defaults of sampling are the checkpoint's generation_config.json; a request says what else it wants"
_GRAPHS = "graphs and kernels are chosen by the executor, whose log names them"
_REQUESTS_NOT_LOGGED = "requests are not logged: see --otlp-endpoint for traces, --metrics-port for figures"
_PATH = "the API is at /v1: have a proxy rewrite another path"

_FLAGS: Mapping[str, str] = {
    # Another name: vLLM's, SGLang's, llama.cpp's, uvicorn's, and what comes to mind.
    "model-path": "--model",
    "model-name-or-path": "--model",
    "checkpoint": "--model",
    "hf-model": "--model",
    "model-name": "--served-model-name",
    "alias": "--served-model-name",
    "context-length": "--max-model-len",
    "ctx-size": "--max-model-len",
    "max-seq-len": "--max-model-len",
    "max-sequence-length": "--max-model-len",
    "max-total-tokens": "--max-model-len",
    "mem-fraction-static": "--gpu-memory-utilization",
    "kv-cache-memory-bytes": "--kv-cache-bytes",
    "max-total-kv-tokens": "--kv-cache-bytes",
    "max-running-requests": "--max-num-seqs",
    "max-concurrent-requests": "--max-num-seqs",
    "max-batch-size": "--max-num-seqs",
    "parallel": "--max-num-seqs",
    "max-queued-requests": "--max-queue-len",
    "max-prefill-tokens": "--max-num-batched-tokens",
    "chunked-prefill-size": "--max-num-batched-tokens",
    "batch-size": "--max-num-batched-tokens",
    "ubatch-size": "--max-num-batched-tokens",
    "disable-radix-cache": "--no-enable-prefix-caching",
    "no-prefix-caching": "--no-enable-prefix-caching",
    "enable-deterministic-inference": "--deterministic",
    "threads": "--num-threads",
    "api-keys": "--api-key",
    "bind": "--host",
    "listen-host": "--host",
    "http-port": "--port",
    "listen-port": "--port",
    "workers": "--gateways",
    "api-server-count": "--gateways",
    "num-api-servers": "--gateways",
    "uvicorn-log-level": "--log-level",
    "log-level-http": "--log-level",
    "log-folder": "--log-dir",
    "log-file": "--log-dir",
    "otlp-traces-endpoint": "--otlp-endpoint",
    "otel-endpoint": "--otlp-endpoint",
    "prometheus-port": "--metrics-port",
    "enable-metrics": "--metrics-port",
    "allowed-origins": "--cors-allow-origins",
    "cors-origins": "--cors-allow-origins",
    "timeout": "--request-timeout-s",
    "request-timeout": "--request-timeout-s",
    "reasoning-parser": "--chat-format",
    "tool-call-parser": "--chat-format",
    "chat-template-path": "--chat-template",
    "random-seed": "--seed",
    # No counterpart.
    **dict.fromkeys(
        ("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "ssl-key-file", "ssl-cert-file", "ssl-keyfile-password",
         "enable-ssl-refresh", "ssl", "tls", "https", "tls-cert", "tls-key", "cert", "key-file", "certfile", "keyfile"), _TLS),
    **dict.fromkeys(
        ("tensor-parallel-size", "tp", "tp-size", "tensor-parallel", "pipeline-parallel-size", "pp", "pp-size", "data-parallel-size",
         "dp", "dp-size", "expert-parallel-size", "ep", "ep-size", "enable-expert-parallel", "enable-dp-attention", "num-gpus", "gpus",
         "nnodes", "node-rank", "dist-init-addr", "distributed-executor-backend", "tensor-split"), _ONE_DEVICE),
    **dict.fromkeys(("tokenizer", "tokenizer-path", "tokenizer-mode", "skip-tokenizer-init"), _TOKENIZER),
    **dict.fromkeys(("enable-auto-tool-choice", "enable-reasoning", "reasoning-format"), _FORMAT),
    **dict.fromkeys(("enable-chunked-prefill", "disable-chunked-prefill", "enable-mixed-chunk"), _ALWAYS_CHUNKED),
    **dict.fromkeys(("block-size", "page-size"), _BLOCKS),
    **dict.fromkeys(("kv-cache-dtype", "cache-type-k", "cache-type-v"), _DTYPE_OF_KV),
    **dict.fromkeys(("quantization", "quant", "load-in-8bit"), _QUANTIZED),
    **dict.fromkeys(("guided-decoding-backend", "grammar-backend", "structured-outputs-config"), _GRAMMARS),
    **dict.fromkeys(("task", "runner", "convert", "is-embedding", "embedding", "limit-mm-per-prompt", "enable-multimodal", "mmproj"), _TEXT_ONLY),
    **dict.fromkeys(("enable-lora", "lora-modules", "lora-paths", "max-loras", "max-lora-rank", "lora"), _NO_LORA),
    **dict.fromkeys(
        ("speculative-config", "speculative-model", "num-speculative-tokens", "speculative-algorithm", "draft-model",
         "speculative-num-steps", "speculative-draft-model-path"), _NO_DRAFTS),
    **dict.fromkeys(("trust-remote-code",), _NO_CODE),
    **dict.fromkeys(("swap-space", "cpu-offload-gb", "n-gpu-layers", "gpu-layers"), _NO_OFFLOAD),
    **dict.fromkeys(("download-dir", "revision", "hf-repo", "hf-token", "code-revision"), _FOLDER),
    **dict.fromkeys(("hf-overrides", "rope-scaling", "rope-theta", "json-model-override-args"), _CONFIG_JSON),
    **dict.fromkeys(("generation-config", "override-generation-config", "temp", "temperature", "top-p", "max-tokens"), _DEFAULTS),
    **dict.fromkeys(
        ("enforce-eager", "disable-cuda-graph", "cuda-graph-max-bs", "cuda-graph-sizes", "compilation-config", "attention-backend",
         "enable-torch-compile", "flash-attn"), _GRAPHS),
    **dict.fromkeys(("disable-log-requests", "enable-log-requests", "disable-log-stats", "log-requests"), _REQUESTS_NOT_LOGGED),
    **dict.fromkeys(("root-path", "api-prefix"), _PATH),
}  # fmt: skip
"""By the flag's name without dashes before it: a flag of ours, or a sentence."""

_COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("start", "run", "launch", "server", "launch_server", "launch-server", "api_server", "daemon"), "up"),
    **dict.fromkeys(("complete", "completion", "completions", "gen", "prompt"), "generate"),
    **dict.fromkeys(("talk", "ask", "repl", "interactive"), "chat"),
    **dict.fromkeys(("sim", "replay"), "simulate"),
    **dict.fromkeys(("stop", "down", "kill", "restart"), "`rorqual up` runs in the foreground: Ctrl-C or SIGTERM ends it"),
    **dict.fromkeys(("status", "ps", "health"), "a running server answers GET /health"),
    **dict.fromkeys(("list", "ls", "models"), "a running server answers GET /v1/models"),
    **dict.fromkeys(("logs", "log"), "`rorqual up` says where its processes' logs are"),
    **dict.fromkeys(("pull", "download", "get"), _FOLDER),
    **dict.fromkeys(("bench", "benchmark"), "`make bench-cpu` and `make bench-gpu` measure"),
    **dict.fromkeys(("version",), "`rorqual --version` shows it"),
    **dict.fromkeys(("help",), "`rorqual --help` shows the commands"),
    **dict.fromkeys(("install", "setup"), "`make setup` installs"),
}  # fmt: skip


def of_flag(name: str, valid: Iterable[str]) -> str:
    """The end of a refusal of the flag, variable or key `name`: "; did you mean X?", "; X", or nothing.

    `valid`: the names that are there, written as `name` is (--max-model-len, RORQUAL_MAX_MODEL_LEN, max_model_len).
    """
    valid = list(valid)
    bare = name.removeprefix("RORQUAL_").lstrip("-").lower().replace("_", "-")
    found = _FLAGS.get(bare) or _FLAGS.get(bare.removeprefix("no-"), "")
    if not found.startswith("--"):
        return f"; {found}" if found else nearest(name, valid)
    meant = next((v for v in valid if _spelled_as_flag(v) == found), "")
    # A process's own flags: another process may have it.
    return f"; here that is {meant}" if meant else f"; {found} is what comes nearest, which this process does not have"


def of_command(name: str, valid: Iterable[str]) -> str:
    """The same for a command."""
    if "/" in name:
        return f"; to serve a checkpoint: `rorqual up --model {name}`"
    found = _COMMANDS.get(name.lower(), "")
    if found:
        return f"; did you mean {found}?" if found.isalpha() else f"; {found}"
    return nearest(name, valid)


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of a refusal: "; did you mean X?" of what is spelled alike, or nothing where no name is near."""
    valid = list(valid)
    matches = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    matches = matches or [other for other in valid if _is_slip(name, other)]
    return f"; did you mean {matches[0]}?" if matches else ""


def _is_slip(name: str, other: str) -> bool:
    """Two neighbouring letters in the wrong order: for short words no ratio shows that."""
    return len(name) == len(other) and any(
        name[:i] + name[i + 1] + name[i] + name[i + 2 :] == other for i in range(len(name) - 1)
    )


def _spelled_as_flag(name: str) -> str:
    return f"--{name.removeprefix('RORQUAL_').lstrip('-').lower().replace('_', '-')}"
