"""One executor as the scheduler sees it: its memory, its sequences, and the orders that wait for the wire."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from rorqual.core.blocks import BLOCK_SIZE, NO_BLOCK

from . import policy
from .events import ExecutorSpec, ModelSpec, Reported
from .kv_cache import KvCache, blocks_for, num_covered, reach
from .order_queue import MAX_BATCH_BYTES, OrderQueue
from .orders import Admit, Copy, Drop, Extend, Order, Prefill
from .prefill_queue import PrefillQueue
from .sequence import NEVER, Sequence, State
from .validation import Capacity


@dataclass(frozen=True, slots=True)
class Plan:
    """What admitting a sequence here would mean. `follow` names a block that another is still computing."""

    num_cached_blocks: int
    num_sharable_blocks: int  # that could have been cached
    follow: bytes | None
    cost: int
    copy_from: Sequence | None = (
        None  # a sibling whose block after the cached ones has all of the prompt but its last token
    )


class ExecutorState:
    """Grants blocks, cuts chunks and writes orders for one link. All its sequences' blocks are in its pools."""

    __slots__ = (
        "_ahead",
        "_backlog",
        "_by_hash_followers",
        "_caching",
        "_computing",
        "_lead",
        "_num_by_priority",
        "_num_grantable",
        "_num_prefilling",
        "_orders",
        "_outstanding",
        "_prefill",
        "_round_trip_us",
        "_siblings",
        "_step_time_us",
        "_unacknowledged",
        "cache",
        "capacity",
        "draining",
        "heap_load",
        "heap_ticket",
        "hungry",
        "is_held",
        "link_id",
        "max_num_seqs",
        "model",
        "new_first_blocks",
        "num_running",
        "room",
        "sequences",
        "spec",
        "woken",
    )

    def __init__(
        self,
        link_id: int,
        spec: ExecutorSpec,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        caching: bool,
        max_batch_bytes: int = MAX_BATCH_BYTES,
    ) -> None:
        """`max_num_seqs`, `max_num_batched_tokens`: the deployment's own bounds, 0 for none."""
        self.link_id = link_id
        self.spec = spec
        self.model: ModelSpec = spec.model
        self.cache = KvCache(spec.groups, spec.inventory if caching else ())
        self._lead = self.cache.lead  # the group whose table says how many blocks a sequence was granted
        self.capacity = Capacity(spec.model.max_model_len, self.cache.num_blocks, spec.model.takes_grammars)
        self.max_num_seqs = min(spec.max_num_seqs, max_num_seqs or spec.max_num_seqs)
        batched = min(spec.max_num_batched_tokens, max_num_batched_tokens or spec.max_num_batched_tokens)
        # The executor sets decodes aside by its own figures; a bound of ours only makes chunks smaller.
        self.room = max(BLOCK_SIZE, policy.chunk_room(batched, spec.max_num_seqs, spec.num_draft_tokens))
        self._caching = caching
        # For the core's `Placement`.
        self.new_first_blocks = [block.block_hash for block in spec.inventory] if caching else []
        self.heap_ticket = self.heap_load = 0
        self.sequences: dict[int, Sequence] = {}  # RUNNING and DRAINING, by id
        self.num_running = 0
        self.is_held = False  # kept for a group of suspects (`Isolation`): nobody else is admitted
        self._num_by_priority: Counter[int] = Counter()  # of the running
        self.draining: deque[tuple[int, int, Sequence]] = (
            deque()
        )  # dropped: (batch of its Drop, id, sequence), in order
        self.hungry: dict[int, Sequence] = {}  # want a block and got none
        self.woken: list[Sequence] = []  # followers whose block is computed, or will not be
        self._by_hash_followers: dict[bytes, list[Sequence]] = {}
        self._computing: dict[bytes, Sequence] = {}  # blocks that chunks will complete, and whose they are
        self._prefill = PrefillQueue()
        self._siblings: dict[str, Sequence] = {}  # request id -> the first of its several choices that runs here
        self._num_prefilling: Counter[int] = (
            Counter()
        )  # sequences with history still to be cut into chunks, by priority
        self._backlog = 0  # of their tokens, at most `room` a sequence: one long prompt does not close the door
        self._outstanding = 0  # tokens in chunks sent and not yet reported
        self._orders = OrderQueue(max_batch_bytes)
        self._unacknowledged: deque[tuple[int, float]] = deque()  # (batch, when it was taken)
        self._step_time_us = self._round_trip_us = 0.0
        self._ahead = policy.tokens_ahead(0.0, 1 + spec.num_draft_tokens, 0.0)
        self._num_grantable = policy.most_ahead_blocks(self.cache.num_blocks)  # blocks that may still be granted ahead

    # -- orders ---------------------------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    @property
    def num_batches(self) -> int:
        """That were taken."""
        return self._orders.num_taken

    def take_batch(self, now_s: float) -> tuple[int, list[Order]] | None:
        """The next batch of orders and its number; None where none wait. What is too much for one is in the next."""
        batch = self._orders.take()
        if batch is not None:
            self._unacknowledged.append((batch[0], now_s))
        return batch

    # -- admission ------------------------------------------------------------------------------------

    def plan(self, seq: Sequence, *, of_group: bool = False) -> Plan | None:
        """How `seq` would be admitted here now; None where it would have to wait.

        `of_group`: it belongs to the group that this executor is kept for.
        """
        if self.is_held is not of_group or self.num_running >= self.max_num_seqs or self._is_closed_to(seq.priority):
            return None
        for group in self.cache.bounded:
            if group.num_short(seq.max_blocks) > 0:
                return None
        unit = self.cache.unit
        most = self._num_sharable(seq) // unit * unit
        matched = self.cache.num_matched(seq.hashes, most)
        wanted = self._end_of_computing(seq.hashes, matched, most)
        if wanted > matched:
            return Plan(matched, most, seq.hashes[wanted - 1], self._cost(seq, wanted))
        if self._num_short(seq, matched) > 0:
            return None
        copy_from = self._copy_source(seq, matched)
        cost = self._cost(seq, matched) if copy_from is None else self.load() + 1
        return Plan(matched, most, None, cost, copy_from)

    def _copy_source(self, seq: Sequence, num_matched: int) -> Sequence | None:
        """The sibling of `seq`, a prompt, from which the block after the matched ones is copied but for the last token.

        Not where chunks begin at fixed positions, nor where more than blocks by position belongs to a prefix.
        """
        request = seq.request
        if request.num_choices < 2 or self.model.deterministic or self.cache.bounded:
            return None
        sibling, num_copied = self._siblings.get(request.request_id), seq.num_tokens - 1 - num_matched * BLOCK_SIZE
        if (
            sibling is not None
            and not seq.needs_all_logits
            and num_copied < BLOCK_SIZE
            and policy.is_worth_copying(num_copied)
            and seq.num_tokens == request.num_prompt_tokens <= sibling.num_computed
            and sibling.history[: len(seq.history)] == seq.history
        ):
            return sibling
        return None

    def fits(self, seq: Sequence) -> bool:
        """Whether `seq` could run here to its end, were it alone.

        One without an end of its own may also run here until it has outgrown this executor, and then elsewhere: while it
        takes no more than half of what could be held, so that what is computed again is never more than was gained.
        """
        capacity = self.capacity
        if not capacity.takes(seq.request):
            return False
        return capacity.holds(seq.max_total, seq.max_blocks) or (
            seq.is_open_ended and 2 * seq.num_tokens <= capacity.longest
        )

    def _end_of_computing(self, hashes: list[bytes], matched: int, most: int) -> int:
        """Up to which block, at least `matched` and at most `most`, the prefix will be there when others have computed it."""
        unit, end = self.cache.unit, matched
        while end < min(most, matched + unit - 1) and hashes[end] not in self._computing:
            end += 1  # what is computed of the next unit is no hit yet
        while end < most and hashes[end] in self._computing:
            end += 1
        return max(matched, end // unit * unit)

    def knows_prefix(self, seq: Sequence) -> bool:
        """Whether the first block of `seq` is here, or being computed."""
        return bool(seq.hashes) and self.knows(seq.hashes[0])

    def knows(self, block_hash: bytes) -> bool:
        return block_hash in self._computing or self.cache.holds(block_hash)

    def load(self) -> int:
        """The part of a newcomer's cost that is not its own."""
        return policy.executor_load(self._backlog + self._outstanding, self.num_running)

    @property
    def is_full(self) -> bool:
        """Whether nobody could be admitted here but by displacing others."""
        return self.is_held or bool(self.hungry) or self.num_running >= self.max_num_seqs or self.has_backlog

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs here, not even what was dropped just now."""
        return not self.sequences and not self.draining

    @property
    def has_backlog(self) -> bool:
        """Whether several sequences wait here for their chunks already."""
        return self._backlog >= 2 * self.room and self._num_prefilling.total() >= 2

    def _is_closed_to(self, priority: int) -> bool:
        """Whether a newcomer of that class would only wait here, or take a block that one as good as it needs."""
        if self.has_backlog and any(other <= priority for other in self._num_prefilling):
            return True
        return any(seq.priority <= priority for seq in self.hungry.values())

    @staticmethod
    def _num_sharable(seq: Sequence) -> int:
        """Leading blocks that `seq` could take from the cache: at least one token is left to compute."""
        if seq.needs_all_logits:
            return 0
        return (seq.num_tokens - 1) // BLOCK_SIZE

    def _cost(self, seq: Sequence, num_cached_blocks: int) -> int:
        return self.load() + seq.num_tokens - num_cached_blocks * BLOCK_SIZE

    def _num_short(self, seq: Sequence, num_matched: int) -> int:
        """Blocks that are lacking to admit `seq`."""
        wanted = blocks_for(seq.num_tokens) - num_matched + self.cache.num_idle(seq.hashes, num_matched)
        if self.num_running:
            wanted += policy.watermark(self.cache.num_blocks, self.num_running)
            if seq.was_preempted:
                wanted += policy.readmission_headroom(self.cache.num_blocks)
        return wanted - self.cache.num_free

    def victims_for(self, seq: Sequence) -> list[Sequence] | None:
        """Sequences of a lower priority class whose leaving would let `seq` in, worst first; None if none would do.

        None need leave where only `hungry` ones of a lower class keep the door shut.
        """
        priority = seq.request.priority  # not what waiting has made of it: that lets in, and displaces nobody
        if self._is_closed_to(seq.priority) or not any(p > priority for p in self._num_by_priority):
            return None
        lower = [s for s in self.sequences.values() if s.state is State.RUNNING and s.priority > priority]
        lower.sort(key=lambda s: s.rank, reverse=True)
        short = [
            self._num_short(seq, self.cache.num_matched(seq.hashes, self._num_sharable(seq))),
            self.num_running + 1 - self.max_num_seqs,
            *(group.num_short(seq.max_blocks) for group in self.cache.bounded),
        ]
        victims: list[Sequence] = []
        for victim in lower:
            if max(short) <= 0:
                break
            gains = (self.cache.num_exclusive(victim.tables), 1, *(share.charge for share in victim.shares))
            short = [lacking - gain for lacking, gain in zip(short, gains, strict=True)]
            victims.append(victim)
        return victims if max(short) <= 0 else None

    def follow(self, seq: Sequence, block_hash: bytes) -> None:
        """`seq` waits outside the queue until that block is computed, or its computation is given up."""
        self._by_hash_followers.setdefault(block_hash, []).append(seq)

    def admit(self, seq: Sequence, seq_id: int, plan: Plan) -> None:
        """Give `seq` its blocks, and order it in. Its hashes cover all full blocks of its history."""
        request, cache = seq.request, self.cache
        num_cached = plan.num_cached_blocks
        tables, shares = cache.admit(seq.hashes[:num_cached], seq.max_blocks)
        needed = blocks_for(seq.num_tokens)
        spare = max(0, cache.num_free - (needed - num_cached) - policy.watermark(cache.num_blocks, self.num_running))
        ahead = policy.affordable_ahead(self._ahead, spare, self.num_running + 1, self._num_grantable)
        wanted = min(seq.max_blocks, (seq.num_tokens + ahead) // BLOCK_SIZE + 1, needed + spare)
        # Windows and snapshots follow with each chunk.
        cache.grow(tables, shares, max(needed, wanted) - num_cached, num_cached)
        seq.state = State.RUNNING
        seq.executor = self
        seq.seq_id = seq_id
        seq.granted_total = seq.max_total
        seq.tables, seq.shares = tables, shares
        seq.prefill_end = seq.num_tokens
        seq.num_sent = seq.num_computed = seq.num_tokens - 1 if plan.copy_from else num_cached * BLOCK_SIZE
        seq.num_labelled = seq.num_own_from = num_cached
        self._set_limit(seq, ahead)
        self.sequences[seq_id] = seq
        self.num_running += 1
        self._num_by_priority[seq.priority] += 1
        if seq.hashes:
            self.new_first_blocks.append(seq.hashes[0])
        for i in range(num_cached, seq.num_tokens // BLOCK_SIZE):
            self._computing.setdefault(seq.hashes[i], seq)
        self._num_prefilling[seq.priority] += 1
        self._backlog += min(seq.num_unsent, self.room)
        self._prefill.add(seq)
        self._orders.append(
            Admit(
                seq_id=seq_id,
                num_tokens=seq.num_tokens,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=seq.num_computed,
                block_tables=[list(table) for table in tables],
                limit=seq.limit,
                max_total_tokens=seq.max_total,
                sampling=request.sampling,
                num_opaque_bytes=request.num_opaque_bytes,
                choice_index=request.choice_index,
                known_token_ids=bytes(seq.history[: 4 * seq.num_computed]) if request.needs_known_tokens else b"",
                prompt_logprobs_delivered=seq.prompt_logprobs_delivered,
                trace=request.trace,
            )
        )
        if plan.copy_from is not None:
            num_copied = seq.num_computed - num_cached * BLOCK_SIZE
            for group_idx, (theirs, ours) in enumerate(zip(plan.copy_from.tables, tables, strict=True)):
                self._orders.append(Copy(group_idx, theirs[num_cached], ours[num_cached], num_copied))
        if request.num_choices > 1:
            self._siblings.setdefault(request.request_id, seq)
        for share in shares:
            share.give_back(seq.num_computed)  # a snapshot is restored when the order is applied

    # -- running --------------------------------------------------------------------------------------

    def send_chunks(self) -> None:
        """Keep about two steps of chunks with the executor: it never waits, and what changes our mind is not far behind."""
        while self._outstanding < 2 * self.room:
            picked = self._prefill.next()
            if picked is None:
                return
            seq, is_shared = picked
            room = policy.shared_room(self.room) if is_shared else self.room
            start = seq.num_sent
            if seq.shares:
                room = min(room, reach(seq.shares, seq.max_blocks) * BLOCK_SIZE - start)
                if room < BLOCK_SIZE:
                    return  # until its last chunk is reported, and blocks have left the window
            end = policy.cut_chunk(start, seq.prefill_end, room)
            self._backlog -= min(seq.num_unsent, self.room)
            seq.num_sent = end
            self._backlog += min(seq.num_unsent, self.room)
            if seq.num_unsent == 0:
                self._note_all_sent(seq)
            self._outstanding += end - start
            self._prefill.resize(seq)
            if seq.shares:
                # After its last chunk it runs on by itself.
                num_granted = len(seq.tables[self._lead])
                self._extend(seq, 0, num_granted if end == seq.prefill_end else blocks_for(end), self._ahead)
            self._orders.append(Prefill(seq.seq_id, start, end, bytes(seq.history[4 * start : 4 * end])))

    def _note_all_sent(self, seq: Sequence) -> None:
        priority = seq.priority
        self._num_prefilling[priority] -= 1
        if not self._num_prefilling[priority]:
            del self._num_prefilling[priority]

    def note_times(self, report: Reported, now_s: float) -> None:
        """Let the look-ahead follow the time of a step, and that of a round trip."""
        mean_us = report.step_time_us / max(1, report.num_steps)
        if mean_us:
            self._step_time_us = mean_us if self._step_time_us == 0.0 else 0.9 * self._step_time_us + 0.1 * mean_us
        waiting = self._unacknowledged
        if waiting and waiting[0][0] <= report.last_batch_id:
            round_trip_us = 1e6 * (now_s - waiting[0][1]) - mean_us
            while waiting and waiting[0][0] <= report.last_batch_id:
                waiting.popleft()
            # A slow one counts at once, and is forgotten slowly.
            self._round_trip_us = max(round_trip_us, 0.95 * self._round_trip_us)
        self._ahead = policy.tokens_ahead(self._step_time_us, 1 + self.spec.num_draft_tokens, self._round_trip_us)

    def note_computed(self, seq: Sequence, num_computed: int) -> None:
        """A chunk of `seq` is done: positions below `num_computed` are in the cache."""
        num_computed = min(num_computed, seq.num_sent)
        if num_computed > seq.num_computed:
            self._outstanding -= max(0, min(num_computed, seq.prefill_end) - seq.num_computed)
            seq.num_computed = num_computed
            self._label_complete(seq)

    def note_tokens(self, seq: Sequence) -> None:
        """Tokens after the history's old end were reported, so all before the newest is in the cache.

        Called when the history has reached `next_check`, not for every token.
        """
        if seq.num_computed < seq.prefill_end:
            self.note_computed(seq, seq.prefill_end)
        seq.num_computed = max(seq.num_computed, seq.num_tokens - 1)
        self._label_complete(seq)
        self._count_ahead(seq)
        if seq.num_tokens >= seq.extend_at:
            self.grant(seq)
        self._set_next_check(seq)

    def grant(self, seq: Sequence) -> None:
        """Blocks for `seq` to run on, as many as memory allows; it goes hungry if that is not enough."""
        have = len(seq.tables[self._lead])
        num_free = self.cache.num_free
        ahead = policy.affordable_ahead(self._ahead, num_free, self.num_running, self._num_grantable)
        wanted = min(seq.max_blocks, (seq.num_tokens + ahead) // BLOCK_SIZE + 1)
        num_new = max(0, min(wanted - have, num_free))
        have += num_new
        if have < wanted:
            self.hungry[seq.seq_id] = seq
        else:
            self.hungry.pop(seq.seq_id, None)
        self._extend(seq, num_new, min(have, wanted), ahead)

    def _extend(self, seq: Sequence, num_new: int, num_blocks: int, ahead: int) -> None:
        """`num_new` more blocks where all are kept, windows and snapshots up to block `num_blocks`, and the order for it."""
        new = self.cache.grow(seq.tables, seq.shares, num_new, num_blocks)
        self._set_limit(seq, ahead)
        if any(new):
            self._orders.append(Extend(seq.seq_id, new, seq.limit))

    def is_urgent(self, seq: Sequence) -> bool:
        return policy.is_urgent(seq.num_tokens, len(seq.tables[self._lead]) * BLOCK_SIZE, self._ahead)

    def worst(self) -> Sequence | None:
        """Whom preemption takes first: the newest of the lowest priority."""
        running = (seq for seq in self.sequences.values() if seq.state is State.RUNNING)
        return max(running, key=lambda seq: seq.rank, default=None)

    def _count_ahead(self, seq: Sequence) -> None:
        """Keep the account of what is granted ahead."""
        num_ahead = len(seq.tables[self._lead]) - blocks_for(seq.num_tokens)
        self._num_grantable -= num_ahead - seq.num_ahead
        seq.num_ahead = num_ahead

    def _set_limit(self, seq: Sequence, ahead: int) -> None:
        self._count_ahead(seq)
        have = len(seq.tables[self._lead])
        if seq.shares:
            have = num_covered(seq.shares, have)
        seq.limit = have * BLOCK_SIZE
        seq.extend_at = NEVER if have >= seq.max_blocks else max(seq.limit - ahead, 0)
        if seq.shares and seq.extend_at <= seq.num_tokens:
            # A window was given less than wanted: again when it has moved on, or the sequence stands at its limit.
            next_release = min(share.next_release(seq.num_tokens - 1) for share in seq.shares)
            seq.extend_at = min(seq.limit, next_release) + 1
        self._set_next_check(seq)

    def _set_next_check(self, seq: Sequence) -> None:
        num_complete = seq.num_tokens // BLOCK_SIZE if seq.chain_broken else seq.num_labelled
        complete_at = (num_complete + 1) * BLOCK_SIZE + 1
        # A hungry sequence is looked after by `hungry`, not at every token.
        extend_at = NEVER if seq.seq_id in self.hungry else seq.extend_at
        first_token_at = seq.prefill_end + 1 if seq.num_computed < seq.prefill_end else NEVER
        seq.next_check = min(complete_at, extend_at, first_token_at)

    def _label_complete(self, seq: Sequence) -> None:
        complete = seq.num_computed // BLOCK_SIZE
        if complete > seq.num_labelled and not seq.chain_broken:
            self._label(seq, complete)
        for share in seq.shares:
            share.give_back(seq.num_computed)

    def _label(self, seq: Sequence, complete: int) -> None:
        """Give the blocks of `seq` before `complete` their labels."""
        seq.hash_blocks(complete, self.model, caching=self._caching)
        for i in range(seq.num_labelled, complete):
            block_hash = seq.hashes[i]
            for group_idx, (group, table) in enumerate(zip(self.cache.groups, seq.tables, strict=True)):
                block_id = group.labelled_as(table, i)
                if block_id == NO_BLOCK:
                    continue
                if group.pool.label(block_id, block_hash):
                    self._orders.label(group_idx, block_id, block_hash)
                elif not self.cache.bounded:
                    # A held twin has the label. A child of ours would outlive its parent there, so it gets none.
                    seq.chain_broken = True
                    self._stop_computing(seq)
                    return
                # With windows or states a hit often ends before what is held here, and twins are many: we go on.
            if i == 0:
                self.new_first_blocks.append(block_hash)
            seq.num_labelled = i + 1
            if self._computing.get(block_hash) is seq:
                self._wake(block_hash)

    # -- leaving --------------------------------------------------------------------------------------

    def leave(self, seq: Sequence) -> None:
        """`seq` has ended on the executor's side: its blocks are free at once."""
        self._stop_computing(seq)
        if seq.num_unsent > 0:
            self._note_all_sent(seq)
            self._backlog -= min(seq.num_unsent, self.room)
        self._outstanding -= max(0, min(seq.num_sent, seq.prefill_end) - min(seq.num_computed, seq.prefill_end))
        seq.prefill_end = seq.num_sent  # nothing is left to send under this id
        seq.next_check = NEVER
        self._num_grantable += seq.num_ahead
        seq.num_ahead = 0
        self.cache.release(seq.tables, seq.shares)
        self.hungry.pop(seq.seq_id, None)
        if self._siblings.get(seq.request.request_id) is seq:
            del self._siblings[seq.request.request_id]
        del self.sequences[seq.seq_id]
        self.num_running -= 1
        self._num_by_priority[seq.priority] -= 1
        if not self._num_by_priority[seq.priority]:
            del self._num_by_priority[seq.priority]

    def drop(self, seq: Sequence) -> None:
        """Order `seq` out. Its blocks may be handed out again at once, since orders are applied in order."""
        self.leave(seq)
        self.draining.append((self._orders.append(Drop(seq.seq_id)), seq.seq_id, seq))

    def drain(self, seq: Sequence) -> None:
        """Order `seq` out, but listen to it until its Drop is acknowledged."""
        self.drop(seq)
        self.sequences[seq.seq_id] = seq

    def acknowledged(self, last_batch_id: int) -> list[Sequence]:
        """Sequences that `drain` dropped and that will report no more."""
        done: list[Sequence] = []
        while self.draining and self.draining[0][0] <= last_batch_id:
            _, seq_id, seq = self.draining.popleft()
            if self.sequences.pop(seq_id, None) is not None:  # else nobody listens: it was cancelled
                done.append(seq)
        return done

    def owner(self, seq_id: int) -> Sequence | None:
        """Whose blocks these are or were: a cancelled sequence's too, until its Drop is acknowledged."""
        return self.sequences.get(seq_id) or next((seq for _, i, seq in self.draining if i == seq_id), None)

    def take_back_labels(self, seq: Sequence) -> None:
        """What `seq` computed is not to be trusted: nobody takes it up any more."""
        for group, table in zip(self.cache.groups, seq.tables, strict=True):
            for i in range(seq.num_own_from, seq.num_labelled):
                block_id = group.labelled_as(table, i)
                if group.pool.find(seq.hashes[i]) == block_id:  # it may have been dropped, and the block handed on
                    group.pool.unlabel(block_id)

    def all_followers(self) -> list[Sequence]:
        """For the end of the link: all who wait for a block here."""
        followers = [seq for waiting in self._by_hash_followers.values() for seq in waiting]
        self._by_hash_followers.clear()
        return followers + self.woken

    def _wake(self, block_hash: bytes) -> None:
        del self._computing[block_hash]
        self.woken.extend(self._by_hash_followers.pop(block_hash, ()))

    def _stop_computing(self, seq: Sequence) -> None:
        for i in range(seq.num_labelled, min(len(seq.hashes), seq.prefill_end // BLOCK_SIZE)):
            if self._computing.get(seq.hashes[i]) is seq:
                self._wake(seq.hashes[i])

    @property
    def num_granted_unwritten(self) -> int:
        """Blocks handed out that hold nothing yet."""
        return sum(
            len(seq.tables[self._lead])
            - blocks_for(max(seq.num_computed, seq.num_tokens - 1 if seq.num_tokens > seq.prefill_end else 0))
            for seq in self.sequences.values()
            if seq.state is State.RUNNING
        )

    def check(self, running: list[Sequence]) -> None:
        """AssertionError unless the sums kept along the way are those of `running`."""
        unsent = [seq.num_unsent for seq in running if seq.num_unsent > 0]
        assert self._num_prefilling.total() == len(unsent)
        num_ahead = sum(seq.num_ahead for seq in running)
        assert self._num_grantable == policy.most_ahead_blocks(self.cache.num_blocks) - num_ahead
        assert -self._num_grantable <= 2 * len(running), "more is granted ahead than may be"
        assert self._backlog == sum(min(n, self.room) for n in unsent)
        sent = sum(min(s.num_sent, s.prefill_end) - min(s.num_computed, s.prefill_end) for s in running)
        assert self._outstanding == sent, f"{self._outstanding} tokens outstanding, {sent} sent and not reported"
        for seq in running:
            num_granted = len(seq.tables[self._lead])
            assert seq.limit == num_covered(seq.shares, num_granted) * BLOCK_SIZE
            assert num_granted <= seq.max_blocks
            now_ahead = num_granted - blocks_for(seq.num_tokens)
            assert now_ahead <= seq.num_ahead <= now_ahead + 1 + self.spec.num_draft_tokens // BLOCK_SIZE
        assert {s.seq_id for s in self._computing.values()} <= {s.seq_id for s in running}
        assert {s.seq_id for s in self._siblings.values()} <= {s.seq_id for s in running}
        assert self.hungry.keys() <= {s.seq_id for s in running}
