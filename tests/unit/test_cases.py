"""Every promise of tests/cases.toml has tests, and they are there and run."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CASES: dict[str, dict[str, list[str]]] = tomllib.loads((TESTS / "cases.toml").read_text(encoding="utf-8"))


@cache
def decorators_of(file: str) -> dict[str, list[str]]:
    """The tests of a file, methods too, with their decorators."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse((TESTS / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            found[node.name] = [ast.unparse(decorator) for decorator in node.decorator_list]
    return found


@pytest.mark.parametrize("case", CASES)
def test_each_promise_is_kept_by_a_test_that_runs(case: str) -> None:
    assert CASES[case]
    for promise, names in CASES[case].items():
        assert names, f"{case}: {promise}: no test"
        for name in names:
            file, _, test = name.partition("::")
            decorators = decorators_of(file).get(test)
            assert decorators is not None, f"{case}: {promise}: {name} is not there"
            assert not any("skip" in decorator or "xfail" in decorator for decorator in decorators), name


def test_no_case_is_lost() -> None:
    kinds = {case.split("-")[0] for case in CASES}
    assert kinds == {"api", "fmt", "ckpt", "sched", "num", "ops"}
    assert len(CASES) >= 43
    assert sum(map(len, CASES.values())) >= 198
