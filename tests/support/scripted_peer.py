"""A server of another engine, as far as a benchmark's client sees it: `python -m tests.support.scripted_peer PORT [FAULT]`.

Its tokenizer puts one token before the prompt's words. FAULT: `miscounts` reports one prompt token too few, `stays`
ignores SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Any

MODEL = "folder/of/weights"


def num_prompt_tokens(body: dict[str, Any]) -> int:
    return len(body["prompt"].split()) + body.get("add_special_tokens", True)


def events(body: dict[str, Any], fault: str) -> list[dict[str, Any]]:
    """The chunks of a completion: one a token, then the reason, then the usage."""
    choices: list[list[dict[str, Any]]] = [[{"index": 0, "text": " t", "finish_reason": None}]] * body["max_tokens"]
    choices = [*choices, [{"index": 0, "text": "", "finish_reason": "length"}], []]
    prompt = num_prompt_tokens(body) - (fault == "miscounts")
    usage = {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"]}
    return [{"choices": choice, "usage": None if choice else usage} for choice in choices]


def answer(method: str, path: str, body: dict[str, Any]) -> Any:
    if (method, path) == ("GET", "/health"):
        return {}
    if (method, path) == ("GET", "/v1/models"):
        return {"data": [{"id": MODEL, "owned_by": "peerless"}]}
    if (method, path) == ("GET", "/version"):
        return {"version": "1.2"}
    if (method, path) == ("POST", "/tokenize"):
        return {"tokens": [7] * num_prompt_tokens(body)}
    return None


async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: str) -> bool:
    """One request of a connection; whether there may be another."""
    line = (await reader.readline()).decode().split()
    if not line:
        return False
    headers = {}
    while (header := (await reader.readline()).decode().strip()) != "":
        name, _, value = header.partition(":")
        headers[name.lower()] = value.strip()
    text = await reader.readexactly(int(headers.get("content-length", 0)))
    body = json.loads(text or b"{}")
    if line[1] == "/v1/completions" and body.get("model") == MODEL:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in [*(json.dumps(e, separators=(",", ":")) for e in events(body, fault)), "[DONE]"]:
            data = f"data: {event}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
    else:
        found = answer(line[0], line[1], body)
        data = json.dumps(found).encode()
        status = b"200 OK" if found is not None else b"404 Not Found"
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(data), data))
    await writer.drain()
    return headers.get("connection", "") != "close"


async def main(port: int, fault: str) -> None:
    if fault == "stays":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await serve_one(reader, writer, fault):
            pass
        writer.close()

    print("listening", port, flush=True)
    async with await asyncio.start_server(handle, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), "".join(sys.argv[2:])))
