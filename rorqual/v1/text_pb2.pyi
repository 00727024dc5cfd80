from rorqual.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolChoiceMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CHOICE_MODE_UNSPECIFIED: _ClassVar[ToolChoiceMode]
    TOOL_CHOICE_MODE_AUTO: _ClassVar[ToolChoiceMode]
    TOOL_CHOICE_MODE_NONE: _ClassVar[ToolChoiceMode]
    TOOL_CHOICE_MODE_REQUIRED: _ClassVar[ToolChoiceMode]
TOOL_CHOICE_MODE_UNSPECIFIED: ToolChoiceMode
TOOL_CHOICE_MODE_AUTO: ToolChoiceMode
TOOL_CHOICE_MODE_NONE: ToolChoiceMode
TOOL_CHOICE_MODE_REQUIRED: ToolChoiceMode

class TextOptions(_message.Message):
    __slots__ = ("request_id", "model", "sampling", "max_tokens", "stop", "include_stop_str_in_output", "num_choices", "priority", "cache_salt", "time_left_us", "trace", "attempt", "resume", "ignore_eos", "skip_special_tokens", "return_prompt_token_ids", "constraint", "stop_in_reasoning")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_US_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    STOP_IN_REASONING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    sampling: _common_pb2.SamplingParams
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop_str_in_output: bool
    num_choices: int
    priority: int
    cache_salt: str
    time_left_us: int
    trace: _common_pb2.TraceContext
    attempt: int
    resume: TextResume
    ignore_eos: bool
    skip_special_tokens: bool
    return_prompt_token_ids: bool
    constraint: Constraint
    stop_in_reasoning: bool
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop_str_in_output: _Optional[bool] = ..., num_choices: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., time_left_us: _Optional[int] = ..., trace: _Optional[_Union[_common_pb2.TraceContext, _Mapping]] = ..., attempt: _Optional[int] = ..., resume: _Optional[_Union[TextResume, _Mapping]] = ..., ignore_eos: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., return_prompt_token_ids: _Optional[bool] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., stop_in_reasoning: _Optional[bool] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choices", "grammar")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    choices: ChoiceList
    grammar: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., choices: _Optional[_Union[ChoiceList, _Mapping]] = ..., grammar: _Optional[str] = ...) -> None: ...

class ChoiceList(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class TextResume(_message.Message):
    __slots__ = ("choices", "num_prompt_tokens", "prompt_digest", "seed", "template_time_unix_s", "num_cached_tokens", "queue_time_us", "prompt_logprobs_delivered")
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_TIME_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_US_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_DELIVERED_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceHistory]
    num_prompt_tokens: int
    prompt_digest: bytes
    seed: int
    template_time_unix_s: int
    num_cached_tokens: int
    queue_time_us: int
    prompt_logprobs_delivered: bool
    def __init__(self, choices: _Optional[_Iterable[_Union[ChoiceHistory, _Mapping]]] = ..., num_prompt_tokens: _Optional[int] = ..., prompt_digest: _Optional[bytes] = ..., seed: _Optional[int] = ..., template_time_unix_s: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., queue_time_us: _Optional[int] = ..., prompt_logprobs_delivered: _Optional[bool] = ...) -> None: ...

class ChoiceHistory(_message.Message):
    __slots__ = ("choice_index", "token_ids")
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    choice_index: int
    token_ids: bytes
    def __init__(self, choice_index: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("options", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs_json", "chat_template", "tool_choice", "parallel_tool_calls", "reasoning_effort")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_EFFORT_FIELD_NUMBER: _ClassVar[int]
    options: TextOptions
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs_json: str
    chat_template: str
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    reasoning_effort: str
    def __init__(self, options: _Optional[_Union[TextOptions, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., chat_template_kwargs_json: _Optional[str] = ..., chat_template: _Optional[str] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., parallel_tool_calls: _Optional[bool] = ..., reasoning_effort: _Optional[str] = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ("mode", "function_name")
    MODE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_NAME_FIELD_NUMBER: _ClassVar[int]
    mode: ToolChoiceMode
    function_name: str
    def __init__(self, mode: _Optional[_Union[ToolChoiceMode, str]] = ..., function_name: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    reasoning_content: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., reasoning_content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters_json", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters_json: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters_json: _Optional[str] = ..., strict: _Optional[bool] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments_json")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments_json: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("options", "text", "token_ids", "echo")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    options: TextOptions
    text: str
    token_ids: bytes
    echo: bool
    def __init__(self, options: _Optional[_Union[TextOptions, _Mapping]] = ..., text: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., echo: _Optional[bool] = ...) -> None: ...

class ChatResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[TextEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[TextEvent, _Mapping]]] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[TextEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[TextEvent, _Mapping]]] = ...) -> None: ...

class TextEvent(_message.Message):
    __slots__ = ("choice_index", "token_ids", "logprobs", "accepted", "content", "reasoning", "tool_call", "finished", "usage", "echo")
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    choice_index: int
    token_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobText]
    accepted: Accepted
    content: str
    reasoning: str
    tool_call: ToolCallDelta
    finished: ChoiceFinished
    usage: Usage
    echo: PromptEcho
    def __init__(self, choice_index: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobText, _Mapping]]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., content: _Optional[str] = ..., reasoning: _Optional[str] = ..., tool_call: _Optional[_Union[ToolCallDelta, _Mapping]] = ..., finished: _Optional[_Union[ChoiceFinished, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., echo: _Optional[_Union[PromptEcho, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("num_prompt_tokens", "prompt_digest", "seed", "template_time_unix_s", "model", "num_cached_tokens", "queue_time_us", "prompt_token_ids")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_TIME_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_US_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    prompt_digest: bytes
    seed: int
    template_time_unix_s: int
    model: str
    num_cached_tokens: int
    queue_time_us: int
    prompt_token_ids: bytes
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., prompt_digest: _Optional[bytes] = ..., seed: _Optional[int] = ..., template_time_unix_s: _Optional[int] = ..., model: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., queue_time_us: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("tool_call_idx", "id", "name", "arguments_json_delta")
    TOOL_CALL_IDX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_DELTA_FIELD_NUMBER: _ClassVar[int]
    tool_call_idx: int
    id: str
    name: str
    arguments_json_delta: str
    def __init__(self, tool_call_idx: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json_delta: _Optional[str] = ...) -> None: ...

class ChoiceFinished(_message.Message):
    __slots__ = ("reason", "stop_token_id", "stop_string", "error")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    stop_token_id: int
    stop_string: str
    error: _common_pb2.Error
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_cached_tokens", "num_generated_tokens", "num_reasoning_tokens", "queue_time_us")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_US_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_reasoning_tokens: int
    queue_time_us: int
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., num_reasoning_tokens: _Optional[int] = ..., queue_time_us: _Optional[int] = ...) -> None: ...

class PromptEcho(_message.Message):
    __slots__ = ("text", "token_ids", "logprobs")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobText]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobText, _Mapping]]] = ...) -> None: ...

class TokenLogprobText(_message.Message):
    __slots__ = ("token", "token_bytes", "logprob", "token_id", "top")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token: str
    token_bytes: bytes
    logprob: float
    token_id: int
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprobText]
    def __init__(self, token: _Optional[str] = ..., token_bytes: _Optional[bytes] = ..., logprob: _Optional[float] = ..., token_id: _Optional[int] = ..., top: _Optional[_Iterable[_Union[TokenLogprobText, _Mapping]]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "add_special_tokens", "return_token_strings")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_STRINGS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: ChatRequest
    add_special_tokens: bool
    return_token_strings: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatRequest, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ..., return_token_strings: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "max_model_len", "token_strings")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STRINGS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    max_model_len: int
    token_strings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[bytes] = ..., max_model_len: _Optional[int] = ..., token_strings: _Optional[_Iterable[str]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: bytes
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class RenderChatRequest(_message.Message):
    __slots__ = ("chat",)
    CHAT_FIELD_NUMBER: _ClassVar[int]
    chat: ChatRequest
    def __init__(self, chat: _Optional[_Union[ChatRequest, _Mapping]] = ...) -> None: ...

class RenderChatResponse(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: bytes
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "created_unix_s", "missing")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[_common_pb2.ModelInfo]
    created_unix_s: int
    missing: str
    def __init__(self, models: _Optional[_Iterable[_Union[_common_pb2.ModelInfo, _Mapping]]] = ..., created_unix_s: _Optional[int] = ..., missing: _Optional[str] = ...) -> None: ...

class TextServiceSessionRequest(_message.Message):
    __slots__ = ("commands", "heartbeat")
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[TextCommand]
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, commands: _Optional[_Iterable[_Union[TextCommand, _Mapping]]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class TextCommand(_message.Message):
    __slots__ = ("stream_id", "chat", "complete", "cancel")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    chat: ChatRequest
    complete: CompleteRequest
    cancel: CancelText
    def __init__(self, stream_id: _Optional[int] = ..., chat: _Optional[_Union[ChatRequest, _Mapping]] = ..., complete: _Optional[_Union[CompleteRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelText, _Mapping]] = ...) -> None: ...

class CancelText(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TextServiceSessionResponse(_message.Message):
    __slots__ = ("streams", "heartbeat")
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    streams: _containers.RepeatedCompositeFieldContainer[TextStreamEvents]
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, streams: _Optional[_Iterable[_Union[TextStreamEvents, _Mapping]]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class TextStreamEvents(_message.Message):
    __slots__ = ("stream_id", "events", "error")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    events: _containers.RepeatedCompositeFieldContainer[TextEvent]
    error: _common_pb2.Error
    def __init__(self, stream_id: _Optional[int] = ..., events: _Optional[_Iterable[_Union[TextEvent, _Mapping]]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...
