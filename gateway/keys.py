"""Who asks: the key of a request, which says whose it is and what it may ask for."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from rorqual.core.api_keys import ApiKey

from .failures import bad_key


class KeyRing:
    """The keys that are taken. Without any, everybody is let in and nobody has a tenant."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._rows = [(_digest(entry.key), entry) for entry in keys]

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, headers: Mapping[str, str]) -> ApiKey:
        """The key that `headers` carry. Raises HttpError 401 where they carry none of ours.

        It is a Bearer, or x-api-key as Anthropic's clients send it. All keys are compared, whichever fits, and by
        digest: time tells neither which one was near nor how long it is.
        """
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
        digest = _digest(given)
        found: ApiKey | None = None
        for ours, entry in self._rows:
            if hmac.compare_digest(digest, ours):
                found = entry
        if found is None:
            raise bad_key(bool(given))
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()
