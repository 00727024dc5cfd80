"""Which added tokens of a vocabulary are control tokens, by their spelling."""

from __future__ import annotations

import re

_CONTROL_TOKEN = re.compile(r"<[｜|][^<>]*[｜|]>|｜DSML｜|</?think>")


def is_control_token(token: str) -> bool:
    """Whether an added token has the look of a control token of the family's chat formats, which is never text.

    Vocabularies of the family flag most of these `special: false`, so that the flag alone does not tell.
    """
    return _CONTROL_TOKEN.fullmatch(token) is not None
