"""The argument structs of csrc/include/rorqual/abi.h, field for field."""

from __future__ import annotations

import ctypes
from typing import ClassVar

_PTR, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def _fields(**groups: str) -> list[tuple[str, type]]:
    """ptr="a b", i64="c" … in that order."""
    types: dict[str, type] = {"ptr": _PTR, "i64": _I64, "i32": _I32, "f32": _F32}
    return [(name, types[kind]) for kind, names in groups.items() for name in names.split()]


class RmsNormArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ptr="out residual x weight",
        i64="out_stride residual_stride x_stride",
        i32="num_rows hidden",
        f32="eps",
    )


class MlaStoreArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ptr="cache latent_out q_pe c_kv k_pe norm_weight cos_sin positions slot_mapping",
        i64="cache_block_stride c_kv_stride k_pe_stride q_pe_token_stride q_pe_head_stride",
        i32="num_tokens num_heads",
        f32="eps",
    )


class MlaPlanArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ptr="plan kv_lens q_starts",
        i32="batch num_parts split_blocks min_units overhead_blocks split_capacity group_splits",
    )


class MlaDecodeArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ptr="q_latent q_pe cache out lse block_tables kv_lens q_starts plan partial_out partial_lse",
        i64="q_latent_token_stride q_latent_head_stride q_pe_token_stride q_pe_head_stride "
        "out_token_stride out_head_stride block_table_stride cache_block_stride num_blocks",
        i32="batch num_heads max_q_len num_parts split_blocks split_capacity kernel group_splits",
        f32="softmax_scale",
    )


class MoeRouteArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ptr="topk_ids topk_weights logits bias",
        i64="logits_stride",
        i32="num_tokens num_experts top_k num_groups topk_group sigmoid group_by_two normalize num_shared",
        f32="scale",
    )


class MoePermuteArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ptr="expert_starts choice_of row_of counts topk_ids",
        i32="num_choices num_experts row_alignment",
    )


# ---- experts ----


class ExpertsArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ptr="y h groups expert_starts row_of chunk_counts x topk_ids gate_up down",
        i64="x_stride row_capacity",
        i32="num_tokens top_k num_experts hidden width group_tokens few paired even num_ctas",
    )


class ExpertsCombineArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ptr="residual normed norm_weight y row_of topk_weights",
        i64="residual_stride normed_stride",
        i32="num_tokens top_k hidden",
        f32="eps",
    )


# ---- prefill ----
class MlaPrefillArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ptr="out lse state plan q kv k_pe",
        i64="q_token_stride q_head_stride kv_token_stride kv_head_stride k_pe_stride out_token_stride out_head_stride",
        i32="num_tokens num_keys num_heads num_tiles heads_per_group",
        f32="softmax_scale",
    )


class GatherLatentsArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ptr="out cache block_tables k_starts",
        i64="cache_block_stride block_table_stride",
        i32="num_rows batch key_begin",
    )


# ---- sampling ----
class SampleArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ptr="out_tokens out_sound out_logprobs out_ranks out_top_ids out_top_logprobs workspace logits slots positions "
        "active targets records bias states masks",
        i64="workspace_bytes logits_stride pool_stride mask_stride",
        i32="num_rows vocab_size workspace_rows positions_bytes active_bytes num_top",
    )


# ---- step state ----


class ScatterWordsArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(ptr="words changes", i32="num_changes")


class StepPrepareArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ptr="slots state block_tables embedding x positions slot_mapping kv_lens row_tables new_positions active",
        i64="block_table_stride row_table_stride",
        i32="num_rows num_compute_rows hidden",
    )


class StepAdvanceArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(ptr="state slots tokens sound active results", i32="num_rows")


class EmbedArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(ptr="x embedding token_ids", i32="num_rows hidden")


# ---- linear ----


class LinearArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ptr="out x weight bias residual",
        i64="out_token_stride out_batch_stride x_token_stride x_batch_stride residual_stride",
        i32="num_tokens out_features in_features batch out_float32 silu_mul tile_rows tile_tokens split parts",
    )


class GemmArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ptr="gemm_ex handle out x weight",
        i64="out_stride x_stride",
        i32="num_tokens out_features in_features out_float32",
        f32="beta",
    )


# ---- layers ----


class Launch(ctypes.Structure):
    _fields_: ClassVar = _fields(ptr="function args stream")


class OwnPointer(ctypes.Structure):
    _fields_: ClassVar = _fields(ptr="field", i32="pointer")


class RunLayersArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(
        ptr="launches own_pointers pointers", i32="num_launches num_own_pointers num_layers num_pointers"
    )


class StreamWaitArgs(ctypes.Structure):
    _fields_: ClassVar = _fields(ptr="event other")
