"""The OpenAPI document and its page: as the structs are, and complete."""

from __future__ import annotations

import asyncio
import html.parser
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from gateway.app import Gateway
from gateway.openapi import document, page
from gateway.route import Route
from rorqual.core.config import GatewayConfig
from rorqual.telemetry import Telemetry


@pytest.fixture
def routes() -> dict[str, Route]:
    async def make() -> dict[str, Route]:
        config = GatewayConfig()
        telemetry = Telemetry("gateway", config.telemetry)
        gateway = Gateway(config, telemetry)
        await gateway.stop()
        telemetry.shutdown()
        return gateway._routes

    return asyncio.run(make())


def test_every_body_is_described_by_the_struct_that_validates_it(routes: dict[str, Route]) -> None:
    spec = document(routes)
    assert set(spec["paths"]) == set(routes)
    components = spec["components"]["schemas"]
    num_bodies = 0
    for path, route in routes.items():
        operation = spec["paths"][path][route.method.lower()]
        if route.reader is None:
            assert "requestBody" not in operation
            continue
        num_bodies += 1
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        assert set(components[name]["properties"]) == set(route.reader.body_type.__struct_encode_fields__)
        for field in route.reader.rules:
            assert field in operation["description"]
        for code in ("400", "401", "404", "500", "503"):
            assert code in operation["responses"]
    assert num_bodies == 7
    assert components["ChatBody"]["required"] == ["messages"]
    assert components["ChatBody"]["properties"]["temperature"]["anyOf"][0] == {
        "type": "number",
        "minimum": 0,
        "maximum": 2,
    }


def test_every_reference_leads_somewhere(routes: dict[str, Route]) -> None:
    spec = document(routes)
    ids = [o["operationId"] for methods in spec["paths"].values() for o in methods.values()]
    assert len(ids) == len(set(ids))

    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from (v for k, v in node.items() if k == "$ref")
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    known = {f"#/components/schemas/{name}" for name in spec["components"]["schemas"]}
    assert set(references(spec)) <= known
    assert msgspec.json.decode(msgspec.json.encode(spec)) == spec


class Links(html.parser.HTMLParser):
    """The anchors of a page, the links into it, and what it would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            if name == "href":
                self.links.add(value or "")
            if name == "src" or tag in ("script", "link", "img", "iframe"):
                self.loads.append(tag)


def test_the_page_shows_all_and_loads_nothing(routes: dict[str, Route]) -> None:
    text = page(document(routes))
    links = Links()
    links.feed(text)
    assert not links.loads
    assert {link[1:] for link in links.links if link.startswith("#")} <= links.ids
    assert links.links - {f"#{name}" for name in links.ids} == {"/openapi.json"}
    for path, route in routes.items():
        assert path in text
        for field in route.reader.body_type.__struct_encode_fields__ if route.reader else ():
            assert f"<code>{field}</code>" in text
