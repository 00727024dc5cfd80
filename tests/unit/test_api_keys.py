"""Keys from flags and files, and the tenants that they belong to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.failures import HttpError
from gateway.keys import KeyRing
from rorqual.core.api_keys import ApiKey, read_api_keys
from rorqual.core.errors import ConfigError


def test_keys_of_flags_and_file_stand_side_by_side(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who may ask\n\nsk-1\n  sk-2   red \nsk-3\tred\nfla#g\n", encoding="utf-8")
    keys = read_api_keys(("flag",), str(file))
    assert [(k.key, k.tenant) for k in keys] == [
        ("flag", "flag"),
        ("sk-1", "sk-1"),
        ("sk-2", "red"),
        ("sk-3", "red"),
        ("fla#g", "fla#g"),
    ]
    assert read_api_keys(()) == ()


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbfsk-1\n")
    assert [key.key for key in read_api_keys((), str(tmp_path / "keys"))] == ["sk-1"]


def test_a_key_may_have_a_priority_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a best-priority=-10\nb red best-priority=5\nc red\nbest-priority=3\n", encoding="utf-8")
    assert [(k.key, k.tenant, k.best_priority) for k in read_api_keys((), str(file))] == [
        ("a", "a", -10),
        ("b", "red", 5),
        ("c", "red", None),
        ("best-priority=3", "best-priority=3", None),
    ]


def test_keys_of_one_tenant_share_a_salt_that_tells_nothing() -> None:
    one, two, other = ApiKey("sk-2", "red"), ApiKey("sk-3", "red"), ApiKey("sk-4", "blue")
    assert one.cache_salt == two.cache_salt != other.cache_salt
    assert re.fullmatch(r"[0-9a-f]{32}", one.cache_salt)
    assert "sk-2" not in repr(one)
    assert "red" not in repr(one)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no key"),
        ("# none\n", "holds no key"),
        ("ok\na b c\n", "line 2"),
        ("kéy\n", "line 1"),
        ("a red\na blue\n", "line 2"),
        ("a red best-priority=1\na red best-priority=2\n", "line 2"),
        ("a best-priority=x\n", "line 1: best-priority is a whole number, -2147483648 to 2147483647"),
        ("a best-priority=\n", "line 1"),
        ("a best-priority=--1\n", "line 1"),
        ("a best-priority=2147483648\n", "line 1"),
        ("a best-priority=²\n", "line 1"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_without_showing_it(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=why) as caught:
        read_api_keys((), str(file))
    assert str(file) in caught.value.message
    assert "é" not in caught.value.message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_api_keys((), str(tmp_path / "nowhere"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_api_keys((), str(tmp_path / "bytes"))


def test_a_request_finds_its_tenant() -> None:
    red, blue = ApiKey("sk-1", "red"), ApiKey("sk-2", "blue")
    ring = KeyRing([red, blue, ApiKey("sk-3", "red")])
    assert ring.find({"authorization": "Bearer sk-2"}) == blue
    assert ring.find({"authorization": "bearer  sk-3 "}).tenant == "red"
    assert ring.find({"x-api-key": "sk-1"}) == red
    for headers in ({}, {"authorization": "Basic sk-1"}, {"x-api-key": "sk"}, {"authorization": "Bearer "}):
        with pytest.raises(HttpError) as caught:
            ring.find(headers)
        assert caught.value.failure.status == 401
