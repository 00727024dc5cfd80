from rorqual.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConnectRequest(_message.Message):
    __slots__ = ("hello", "report")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    report: Report
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("welcome", "orders")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    orders: OrderBatch
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., orders: _Optional[_Union[OrderBatch, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "executor_id", "device", "cache_groups", "model", "max_num_seqs", "max_num_batched_tokens", "num_draft_tokens", "rank", "group_size", "inventory", "memory")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CACHE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    executor_id: str
    device: DeviceInfo
    cache_groups: _containers.RepeatedCompositeFieldContainer[CacheGroup]
    model: _common_pb2.ModelInfo
    max_num_seqs: int
    max_num_batched_tokens: int
    num_draft_tokens: int
    rank: int
    group_size: int
    inventory: _containers.RepeatedCompositeFieldContainer[CachedBlocks]
    memory: MemoryLedger
    def __init__(self, protocol_version: _Optional[int] = ..., executor_id: _Optional[str] = ..., device: _Optional[_Union[DeviceInfo, _Mapping]] = ..., cache_groups: _Optional[_Iterable[_Union[CacheGroup, _Mapping]]] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., rank: _Optional[int] = ..., group_size: _Optional[int] = ..., inventory: _Optional[_Iterable[_Union[CachedBlocks, _Mapping]]] = ..., memory: _Optional[_Union[MemoryLedger, _Mapping]] = ...) -> None: ...

class DeviceInfo(_message.Message):
    __slots__ = ("kind", "name", "memory_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    memory_bytes: int
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class MemoryLedger(_message.Message):
    __slots__ = ("weights_bytes", "workspace_bytes", "graphs_bytes", "kv_cache_bytes", "context_bytes", "other_bytes", "device_used_bytes")
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    OTHER_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    weights_bytes: int
    workspace_bytes: int
    graphs_bytes: int
    kv_cache_bytes: int
    context_bytes: int
    other_bytes: int
    device_used_bytes: int
    def __init__(self, weights_bytes: _Optional[int] = ..., workspace_bytes: _Optional[int] = ..., graphs_bytes: _Optional[int] = ..., kv_cache_bytes: _Optional[int] = ..., context_bytes: _Optional[int] = ..., other_bytes: _Optional[int] = ..., device_used_bytes: _Optional[int] = ...) -> None: ...

class CacheGroup(_message.Message):
    __slots__ = ("name", "block_size", "block_bytes", "num_blocks", "window", "prefix_multiple", "slots_per_sequence")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    PREFIX_MULTIPLE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_PER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    block_size: int
    block_bytes: int
    num_blocks: int
    window: int
    prefix_multiple: int
    slots_per_sequence: int
    def __init__(self, name: _Optional[str] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., window: _Optional[int] = ..., prefix_multiple: _Optional[int] = ..., slots_per_sequence: _Optional[int] = ...) -> None: ...

class CachedBlocks(_message.Message):
    __slots__ = ("group_idx", "block_ids", "hashes", "last_used_us")
    GROUP_IDX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_US_FIELD_NUMBER: _ClassVar[int]
    group_idx: int
    block_ids: bytes
    hashes: bytes
    last_used_us: bytes
    def __init__(self, group_idx: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., last_used_us: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("epoch", "protocol_version", "peer_timeout_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    protocol_version: int
    peer_timeout_ms: int
    def __init__(self, epoch: _Optional[int] = ..., protocol_version: _Optional[int] = ..., peer_timeout_ms: _Optional[int] = ...) -> None: ...

class OrderBatch(_message.Message):
    __slots__ = ("batch_id", "orders", "heartbeat")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    batch_id: int
    orders: _containers.RepeatedCompositeFieldContainer[Order]
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, batch_id: _Optional[int] = ..., orders: _Optional[_Iterable[_Union[Order, _Mapping]]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("admit", "prefill", "extend", "drop", "label", "copy")
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    admit: Admit
    prefill: Prefill
    extend: Extend
    drop: Drop
    label: Label
    copy: Copy
    def __init__(self, admit: _Optional[_Union[Admit, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., extend: _Optional[_Union[Extend, _Mapping]] = ..., drop: _Optional[_Union[Drop, _Mapping]] = ..., label: _Optional[_Union[Label, _Mapping]] = ..., copy: _Optional[_Union[Copy, _Mapping]] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("seq_id", "num_tokens", "num_prompt_tokens", "num_cached_tokens", "block_tables", "limit", "max_total_tokens", "sampling", "choice_index", "known_token_ids", "prompt_logprobs_delivered", "trace")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_DELIVERED_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    block_tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    limit: int
    max_total_tokens: int
    sampling: _common_pb2.SamplingParams
    choice_index: int
    known_token_ids: bytes
    prompt_logprobs_delivered: bool
    trace: _common_pb2.TraceContext
    def __init__(self, seq_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., block_tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., limit: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., choice_index: _Optional[int] = ..., known_token_ids: _Optional[bytes] = ..., prompt_logprobs_delivered: _Optional[bool] = ..., trace: _Optional[_Union[_common_pb2.TraceContext, _Mapping]] = ...) -> None: ...

class BlockTable(_message.Message):
    __slots__ = ("group_idx", "block_ids")
    GROUP_IDX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    group_idx: int
    block_ids: bytes
    def __init__(self, group_idx: _Optional[int] = ..., block_ids: _Optional[bytes] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("seq_id", "start", "end", "token_ids")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    start: int
    end: int
    token_ids: bytes
    def __init__(self, seq_id: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class Extend(_message.Message):
    __slots__ = ("seq_id", "block_tables", "limit")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    block_tables: _containers.RepeatedCompositeFieldContainer[BlockTable]
    limit: int
    def __init__(self, seq_id: _Optional[int] = ..., block_tables: _Optional[_Iterable[_Union[BlockTable, _Mapping]]] = ..., limit: _Optional[int] = ...) -> None: ...

class Drop(_message.Message):
    __slots__ = ("seq_id",)
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    def __init__(self, seq_id: _Optional[int] = ...) -> None: ...

class Label(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: CachedBlocks
    def __init__(self, blocks: _Optional[_Union[CachedBlocks, _Mapping]] = ...) -> None: ...

class Copy(_message.Message):
    __slots__ = ("group_idx", "src_block_id", "dst_block_id", "num_tokens")
    GROUP_IDX_FIELD_NUMBER: _ClassVar[int]
    SRC_BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    DST_BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    group_idx: int
    src_block_id: int
    dst_block_id: int
    num_tokens: int
    def __init__(self, group_idx: _Optional[int] = ..., src_block_id: _Optional[int] = ..., dst_block_id: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("step_id", "last_batch_id", "seq_ids", "num_tokens", "token_ids", "finish", "computed_seq_ids", "num_computed_tokens", "paused_seq_ids", "logprobs", "faults", "num_steps", "step_time_us", "heartbeat")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_SEQ_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_US_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    last_batch_id: int
    seq_ids: bytes
    num_tokens: bytes
    token_ids: bytes
    finish: bytes
    computed_seq_ids: bytes
    num_computed_tokens: bytes
    paused_seq_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[SequenceLogprobs]
    faults: _containers.RepeatedCompositeFieldContainer[SequenceFault]
    num_steps: int
    step_time_us: int
    heartbeat: _common_pb2.Heartbeat
    def __init__(self, step_id: _Optional[int] = ..., last_batch_id: _Optional[int] = ..., seq_ids: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., finish: _Optional[bytes] = ..., computed_seq_ids: _Optional[bytes] = ..., num_computed_tokens: _Optional[bytes] = ..., paused_seq_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[SequenceLogprobs, _Mapping]]] = ..., faults: _Optional[_Iterable[_Union[SequenceFault, _Mapping]]] = ..., num_steps: _Optional[int] = ..., step_time_us: _Optional[int] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class SequenceLogprobs(_message.Message):
    __slots__ = ("seq_id", "logprobs", "prompt_logprobs")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, seq_id: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class SequenceFault(_message.Message):
    __slots__ = ("seq_id", "message", "reason")
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    seq_id: int
    message: str
    reason: str
    def __init__(self, seq_id: _Optional[int] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
