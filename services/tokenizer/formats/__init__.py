"""What a model's text means beyond plain text: reasoning now; tool calls and each family's layout have their place here."""

from __future__ import annotations

import re

# Tool and DSML tokens are not among these: until a parser reads tool calls, their text is content.
_TURN_MARKS = re.compile(
    r"<｜(User|Assistant|begin▁of▁sentence|end▁of▁sentence|▁pad▁|fim▁(hole|begin|end)|begin▁sys|end▁sys"
    r"|latest_reminder|place▁holder▁no▁\d+)｜>|<\|EOT\|>"
)


def is_hidden_in_chat(token: str) -> bool:
    """Whether an added token is a mark of the conversation, which never reaches a chat's content.

    Vocabularies of the family flag most of these `special: false`, so that flag alone does not hide them.
    """
    return _TURN_MARKS.fullmatch(token) is not None
