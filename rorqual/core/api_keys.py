"""API keys and the tenants that they belong to."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .errors import ConfigError
from .limits import REQUEST

PRIORITY = REQUEST["priority"]
_BEST_PRIORITY = "best-priority="

KEY_PATTERN = re.compile(r"[!-~]+")
"""A key is printable ASCII without blanks: it has to fit into an HTTP header."""

MAX_FILE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key that clients may send."""

    key: str = field(repr=False)
    tenant: str = field(repr=False)  # whose prompts it sends; a key without a name is a tenant of its own
    best_priority: int | None = None  # the lowest number that it may ask for; None: what every client may

    @property
    def cache_salt(self) -> str:
        """What the tenant's cached prefixes are kept apart by. It tells nothing of the key."""
        return hashlib.blake2b(self.tenant.encode(), digest_size=16, person=b"rorqual-tenant").hexdigest()


def read_api_keys(keys: Iterable[str], file: str = "") -> tuple[ApiKey, ...]:
    """The keys given one by one, and those of `file`: `KEY [TENANT] [best-priority=N]` a line; `#` begins a comment's line.

    Raises ConfigError where the file cannot be read, holds no key or a malformed line, or says two things of a key.
    """
    found = {key: ApiKey(key, key) for key in keys}
    if not file:
        return tuple(found.values())
    num_in_file = 0
    for number, line in enumerate(_read(file).splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        num_in_file += 1
        # The line is named, never shown: it holds a secret.
        best = None
        if len(words) > 1 and words[-1].startswith(_BEST_PRIORITY):
            best = _priority(words.pop().removeprefix(_BEST_PRIORITY))
            if best is None:
                raise _fault(file, f"line {number}: best-priority is a whole number, {PRIORITY.rule}")
        if len(words) > 2 or not KEY_PATTERN.fullmatch(words[0]):
            raise _fault(file, f"line {number} is not 'KEY [TENANT] [best-priority=N]' (keys are printable ASCII)")
        entry = ApiKey(words[0], words[-1], best)
        if found.setdefault(entry.key, entry) != entry:
            raise _fault(file, f"line {number} gives a key that was given before another tenant or priority")
    if num_in_file == 0:
        raise _fault(file, "it holds no key, and serving without one is not what it was named for")
    return tuple(found.values())


def _priority(text: str) -> int | None:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 10 and PRIORITY.admits(int(text))):
        return None
    return int(text)


def _read(file: str) -> str:
    path = Path(file)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _fault(file, f"it is larger than {MAX_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise _fault(file, error.strerror or "it cannot be read") from None
    except UnicodeDecodeError:
        raise _fault(file, "it is not UTF-8 text") from None


def _fault(file: str, why: str) -> ConfigError:
    return ConfigError(f"--api-key-file {file}: {why}", field="api_key_file")
