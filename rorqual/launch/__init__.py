"""Starts the processes of a stack on this machine, watches them, and ends them: for the command and for `LLM`.

Applications are run (`python -m services.scheduler`), never imported, so this needs a checkout.
"""

from .logs import LogDir
from .plan import ProcessSpec, StackPlan, checkout_root, make_plan, module_command, stack_settings
from .stack import Event, Stack, StackError

__all__ = [
    "Event",
    "LogDir",
    "ProcessSpec",
    "Stack",
    "StackError",
    "StackPlan",
    "checkout_root",
    "make_plan",
    "module_command",
    "stack_settings",
]
