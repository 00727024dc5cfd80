"""The decode set's state on the device: changes in, rows prepared, tokens taken back in. Compiled on CUDA, torch elsewhere.

A sequence of the decode set has a slot, a fixed place in the state; the rows of a step are a list of slots. A slot's
state is 16 words of int32 (`TOKEN` … `FIRST_STOP`), so that the host can change any of it by scattering words.
"""

from __future__ import annotations

import torch

from .abi import EmbedArgs, ScatterWordsArgs, StepAdvanceArgs, StepPrepareArgs
from .checks import check
from .loader import KernelLibrary, current_stream, load

BLOCK_SIZE = 64
TOKEN, POSITION, LIMIT, MAX_TOTAL, ACTIVE = range(5)
FIRST_STOP, NUM_STOPS = 8, 8
STATE_WORDS = 16

NOT_RUN, UNSOUND = -1, -2  # results of `step_advance` that are no tokens


def scatter_words(words: torch.Tensor, changes: torch.Tensor, *, library: KernelLibrary | None = None) -> None:
    """words[index] = value for each pair of `changes`, int32 [num_changes, 2]; no index may occur twice.

    words: int32, contiguous, any shape; indices count its words.
    """
    check("changes", changes, (None, 2), torch.int32, words.device, contiguous_dims=2)
    if not words.is_contiguous() or words.dtype != torch.int32:
        raise ValueError(f"words: needs contiguous int32, got {words.dtype} with strides {words.stride()}")
    if library is None:
        if words.device.type != "cuda":
            words.view(-1)[changes[:, 0].long()] = changes[:, 1]
            return
        library = load()
    args = ScatterWordsArgs(words=words.data_ptr(), changes=changes.data_ptr(), num_changes=changes.shape[0])
    library.call("rorqual_scatter_words", args, current_stream(words.device))


def step_prepare(
    slots: torch.Tensor,
    state: torch.Tensor,
    block_tables: torch.Tensor,
    embedding: torch.Tensor,
    *,
    x: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_lens: torch.Tensor,
    row_tables: torch.Tensor,
    new_positions: torch.Tensor,
    active: torch.Tensor,
    library: KernelLibrary | None = None,
) -> None:
    """What the kernels of a step need of each row, from the state of its slot.

    slots: int32 [num_rows], -1 for padding. state: int32 [num_slots, 16]; block_tables: int32 [num_slots, n].
    A row runs (`active`, uint8 [num_rows]) if its sequence has not ended and its newest token lies below its limit;
    `new_positions`, int32 [num_rows], is the position of the token that it will choose.
    The first rows, as many as `x` has, also compute their newest token: x, [num_compute_rows, hidden] bf16, gets its
    embedding (of `embedding`, [vocab, hidden] bf16); positions and slot_mapping (int64), kv_lens (int32, the newest
    token counted) and row_tables (int32 [num_compute_rows, n]) what attention asks for; where a row does not run,
    slot_mapping is -1 and kv_lens 0.
    """
    device = state.device
    check("slots", slots, (None,), torch.int32, device)
    num_rows, num_compute_rows = slots.shape[0], x.shape[0]
    check("state", state, (None, STATE_WORDS), torch.int32, device, contiguous_dims=2)
    check("block_tables", block_tables, (state.shape[0], None), torch.int32, device)
    check("embedding", embedding, (None, None), torch.bfloat16, device, contiguous_dims=2)
    check("x", x, (None, embedding.shape[1]), torch.bfloat16, device, contiguous_dims=2)
    check("positions", positions, (num_compute_rows,), torch.int64, device)
    check("slot_mapping", slot_mapping, (num_compute_rows,), torch.int64, device)
    check("kv_lens", kv_lens, (num_compute_rows,), torch.int32, device)
    check("row_tables", row_tables, (num_compute_rows, block_tables.shape[1]), torch.int32, device)
    check("new_positions", new_positions, (num_rows,), torch.int32, device)
    check("active", active, (num_rows,), torch.uint8, device)
    if library is None:
        if device.type != "cuda":
            at = slots.clamp(min=0).long()
            rows = state[at]
            runs = (slots >= 0) & (rows[:, ACTIVE] != 0) & (rows[:, POSITION] < rows[:, LIMIT])
            zero = torch.zeros_like(rows[:, POSITION])
            position = torch.where(runs, rows[:, POSITION], zero)
            active.copy_(runs)
            new_positions.copy_(torch.where(runs, position + 1, zero))
            n = num_compute_rows
            runs, position = runs[:n], position[:n].long()
            tables = block_tables[at[:n]]
            blocks = tables.gather(1, (position // BLOCK_SIZE)[:, None])[:, 0].long() if n else position
            positions.copy_(position)
            slot_mapping.copy_(torch.where(runs, blocks * BLOCK_SIZE + position % BLOCK_SIZE, -1))
            kv_lens.copy_(torch.where(runs, position + 1, 0))
            held = torch.arange(tables.shape[1]) * BLOCK_SIZE < kv_lens[:, None]
            row_tables.copy_(torch.where(held, tables, row_tables))
            x.copy_(embedding[torch.where(runs, rows[:n, TOKEN], zero[:n]).long()])
            return
        library = load()
    args = StepPrepareArgs(
        slots=slots.data_ptr(),
        state=state.data_ptr(),
        block_tables=block_tables.data_ptr(),
        embedding=embedding.data_ptr(),
        x=x.data_ptr(),
        positions=positions.data_ptr(),
        slot_mapping=slot_mapping.data_ptr(),
        kv_lens=kv_lens.data_ptr(),
        row_tables=row_tables.data_ptr(),
        new_positions=new_positions.data_ptr(),
        active=active.data_ptr(),
        block_table_stride=block_tables.stride(0),
        row_table_stride=row_tables.stride(0),
        num_rows=num_rows,
        num_compute_rows=num_compute_rows,
        hidden=embedding.shape[1],
    )
    library.call("rorqual_step_prepare", args, current_stream(device))


def step_advance(
    slots: torch.Tensor,
    state: torch.Tensor,
    *,
    tokens: torch.Tensor,
    sound: torch.Tensor,
    active: torch.Tensor,
    results: torch.Tensor,
    library: KernelLibrary | None = None,
) -> None:
    """Each row that ran takes its token: the state moves on by one position, or ends (stop token, budget, fault).

    tokens: int32 [num_rows], chosen; sound: uint8 [num_rows], 0 where the logits were not finite; active: as
    `step_prepare` left it. results, int32 [num_rows], gets the token, NOT_RUN or UNSOUND.
    """
    device = state.device
    check("slots", slots, (None,), torch.int32, device)
    num_rows = slots.shape[0]
    check("state", state, (None, STATE_WORDS), torch.int32, device, contiguous_dims=2)
    check("tokens", tokens, (num_rows,), torch.int32, device)
    check("sound", sound, (num_rows,), torch.uint8, device)
    check("active", active, (num_rows,), torch.uint8, device)
    check("results", results, (num_rows,), torch.int32, device)
    if library is None:
        if device.type != "cuda":
            for row in torch.nonzero(active).flatten().tolist():
                words = state[int(slots[row])]
                if not sound[row]:
                    results[row] = UNSOUND
                    words[ACTIVE] = 0
                    continue
                token = results[row] = tokens[row]
                stops = words[FIRST_STOP : FIRST_STOP + NUM_STOPS]
                ended = bool((stops == token).any()) or int(words[POSITION]) + 2 >= int(words[MAX_TOTAL])
                words[TOKEN] = token
                words[POSITION] += 1
                if ended:
                    words[ACTIVE] = 0
            results[active == 0] = NOT_RUN
            return
        library = load()
    args = StepAdvanceArgs(
        state=state.data_ptr(),
        slots=slots.data_ptr(),
        tokens=tokens.data_ptr(),
        sound=sound.data_ptr(),
        active=active.data_ptr(),
        results=results.data_ptr(),
        num_rows=num_rows,
    )
    library.call("rorqual_step_advance", args, current_stream(device))


def embed(
    token_ids: torch.Tensor, embedding: torch.Tensor, x: torch.Tensor, *, library: KernelLibrary | None = None
) -> None:
    """x[i] = embedding[token_ids[i]]. token_ids: int32 [num_rows]; embedding: [vocab, hidden] and x: [num_rows,
    hidden], bf16."""
    device = embedding.device
    check("token_ids", token_ids, (None,), torch.int32, device)
    check("embedding", embedding, (None, None), torch.bfloat16, device, contiguous_dims=2)
    check("x", x, (token_ids.shape[0], embedding.shape[1]), torch.bfloat16, device, contiguous_dims=2)
    if library is None:
        if device.type != "cuda":
            x.copy_(embedding[token_ids.long()])
            return
        library = load()
    args = EmbedArgs(
        x=x.data_ptr(),
        embedding=embedding.data_ptr(),
        token_ids=token_ids.data_ptr(),
        num_rows=token_ids.shape[0],
        hidden=embedding.shape[1],
    )
    library.call("rorqual_embed", args, current_stream(device))
