"""What the core is told: by callers, by executors, and by time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A history to continue, but for its tokens. Checked by `validation` as far as no model is needed."""

    request_id: str
    choice_index: int = 0
    num_choices: int = 1
    attempt: int = 0
    num_prompt_tokens: int
    max_tokens: int | None = None
    seed: int = 0
    sampling: object = None  # goes into Admit as it is
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    needs_known_tokens: bool = False  # penalties and grammars look at tokens of a cached prefix too
    has_grammar: bool = False
    largest_ids: tuple[tuple[str, int], ...] = ()  # (field, largest token id in it): must be below the vocabulary
    priority: int = 0
    cache_salt: str = ""
    deadline_s: float | None = None  # on the clock of `handle`
    is_resume: bool = False
    resumed_num_cached_tokens: int = 0
    resumed_queue_time_us: int = 0
    prompt_logprobs_delivered: bool = False
    trace: object = None
    num_opaque_bytes: int = 0  # of `sampling` and `trace` on the wire


@dataclass(frozen=True, slots=True)
class Open:
    """A caller wants `token_ids` (little-endian uint32) continued as stream `stream_id`."""

    stream_id: int
    request: Request
    token_ids: bytes
    owner: int = 0  # the session it came in: one gets a share of the queue where others want in


@dataclass(frozen=True, slots=True)
class Cancel:
    """The caller no longer wants the stream. Unknown or ended: nothing happens."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class FinishEarly:
    """The text ended (a stop string) after `num_tokens` generated tokens; later ones leave the usage."""

    stream_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What is served."""

    name: str
    max_model_len: int
    vocab_size: int
    fingerprint: bytes
    deterministic: bool = False
    takes_grammars: bool = False


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One cache group: a kind of per-token state, counted in blocks. It keeps all of them, unless it says otherwise."""

    name: str
    num_blocks: int
    block_bytes: int = 0
    window: int = 0  # tokens, the last of a history, whose blocks are kept
    slots_per_sequence: int = 0  # of a state; its other blocks are snapshots at multiples of `prefix_multiple`
    prefix_multiple: int = 1  # a prefix may be taken up at multiples of this many tokens

    @property
    def is_bounded(self) -> bool:
        """Whether a sequence needs only so much of it, however long it is."""
        return bool(self.window or self.slots_per_sequence)


@dataclass(frozen=True, slots=True)
class InventoryBlock:
    """A labelled block that an executor still holds."""

    group_idx: int
    block_id: int
    block_hash: bytes
    last_used_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSpec:
    """What an executor is and holds."""

    executor_id: str
    model: ModelSpec
    groups: tuple[GroupSpec, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    num_draft_tokens: int = 0
    inventory: tuple[InventoryBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class ExecutorConnected:
    """An executor with nothing running. `link_id` is never used twice."""

    link_id: int
    spec: ExecutorSpec


@dataclass(frozen=True, slots=True)
class ExecutorLost:
    """The link ended, whoever ended it. Unknown: nothing happens."""

    link_id: int
    is_its_own_fault: bool = False  # no request is to blame: what it said broke the contract


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What one or several steps of an executor brought, as columns."""

    link_id: int
    last_batch_id: int = 0
    seq_ids: Sequence[int] = ()
    num_tokens: Sequence[int] = ()
    token_ids: bytes = b""
    finish: bytes = b""  # a FinishReason each, or empty where none ended
    computed_seq_ids: Sequence[int] = ()
    num_computed_tokens: Sequence[int] = ()
    paused_seq_ids: Sequence[int] = ()
    logprobs: Mapping[int, tuple[list[Any], list[Any]]] = field(default_factory=dict)  # of tokens, of the prompt
    faults: Sequence[tuple[int, str, str]] = ()  # seq_id, reason, message
    num_steps: int = 0
    step_time_us: int = 0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; deadlines may have."""


Event: TypeAlias = Open | Cancel | FinishEarly | ExecutorConnected | ExecutorLost | Reported | Tick
