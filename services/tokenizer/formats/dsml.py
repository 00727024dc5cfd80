"""The formats of V3.2 and V4, which have no template but an encoder: calls in DSML, thinking by a switch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rorqual.core.errors import InvalidRequestError

from ..conversation import Conversation
from .base import CallShape, ChatFormat, PromptWriter, Thinking, content_of, functions_of, refuse_message, to_json
from .call_grammar import CallableTool, GrammarWriter
from .dsml_calls import DsmlCalls
from .dsml_grammar import DsmlParameters
from .marks import ASSISTANT, BOS, DSML, END_THINK, EOS, LATEST_REMINDER, SYSTEM, THINK, USER, Marks

_V32_TOOLS = f"""## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}function_calls>" block like the following as part of your reply to the user:
<{DSML}function_calls>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:

<{DSML}function_calls>
...
</{DSML}function_calls>

<function_results>
...
</function_results>

{THINK}...thinking about results{END_THINK}

Here are the functions available in JSONSchema format:
<functions>
[SCHEMAS]
</functions>
"""

_V4_TOOLS = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{DSML}[BLOCK]>" block like the following:

<{DSML}[BLOCK]>
<{DSML}[_]invoke name="$TOOL_NAME">
<{DSML}[_]parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}[_]parameter>
...
</{DSML}[_]invoke>
<{DSML}[_]invoke name="$TOOL_NAME2">
...
</{DSML}[_]invoke>
</{DSML}[BLOCK]>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside {THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

[SCHEMAS]

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

_THOROUGH = """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""

_RELENTLESS = """Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption remains unchecked and no error remains undiscovered.

"""

_ANSWER_SCHEMA = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
_ANSWER_JSON = (
    "You are a helpful assistant designed to output JSON.\n## Response Format:\n\nReply with JSON object ONLY."
)

_TASKS = ("action", "query", "authority", "domain", "title", "read_url")


@dataclass(frozen=True, kw_only=True)
class _DsmlFormat(ChatFormat):
    """What V3.2 and V4 have in common."""

    name: str
    thinking: Thinking = Thinking.SWITCH
    block: str
    prefix: str = ""  # before the names of the inner tags
    empty_line: bool = True  # in a call without parameters
    tools_text: str
    json_text: str = ""  # what asks for any JSON object

    @property
    def shape(self) -> CallShape:  # type: ignore[override]
        tag, prefix = f"<{DSML}", self.prefix
        return CallShape(
            begin=f'\n\n{tag}{self.block}>\n{tag}{prefix}invoke name="',
            after_name='">\n',
            end_call=f"</{DSML}{prefix}invoke>\n",
            between=f'{tag}{prefix}invoke name="',
            end=f"</{DSML}{self.block}>",
        )

    def calls(self, marks: Marks) -> DsmlCalls:
        return DsmlCalls(marks(DSML), self.block, self.prefix)

    def arguments(self, tool: CallableTool, out: GrammarWriter) -> str:
        inner = f"{DSML}{self.prefix}parameter"
        return DsmlParameters(f'<{inner} name="', f"</{inner}>", "\n" if self.empty_line else "").write(tool, out)

    def _write_tools(self, chat: Conversation, out: PromptWriter) -> None:
        before, _, after = (
            self.tools_text.replace("[BLOCK]", self.block).replace("[_]", self.prefix).partition("[SCHEMAS]")
        )
        out.literal(before)
        out.text("\n".join(map(to_json, functions_of(chat.tools))))
        out.literal(after)

    def _write_system(self, chat: Conversation, message: Mapping[str, Any], out: PromptWriter) -> None:
        """A system text, and what hangs on it."""
        out.text(content_of(message))
        if not message.get("is_first"):
            return
        if chat.tools:
            out.text("\n\n")
            self._write_tools(chat, out)
        if asked := self._answer_format(chat):
            out.text(f"\n\n{asked}")

    def _answer_format(self, chat: Conversation) -> str:
        """The text that asks for an answer in JSON; empty where nothing is asked."""
        if chat.answer_schema is not None:
            return f"{_ANSWER_SCHEMA}{to_json(chat.answer_schema)}"
        return self.json_text if chat.wants_json else ""

    def _hung(self, chat: Conversation, *, system_first: bool = False) -> list[dict[str, Any]]:
        """The messages as the encoders take them: tools, and the answer's format, hang on a system message at the front,
        an empty one if need be.

        A developer's messages are the system's: the encoders' own role of that name is meant for search alone.
        `system_first`: all system texts are joined at the front.
        """
        messages = [{**m, "role": "system" if m["role"] == "developer" else m["role"]} for m in chat.messages]
        system = [content_of(message) for message in messages if message["role"] == "system"]
        if system_first and system:
            others = (message for message in messages if message["role"] != "system")
            messages = [{"role": "system", "content": "\n\n".join(system)}, *others]
        if chat.tools or self._answer_format(chat):
            if messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": ""})
            messages[0]["is_first"] = True
        return messages

    def _write_calls(self, message: Mapping[str, Any], out: PromptWriter) -> None:
        calls = message.get("tool_calls") or ()
        if not calls:
            return
        tag, close = f"<{DSML}{self.prefix}", f"</{DSML}{self.prefix}"
        out.literal(f"\n\n<{DSML}{self.block}>\n")
        for call in calls:
            out.literal(f'{tag}invoke name="')
            out.text(f'{call["function"]["name"]}">\n')
            parameters = _parameters(call["function"]["arguments"])
            for number, (key, value) in enumerate(parameters.items()):
                out.text("\n" if number else "")
                out.literal(f'{tag}parameter name="')
                if isinstance(value, str):
                    out.text(f'{key}" string="true">{value}')
                else:
                    out.text(f'{key}" string="false">{to_json(value)}')
                out.literal(f"{close}parameter>")
            out.text("\n" if parameters or self.empty_line else "")
            out.literal(f"{close}invoke>\n")
        out.literal(f"</{DSML}{self.block}>")


def _parameters(arguments: str) -> dict[str, Any]:
    """The members of a JSON object; what is none becomes one parameter called `arguments`, unchanged."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _last_user(messages: Sequence[Mapping[str, Any]]) -> int:
    """The index of the last user turn; -1 without one."""
    return max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)


@dataclass(frozen=True, kw_only=True)
class V32(_DsmlFormat):
    """V3.2. Everything stands in place; of earlier answers only what follows the last user turn keeps its reasoning."""

    name: str = "deepseek-v3.2"
    block: str = "function_calls"
    tools_text: str = _V32_TOOLS

    def render(self, chat: Conversation, out: PromptWriter) -> None:
        thinks = bool(chat.thinking)
        messages = self._hung(chat)
        shift = len(messages) - len(chat.messages)
        last_user, last = _last_user(messages), len(messages) - 1
        results_due = results = 0  # of the calls that come last
        out.mark(BOS)
        for index, message in enumerate(messages):
            role, content = message["role"], content_of(message)
            if role != "tool":
                results_due = results = 0
            if role == "system":
                self._write_system(chat, message, out)
            elif role == "user":
                out.mark(USER)
                out.text(content)
                if chat.add_generation_prompt or index < last:
                    out.mark(ASSISTANT)
                    out.mark(THINK if thinks and index == last_user else END_THINK)
            elif role == "assistant":
                results_due = len(message.get("tool_calls") or ())
                continued = chat.continue_final_message and index == last
                if thinks and index > last_user:
                    out.text(message.get("reasoning_content") or "")
                    if content or not continued:
                        out.mark(END_THINK)
                out.text(content)
                self._write_calls(message, out)
                if not continued:
                    out.mark(EOS)
            elif role == "tool":
                results += 1
                if results > results_due:
                    raise refuse_message(index - shift, "there are more results than calls")
                if results == 1:
                    out.text("\n\n<function_results>")
                out.text(f"\n<result>{content}</result>")
                if results == results_due:
                    out.text("\n</function_results>")
                    if chat.add_generation_prompt or index < last:
                        out.text("\n\n")
                        out.mark(THINK if thinks and index >= last_user else END_THINK)
            else:
                raise refuse_message(index - shift, f"the chat format {self.name} has no role {role!r}")


@dataclass(frozen=True, kw_only=True)
class V4(_DsmlFormat):
    """V4 and V4.1. Results are part of a user turn; with tools, no reasoning is dropped.

    The template variables `drop_thinking` (default true, and false where there are tools) and `task` (a quick task
    of the last user turn: action, query, authority, domain, title or read_url) are those of the first encoder.
    """

    name: str = "deepseek-v4"
    block: str = "tool_calls"
    tools_text: str = _V4_TOOLS
    efforts: Mapping[str, str]  # the text that asks for an effort, by its name
    default_effort: str = ""
    system_mark: str = ""  # before a system text
    system_first: bool = False  # system texts are joined at the front, else they stand in place
    mark_answers: bool = True  # the assistant's token belongs to its answer, else to the user turn before it

    def render(self, chat: Conversation, out: PromptWriter) -> None:
        thinks = bool(chat.thinking)
        keep = bool(chat.tools) or chat.variables.get("drop_thinking") is False
        turns = _merged(self._hung(chat, system_first=self.system_first))
        last_user, last = _last_user(turns), len(turns) - 1
        task = self._task(chat, last_user)

        def begin_answer(index: int) -> None:
            """Before the turn of this index, or of the prompt's end."""
            out.mark(ASSISTANT)
            out.mark(THINK if thinks and (keep or index > last_user) else END_THINK)

        def ends_prompt(index: int) -> bool:
            return index == last and chat.add_generation_prompt

        out.mark(BOS)
        usual = self.efforts.get(self.default_effort, "")
        effort = self.efforts.get(chat.reasoning_effort, usual) if thinks else ""
        if turns[0]["role"] != "system":
            if effort and self.system_mark:
                out.mark(self.system_mark)
            out.text(effort)
        for index, turn in enumerate(turns):
            role, content = turn["role"], content_of(turn)
            if role == "system":
                if self.system_mark:
                    out.mark(self.system_mark)
                out.text(effort if index == 0 else "")
                self._write_system(chat, turn, out)
            elif role == "assistant":
                continued = chat.continue_final_message and index == last
                after_task = task and index == last_user + 1
                if self.mark_answers and not after_task:
                    begin_answer(index)
                if thinks and not after_task and (keep or index > last_user):
                    out.text(turn.get("reasoning_content") or "")
                    if content or not continued:
                        out.mark(END_THINK)
                out.text(content)
                self._write_calls(turn, out)
                if not continued:
                    out.mark(EOS)
            else:
                out.mark(USER if role == "user" else LATEST_REMINDER)
                out.text(content)
            if task and index == last_user:
                if task == "action":
                    begin_answer(index + 1)
                out.mark(f"<｜{task}｜>")
            elif self.mark_answers:
                if ends_prompt(index):
                    begin_answer(index + 1)
            elif role == "user" and (
                ends_prompt(index) or (index < last and turns[index + 1]["role"] in ("assistant", "latest_reminder"))
            ):
                begin_answer(index + 1)

    def _task(self, chat: Conversation, last_user: int) -> str:
        task = chat.variables.get("task") or ""
        if task and (task not in _TASKS or last_user < 0):
            raise InvalidRequestError(
                f"chat_template_kwargs: task must be one of {', '.join(_TASKS)}, with a user message, got {task!r}",
                reason="INVALID_MESSAGES",
                field="chat_template_kwargs",
            )
        return str(task)


def _merged(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turns: user messages and results that follow each other become one, its parts joined by an empty line.

    Results stand in the order of the calls of the answer before them, by their ids.
    """
    turns: list[dict[str, Any]] = []
    order: dict[str, int] = {}  # of the latest calls, by id
    parts: list[str] = []
    results: list[tuple[int, int]] = []  # place in `parts`, place in `order`

    def close() -> None:
        places = [place for place, _ in results]
        texts = [parts[place] for place, _ in sorted(results, key=lambda result: result[1])]
        for place, text in zip(places, texts, strict=True):
            parts[place] = text
        turns.append({"role": "user", "content": "\n\n".join(parts)})
        parts.clear()
        results.clear()

    for message in messages:
        role = message["role"]
        if role == "user":
            parts.append(content_of(message))
            continue
        if role == "tool":
            results.append((len(parts), order.get(message.get("tool_call_id", ""), 0)))
            parts.append(f"<tool_result>{content_of(message)}</tool_result>")
            continue
        if parts:
            close()
        if role == "assistant" and message.get("tool_calls"):
            order = {call["id"]: n for n, call in enumerate(message["tool_calls"]) if call.get("id")}
        turns.append(dict(message))
    if parts:
        close()
    return turns


def v4() -> V4:
    """As the encoder that came with the first checkpoints writes it."""
    return V4(efforts={"max": _THOROUGH}, mark_answers=False)


def v4_pro() -> V4:
    """As DeepSeek's own library writes it: other efforts."""
    efforts = {"medium": _THOROUGH, "high": _THOROUGH, "xhigh": _THOROUGH, "max": _RELENTLESS}
    return V4(name="deepseek-v4-pro", efforts=efforts, empty_line=False, system_first=True, json_text=_ANSWER_JSON)


def v41() -> V4:
    budgets = {"minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "max": 100}
    efforts = {
        effort: f"Reasoning Effort: {budget} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
        for effort, budget in budgets.items()
    }
    return V4(
        name="deepseek-v4.1",
        block=" calls",
        prefix=" ",
        efforts=efforts,
        default_effort="high",
        system_mark=SYSTEM,
        json_text=f'{_ANSWER_SCHEMA}{{"type": "json_object"}}',
    )
