"""What the executor's end of the link fails with."""

from __future__ import annotations

from rorqual.core.errors import PreconditionError


class OrderError(PreconditionError):
    """An order that cannot be obeyed. It ends the link: nothing is ever skipped."""

    reason = "INVALID_ORDER"
