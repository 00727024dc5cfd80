"""Where a model's text begins: inside its reasoning, after it, or before it is known."""

from __future__ import annotations

from enum import Enum


class Start(Enum):
    """Where the model's text begins, from the end of the prompt."""

    UNDECIDED = "undecided"  # the model may open the reasoning itself
    REASONING = "reasoning"  # the prompt opened it
    REASONING_CONTINUED = "reasoning continued"  # and already holds some of it
    CONTENT = "content"  # the prompt closed it
    CONTENT_CONTINUED = "content continued"  # and already holds some content


def start_of(
    last_control_id: int | None, open_id: int | None, close_id: int | None, *, text_follows: bool, continued: bool
) -> Start:
    """The start that the prompt's last control token decides; `text_follows` says that more than blanks comes after it.

    Only control tokens are looked at, so a tag that a message spells changes nothing. `continued`: the prompt ends
    inside the assistant's message.
    """
    if last_control_id is not None and last_control_id == open_id:
        return Start.REASONING_CONTINUED if text_follows else Start.REASONING
    if last_control_id is not None and last_control_id == close_id:
        return Start.CONTENT_CONTINUED if text_follows else Start.CONTENT
    return Start.CONTENT_CONTINUED if continued else Start.UNDECIDED
