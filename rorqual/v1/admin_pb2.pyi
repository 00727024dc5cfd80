from rorqual.v1 import common_pb2 as _common_pb2
from rorqual.v1 import executor_pb2 as _executor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListExecutorsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListExecutorsResponse(_message.Message):
    __slots__ = ("executors",)
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    executors: _containers.RepeatedCompositeFieldContainer[ExecutorInfo]
    def __init__(self, executors: _Optional[_Iterable[_Union[ExecutorInfo, _Mapping]]] = ...) -> None: ...

class ExecutorInfo(_message.Message):
    __slots__ = ("executor_id", "device", "model", "cache_groups", "memory", "max_num_seqs", "max_num_batched_tokens", "num_running", "num_total_blocks", "num_free_blocks", "num_granted_unwritten_blocks", "group_free_blocks")
    EXECUTOR_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CACHE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_GRANTED_UNWRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    executor_id: str
    device: _executor_pb2.DeviceInfo
    model: _common_pb2.ModelInfo
    cache_groups: _containers.RepeatedCompositeFieldContainer[_executor_pb2.CacheGroup]
    memory: _executor_pb2.MemoryLedger
    max_num_seqs: int
    max_num_batched_tokens: int
    num_running: int
    num_total_blocks: int
    num_free_blocks: int
    num_granted_unwritten_blocks: int
    group_free_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, executor_id: _Optional[str] = ..., device: _Optional[_Union[_executor_pb2.DeviceInfo, _Mapping]] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., cache_groups: _Optional[_Iterable[_Union[_executor_pb2.CacheGroup, _Mapping]]] = ..., memory: _Optional[_Union[_executor_pb2.MemoryLedger, _Mapping]] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., num_running: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_granted_unwritten_blocks: _Optional[int] = ..., group_free_blocks: _Optional[_Iterable[int]] = ...) -> None: ...
