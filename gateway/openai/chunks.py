"""Stream chunks from byte templates: what never changes is encoded once, so a chunk encodes its text alone."""

from __future__ import annotations

from typing import Any

import msgspec

from rorqual.core.token_ids import unpack_token_ids

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


class ChunkTemplate:
    """Chunks of one response. `object_name`: "chat.completion.chunk" or "text_completion"."""

    def __init__(
        self,
        *,
        response_id: str,
        object_name: str,
        created: int,
        model: str,
        fingerprint: str | None,
        num_choices: int,
        usage_key: bool,
    ) -> None:
        """`usage_key`: chunks other than the last have a usage of null, as include_usage wants."""
        fixed = {"id": response_id, "object": object_name, "created": created, "model": model}
        self._head = b"data: " + _encode({**fixed, "system_fingerprint": fingerprint})[:-1]
        self._choice_heads = [self._head + b',"choices":[{"index":%d,' % index for index in range(num_choices)]
        self._end = b',"usage":null}\n\n' if usage_key else b"}\n\n"
        self._plain_end = b',"logprobs":null,"finish_reason":null}]' + self._end

    def plain(self, choice_index: int, member: bytes, text: str, close: bytes = b"") -> bytes:
        """The common chunk: `member` (such as b'"text":') with `text`, then `close`; nothing else."""
        return b"".join((self._choice_heads[choice_index], member, _encode(text), close, self._plain_end))

    def full(
        self,
        choice_index: int,
        member: bytes,
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        token_ids: bytes | None = None,
        prompt_token_ids: bytes | None = None,
        top: dict[str, Any] | None = None,
    ) -> bytes:
        """Any chunk. `member`: the choice's encoded delta or text, with its key. Ids: uint32 little-endian.

        `top`: further members of the chunk itself.
        """
        rest: dict[str, Any] = {"logprobs": logprobs, "finish_reason": finish_reason}
        if stop_reason is not None:
            rest["stop_reason"] = stop_reason
        if token_ids is not None:
            rest["token_ids"] = unpack_token_ids(token_ids).tolist()
        if prompt_token_ids is not None:
            rest["prompt_token_ids"] = unpack_token_ids(prompt_token_ids).tolist()
        end = self._end
        if top:
            end = b"," + _encode(top)[1:-1] + (b"}\n\n" if "usage" in top else self._end)
        return b"".join((self._choice_heads[choice_index], member, b",", _encode(rest)[1:], b"]", end))

    def usage(self, usage: Any) -> bytes:
        """The chunk without choices that ends a stream with include_usage."""
        return self._head + b',"choices":[],"usage":' + _encode(usage) + b"}\n\n"
