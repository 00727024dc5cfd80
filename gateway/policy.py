"""What is done with what a dialect knows and this server does not do: one table, for all dialects.

What cannot change the answer, or what a client cannot stop sending, is ignored by name; what the user demanded is refused.
A field that no row and no schema knows is ignored by name, too: it belongs to an API that is newer than this server.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple


class Dialect(enum.Flag):
    """Whose body it is."""

    CHAT = enum.auto()
    COMPLETIONS = enum.auto()
    RESPONSES = enum.auto()
    MESSAGES = enum.auto()
    TOKENIZE = enum.auto()
    DETOKENIZE = enum.auto()
    OPENAI = CHAT | COMPLETIONS | RESPONSES


class Act(enum.Enum):
    """What is done with a value that asks for something."""

    TAKEN = "taken"  # without a word: there is nothing here that it could change
    IGNORED = "ignored"  # named in the answer's header
    REFUSED = "refused"  # a 400 that names it


class Rule(NamedTuple):
    """One row. `name` has a dot or brackets where it stands inside a field; the dialect looks at those itself."""

    name: str
    dialects: Dialect
    act: Act
    harmless: tuple[Any, ...] = ()  # values that ask for nothing; null never does
    cure: str = ""  # of a refusal: what serves the purpose here

    def asks(self, value: Any) -> bool:
        return value is not None and value not in self.harmless


_CHAT, _COMPLETIONS, _RESPONSES, _MESSAGES = Dialect.CHAT, Dialect.COMPLETIONS, Dialect.RESPONSES, Dialect.MESSAGES
_OPENAI, _TOKENIZE = Dialect.OPENAI, Dialect.TOKENIZE
_TAKEN, _IGNORED, _REFUSED = Act.TAKEN, Act.IGNORED, Act.REFUSED

RULES = (
    # Nothing here that they could change: prefixes are cached by themselves, and users are not told apart.
    Rule("metadata", _OPENAI, _TAKEN),
    Rule("prompt_cache_key", _OPENAI, _TAKEN),
    Rule("prompt_cache_options", _OPENAI, _TAKEN),
    Rule("prompt_cache_retention", _OPENAI, _TAKEN),
    Rule("safety_identifier", _OPENAI, _TAKEN),
    Rule("user", _OPENAI, _TAKEN),
    # Hints: how fast, how long, how expensive, by what means. The answer is one that the client could have got anyway.
    Rule("guided_decoding_backend", _OPENAI, _IGNORED),
    Rule("media_io_kwargs", _OPENAI, _IGNORED),
    Rule("mm_processor_kwargs", _OPENAI | _TOKENIZE, _IGNORED),
    Rule("prediction", _OPENAI, _IGNORED),
    Rule("service_tier", _OPENAI | _MESSAGES, _IGNORED, ("auto", "default", "standard_only")),
    Rule("speed", _MESSAGES, _IGNORED, ("standard",)),
    Rule("store", _OPENAI, _IGNORED, (False,)),
    Rule("verbosity", _OPENAI, _IGNORED, ("medium",)),
    Rule("text.verbosity", _RESPONSES, _IGNORED, ("medium",)),
    Rule("reasoning.summary", _RESPONSES, _IGNORED, ("none",)),
    Rule("reasoning.generate_summary", _RESPONSES, _IGNORED, ("none",)),
    Rule("thinking.budget_tokens", _MESSAGES, _IGNORED),
    # Leave to shorten what is kept, and bounds on tools that never run here.
    Rule("context_management", _RESPONSES | _MESSAGES, _IGNORED, ([],)),
    Rule("max_tool_calls", _RESPONSES, _IGNORED),
    Rule("truncation", _RESPONSES, _IGNORED, ("disabled",)),
    # What agents cannot stop sending: tools that are no functions, and what tools gave them that is no text.
    Rule("tools[].type", _CHAT | _TOKENIZE, _IGNORED, ("function",)),
    Rule("tools[].type", _RESPONSES, _IGNORED, ("function", "custom", "namespace")),
    Rule("tools[].format", _RESPONSES, _IGNORED, ("text",)),
    Rule("tools[].type", _MESSAGES, _IGNORED, ("custom",)),
    Rule("input[].output[]", _RESPONSES, _IGNORED, ("text",)),
    Rule("messages[].content[].content[]", _MESSAGES, _IGNORED, ("text",)),
    Rule("system[]", _MESSAGES, _IGNORED, ("text",)),
    # What changes the answer, or what the caller relies on.
    Rule("add_special_tokens", _CHAT, _REFUSED, (False,)),
    Rule("add_special_tokens", _COMPLETIONS, _REFUSED, (True,)),
    Rule("allowed_token_ids", _OPENAI, _REFUSED),
    Rule("audio", _OPENAI, _REFUSED),
    Rule("background", _RESPONSES, _REFUSED, (False,)),
    Rule("background_options", _RESPONSES, _REFUSED),
    Rule("bad_words", _OPENAI, _REFUSED, ([],)),
    Rule("chat_template", _OPENAI | _TOKENIZE, _REFUSED),
    Rule("container", _MESSAGES, _REFUSED),
    Rule("conversation", _RESPONSES, _REFUSED),
    Rule("custom_logit_processor", _OPENAI, _REFUSED),
    Rule("custom_params", _OPENAI, _REFUSED),
    Rule("diagnostics", _MESSAGES, _REFUSED),
    Rule("documents", _OPENAI | _TOKENIZE, _REFUSED, ([],)),
    Rule("ebnf", _OPENAI, _REFUSED, cure="use structured_outputs.grammar"),
    Rule("echo", _CHAT, _REFUSED, (False,)),
    Rule("extra_key", _OPENAI, _REFUSED, cure="use cache_salt"),
    Rule("function_call", _OPENAI, _REFUSED, ("none",), "use tools and tool_choice"),
    Rule("functions", _OPENAI, _REFUSED, ([],), "use tools"),
    Rule("guided_whitespace_pattern", _OPENAI, _REFUSED),
    Rule("include_reasoning", _OPENAI, _REFUSED, (True,)),
    Rule("inference_geo", _MESSAGES, _REFUSED),
    Rule("input_ids", _OPENAI, _REFUSED, cure="send ids as the prompt of /v1/completions"),
    Rule("json_schema", _OPENAI, _REFUSED, cure="use response_format"),
    Rule("kv_transfer_params", _OPENAI, _REFUSED),
    Rule("length_penalty", _OPENAI, _REFUSED, (1,)),
    Rule("logits_processors", _OPENAI, _REFUSED, ([],)),
    Rule("lora_path", _OPENAI, _REFUSED),
    Rule("max_tokens", _RESPONSES, _REFUSED, cure="use max_output_tokens"),
    Rule("mcp_servers", _MESSAGES, _REFUSED, ([],)),
    Rule("messages", _COMPLETIONS | _RESPONSES, _REFUSED),
    Rule("modalities", _OPENAI, _REFUSED, (["text"],)),
    Rule("moderation", _OPENAI, _REFUSED),
    Rule("n", _RESPONSES | _MESSAGES, _REFUSED, (1,)),
    Rule("no_stop_trim", _OPENAI, _REFUSED, (False,), "use include_stop_str_in_output"),
    Rule("parallel_tool_calls", _COMPLETIONS, _REFUSED, (True,)),
    Rule("previous_response_id", _RESPONSES, _REFUSED),
    Rule("prompt", _CHAT | _RESPONSES, _REFUSED),
    Rule("prompt_embeds", _OPENAI, _REFUSED),
    Rule("reasoning_effort", _RESPONSES, _REFUSED, cure="use reasoning.effort"),
    Rule("regex", _OPENAI, _REFUSED, cure="use structured_outputs.regex"),
    Rule("request_id", _OPENAI, _REFUSED, cure="send it as the header x-request-id"),
    Rule("return_hidden_states", _OPENAI, _REFUSED, (False,)),
    Rule("return_tokens_as_token_ids", _OPENAI, _REFUSED, (False,)),
    Rule("rid", _OPENAI, _REFUSED, cure="send it as the header x-request-id"),
    Rule("separate_reasoning", _OPENAI, _REFUSED, (True,)),
    Rule("session_params", _OPENAI, _REFUSED),
    Rule("spaces_between_special_tokens", _OPENAI, _REFUSED, (True,)),
    Rule("stop_regex", _OPENAI, _REFUSED),
    Rule("stream_options.include_obfuscation", _OPENAI, _REFUSED, (False,)),
    Rule("stream_reasoning", _OPENAI, _REFUSED, (True,)),
    Rule("suffix", _OPENAI, _REFUSED, ("",)),
    Rule("thinking_token_budget", _OPENAI, _REFUSED),
    Rule("tools", _COMPLETIONS, _REFUSED),
    Rule("truncate_prompt_tokens", _OPENAI, _REFUSED),
    Rule("use_beam_search", _OPENAI, _REFUSED, (False,)),
    Rule("user_profile_id", _MESSAGES, _REFUSED),
    Rule("vllm_xargs", _OPENAI, _REFUSED),
    Rule("web_search_options", _OPENAI, _REFUSED),
    Rule("workspace_id", _MESSAGES, _REFUSED),
)


def rules_of(dialect: Dialect) -> dict[str, Rule]:
    """The rows of one dialect, by name."""
    return {rule.name: rule for rule in RULES if dialect in rule.dialects}
