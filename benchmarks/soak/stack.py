"""A stack to load: the embedded model, or a shape with random weights and a made-up tokenizer."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.serving.bench_gpu import GPU_SETTINGS, SHAPE, model_folder
from rorqual.launch import Stack, make_plan
from rorqual.launch.stack import Event

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
"""For a shape without one: its vocabulary has no words for roles."""


@contextlib.contextmanager
def serve(
    given: Mapping[str, Any],
    *,
    gpu: bool = False,
    model: Path | None = None,
    log_dir: Path | None = None,
    on_event: Callable[[Event], None] | None = None,
    timeout_s: float = 240.0,
) -> Iterator[Stack]:
    """The stack, ready; ended with the block, however that ends. Raises StackError where it does not start.

    `given`: settings, which win over the defaults. `gpu`: DeepSeek-V2-Lite's shape in place of the embedded model.
    """
    settings: dict[str, Any] = {"port": 0, "log_level": "info"}
    if gpu:
        settings |= {**GPU_SETTINGS, "max_model_len": 8192}
    shape = model or (SHAPE if gpu else TINY)
    with model_folder(shape) as (folder, words), tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        if words:
            template = Path(scratch) / "chat_template.jinja"
            template.write_text(CHAT_TEMPLATE)
            settings["chat_template"] = template
        stack = Stack(make_plan({**settings, **given, "model": folder}), log_dir=log_dir, on_event=on_event)
        try:
            stack.start(timeout_s)
            print(f"ready at {stack.url}; logs are in {stack.log_dir}", file=sys.stderr, flush=True)
            yield stack
        finally:
            stack.stop()
