from rorqual.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "num_prompt_tokens", "max_tokens", "sampling", "choice_index", "num_choices", "attempt", "priority", "cache_salt", "time_left_us", "trace", "resume")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_US_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: bytes
    num_prompt_tokens: int
    max_tokens: int
    sampling: _common_pb2.SamplingParams
    choice_index: int
    num_choices: int
    attempt: int
    priority: int
    cache_salt: str
    time_left_us: int
    trace: _common_pb2.TraceContext
    resume: GenerateResume
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., choice_index: _Optional[int] = ..., num_choices: _Optional[int] = ..., attempt: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., time_left_us: _Optional[int] = ..., trace: _Optional[_Union[_common_pb2.TraceContext, _Mapping]] = ..., resume: _Optional[_Union[GenerateResume, _Mapping]] = ...) -> None: ...

class GenerateResume(_message.Message):
    __slots__ = ("num_cached_tokens", "queue_time_us", "prompt_logprobs_delivered")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_US_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_DELIVERED_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    queue_time_us: int
    prompt_logprobs_delivered: bool
    def __init__(self, num_cached_tokens: _Optional[int] = ..., queue_time_us: _Optional[int] = ..., prompt_logprobs_delivered: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    delta: TokenDelta
    finished: Finished
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[TokenDelta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("num_cached_tokens", "queue_time_us", "seed")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_US_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    queue_time_us: int
    seed: int
    def __init__(self, num_cached_tokens: _Optional[int] = ..., queue_time_us: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("token_ids", "logprobs", "prompt_logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "stop_token_id", "num_cached_tokens", "queue_time_us", "num_generated_tokens")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_US_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    stop_token_id: int
    num_cached_tokens: int
    queue_time_us: int
    num_generated_tokens: int
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., queue_time_us: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ...) -> None: ...

class GenerationServiceSessionRequest(_message.Message):
    __slots__ = ("commands", "heartbeat")
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[GenerationCommand]
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, commands: _Optional[_Iterable[_Union[GenerationCommand, _Mapping]]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class GenerationCommand(_message.Message):
    __slots__ = ("stream_id", "open", "cancel", "finish")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    open: GenerateRequest
    cancel: CancelGeneration
    finish: FinishGeneration
    def __init__(self, stream_id: _Optional[int] = ..., open: _Optional[_Union[GenerateRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelGeneration, _Mapping]] = ..., finish: _Optional[_Union[FinishGeneration, _Mapping]] = ...) -> None: ...

class CancelGeneration(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FinishGeneration(_message.Message):
    __slots__ = ("num_tokens",)
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...

class GenerationServiceSessionResponse(_message.Message):
    __slots__ = ("events", "heartbeat")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[GenerationEvent]
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, events: _Optional[_Iterable[_Union[GenerationEvent, _Mapping]]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class GenerationEvent(_message.Message):
    __slots__ = ("stream_id", "started", "delta", "finished", "error")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    started: Started
    delta: TokenDelta
    finished: Finished
    error: _common_pb2.Error
    def __init__(self, stream_id: _Optional[int] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[TokenDelta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("model", "num_executors", "num_running", "num_waiting", "num_total_blocks", "num_free_blocks", "num_granted_unwritten_blocks")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_GRANTED_UNWRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelInfo
    num_executors: int
    num_running: int
    num_waiting: int
    num_total_blocks: int
    num_free_blocks: int
    num_granted_unwritten_blocks: int
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., num_executors: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_granted_unwritten_blocks: _Optional[int] = ...) -> None: ...
