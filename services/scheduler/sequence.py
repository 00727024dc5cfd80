"""One request's history, and where it stands."""

from __future__ import annotations

import sys
from enum import Enum
from typing import TYPE_CHECKING, Any

from rorqual.core.blocks import BLOCK_SIZE, block_hash, root_hash

from .drain_rate import Work
from .events import ModelSpec, Request
from .orders import BlockTables

if TYPE_CHECKING:
    from .executor_state import ExecutorState
    from .kv_cache import Share

NEVER = sys.maxsize


class State(Enum):
    """Where a history stands. Only RUNNING holds blocks."""

    WAITING = "waiting"  # in the queue
    FOLLOWING = "following"  # out of the queue until another has computed a block that it wants
    PARKED = "parked"  # no connected executor is large enough
    SUSPECT = "suspect"  # out of the queue until an executor is kept for it, since executors died under it
    RUNNING = "running"  # admitted
    DRAINING = "draining"  # dropped; its last reports are still to come
    ENDED = "ended"


class Sequence:
    """A history and its present admission. Mutable; owned by the core."""

    __slots__ = (
        "arrival",
        "arrival_s",
        "chain_broken",
        "executor",
        "extend_at",
        "granted_total",
        "hashes",
        "history",
        "is_new",
        "limit",
        "max_blocks",
        "max_total",
        "next_check",
        "num_ahead",
        "num_cached_first",
        "num_computed",
        "num_labelled",
        "num_own_from",
        "num_sent",
        "num_tokens",
        "owner",
        "prefill_end",
        "priority",
        "prompt_logprobs",
        "prompt_logprobs_delivered",
        "queue_ticket",
        "queue_time_us",
        "queued_s",
        "queued_work",
        "request",
        "scores_prompt_only",
        "seq_id",
        "shares",
        "started",
        "state",
        "stream_id",
        "tables",
        "tried_at",
        "validated_at",
        "validated_for",
        "was_parked",
        "was_preempted",
    )

    def __init__(
        self, stream_id: int, request: Request, token_ids: bytes, arrival: int, arrival_s: float, owner: int = 0
    ) -> None:
        self.stream_id = stream_id
        self.owner = owner
        self.request = request
        self.history = bytearray(token_ids)  # little-endian uint32: slices go to the wire as they are
        self.num_tokens = len(token_ids) // 4
        self.arrival = arrival
        self.arrival_s = arrival_s
        self.priority = request.priority  # its class; waiting makes it better, while it is in the queue
        self.queued_s = arrival_s  # when it came into the queue last
        self.is_new = not request.is_resume
        self.state = State.WAITING
        self.queue_ticket = 0
        self.queued_work: Work = (0, 0, 0)
        self.tried_at = -1  # the core's capacity version when placing it failed last
        # Known once a model is.
        self.validated_for: ModelSpec | None = None
        self.validated_at = 0  # the core's version of what is served; 0: before there was an executor
        self.max_total = 0
        self.max_blocks = 0
        self.scores_prompt_only = False  # no token is wanted, only the prompt's log-probabilities
        self.hashes: list[bytes] = []  # identities of its full blocks, as far as they were needed
        # Fixed at first admission.
        self.started = False
        self.num_cached_first = request.resumed_num_cached_tokens
        self.queue_time_us = request.resumed_queue_time_us
        self.prompt_logprobs: list[Any] = []
        self.prompt_logprobs_delivered = request.prompt_logprobs_delivered
        self.was_preempted = False
        self.was_parked = False
        self.reset_admission()

    def reset_admission(self) -> None:
        """Forget the executor: the history is all that is left."""
        self.seq_id = 0
        self.executor: ExecutorState | None = None
        self.tables: BlockTables = []
        self.shares: list[Share] = []  # of windows and states: what it holds of their tables
        self.limit = 0
        self.granted_total = 0  # the executor ends it when its history is this long
        self.num_ahead = 0  # blocks granted beyond those that its history fills, when that was last counted
        self.extend_at = NEVER  # more blocks are granted when the history is this long
        self.next_check = NEVER  # nothing but appending is to be done before the history is this long
        self.prefill_end = 0  # the history's length at admission
        self.num_sent = 0  # positions below it are in chunks already sent
        self.num_computed = 0  # positions below it are reported computed
        self.num_labelled = 0  # blocks below it have their label, or share a labelled one
        self.num_own_from = 0  # blocks from here on were computed by this admission
        self.chain_broken = False  # another's block has the label: this copy's children get none
        if not self.prompt_logprobs_delivered:
            self.prompt_logprobs = []  # those of a broken prefill are computed again

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller runs first and is preempted last."""
        return self.priority, self.arrival

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens

    @property
    def num_unsent(self) -> int:
        """History positions still to be cut into chunks."""
        return self.prefill_end - self.num_sent

    @property
    def is_open_ended(self) -> bool:
        """Whether it ends where an executor does, not where the request says."""
        max_tokens = self.request.max_tokens
        return max_tokens is None or self.request.num_prompt_tokens + max_tokens > self.max_total

    @property
    def needs_all_logits(self) -> bool:
        """Whether every position of the prompt must be computed, for its log-probabilities."""
        return self.request.wants_prompt_logprobs and not self.prompt_logprobs_delivered

    @property
    def position(self) -> int:
        """How far its present admission has got: positions below it are computed, as far as was reported."""
        return max(self.num_computed, self.num_tokens - 1 if self.num_tokens > self.prefill_end else 0)

    @property
    def reached(self) -> int:
        """How far its present admission may have got, beyond what was reported."""
        return max(self.num_sent, self.num_tokens if self.num_computed >= self.prefill_end else 0)

    def last_token(self) -> int:
        return int.from_bytes(self.history[-4:], "little")

    def hash_blocks(self, num_blocks: int, model: ModelSpec, *, caching: bool) -> None:
        """Compute identities of the first `num_blocks` blocks, which the history fills.

        Without caching the chain's root is the request's own: its choices still share their prompt.
        """
        hashes, history = self.hashes, self.history
        if len(hashes) >= num_blocks:
            return
        if hashes:
            parent = hashes[-1]
        elif caching:
            parent = root_hash(model.fingerprint, self.request.cache_salt)
        else:
            parent = root_hash(model.fingerprint, f"\0{self.request.request_id}\0{self.request.cache_salt}")
        num_prompt = self.request.num_prompt_tokens
        for i in range(len(hashes), num_blocks):
            end = (i + 1) * BLOCK_SIZE
            # The decode form gives other bits than the prefill form, so such a block serves only a resume.
            generated_after = num_prompt if model.deterministic and end > num_prompt else None
            parent = block_hash(
                parent, bytes(history[4 * (end - BLOCK_SIZE) : 4 * end]), num_prompt_tokens=generated_after
            )
            hashes.append(parent)
