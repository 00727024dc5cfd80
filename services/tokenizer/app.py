"""The process: parts put together, started and stopped in order."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import grpc
from opentelemetry.sdk.trace.export import SpanExporter

from rorqual.core.clock import Clock, SystemClock
from rorqual.core.config import TokenizerConfig
from rorqual.core.garbage import give_back_memory
from rorqual.rpc.channel import open_channel
from rorqual.rpc.server import RpcServer
from rorqual.telemetry import Telemetry
from rorqual.v1 import text_pb2_grpc

from .checkpoint import read_checkpoint
from .engine import TextEngine
from .grammars import Grammars
from .link import SchedulerLink
from .model_watch import ModelWatch
from .prompt import PromptBuilder
from .server import TextServicer
from .vocabulary import Vocabulary

SERVICE_NAME = "rorqual.v1.TextService"
_EMBEDDED_MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"


class TokenizerApp:
    """One tokenizer process. Two of them in one interpreter share nothing."""

    def __init__(
        self, config: TokenizerConfig, *, clock: Clock | None = None, span_exporter: SpanExporter | None = None
    ) -> None:
        """Reads the checkpoint: CheckpointError where it cannot be served."""
        self._config = config
        self._clock = clock or SystemClock()
        folder = Path(config.model) if config.model else _EMBEDDED_MODEL
        self._checkpoint = read_checkpoint(folder, chat_template_file=config.chat_template)
        self._vocabulary = Vocabulary(self._checkpoint)
        self._grammars = Grammars(
            folder, max(self._checkpoint.vocab_size, self._vocabulary.size), self._vocabulary.control.ids
        )
        self._builder = PromptBuilder(
            self._checkpoint,
            self._vocabulary,
            chat_format=config.chat_format if config.chat_format != "auto" else "",
        )
        self._telemetry = Telemetry("tokenizer", config.telemetry, exporter=span_exporter)
        self._name = config.served_model_name or folder.resolve().name
        self._server: RpcServer | None = None
        self._giving_back: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None

    @property
    def telemetry(self) -> Telemetry:
        return self._telemetry

    async def start(self) -> int:
        """Serve; returns the port. Health says SERVING once the scheduler shows a model."""
        self._grammars.start()
        self._channel = open_channel(self._config.scheduler)
        self._link = SchedulerLink(
            self._channel,
            peer_timeout_s=self._config.peer_timeout_s,
            clock=self._clock,
        )
        self._watch = ModelWatch(
            self._channel,
            tokenizer_size=self._vocabulary.size,
            checkpoint_vocab_size=self._checkpoint.vocab_size,
            on_change=self._set_serving,
        )
        self._engine = TextEngine(
            checkpoint=self._checkpoint,
            vocabulary=self._vocabulary,
            builder=self._builder,
            link=self._link,
            watch=self._watch,
            telemetry=self._telemetry,
            clock=self._clock,
            served_model_name=self._name,
            grammars=self._grammars,
        )
        self._server = RpcServer(
            self._config.listen,
            lambda server: text_pb2_grpc.add_TextServiceServicer_to_server(TextServicer(self._engine), server),
            [SERVICE_NAME],
        )
        port = await self._server.start()
        self._link.start()
        self._watch.start()
        self._giving_back = asyncio.create_task(give_back_memory(lambda: self._link.num_streams == 0))
        threading.Thread(target=self._vocabulary.learn_tokens, name="learn-tokens", daemon=True).start()
        return port

    async def stop(self, grace_s: float = 2.0) -> None:
        """Refuse new calls, give running ones `grace_s`, then end."""
        if self._server is not None:
            if self._giving_back is not None:
                self._giving_back.cancel()
            await self._watch.stop()
            await self._server.stop(grace_s)
            await self._link.stop()
            self._engine.close()
        await self._grammars.stop()
        if self._channel is not None:
            await self._channel.close()
        self._telemetry.shutdown()

    async def _set_serving(self, serving: bool) -> None:
        if self._server is not None:
            await self._server.set_serving(serving)
