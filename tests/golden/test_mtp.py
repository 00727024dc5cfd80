"""The MTP layer against transformers' own, teacher-forced and in `generate(use_mtp=True)`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.model.batch import Form, build_batch
from executor.weights import load_model

from .checkpoints import V3, YARN, random_tensors, write_checkpoint
from .harness import Blocks, new_cache, random_tokens

CONFIG = V3 | {"rope_parameters": YARN}
N = CONFIG["num_hidden_layers"]
TOLERANCE = 3e-5  # as in test_float32


def write(folder: Path, form: str) -> Path:
    """`shared`: the MTP layer's embedding and head are not stored; `stored`: they are, as in published checkpoints."""
    tensors = random_tensors(CONFIG, mtp=True)
    if form == "stored":
        tensors[f"model.layers.{N}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{N}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return write_checkpoint(folder, CONFIG, tensors, num_shards=2)


def load_oracle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from transformers import DeepseekV3ForCausalLM

    # transformers knows the published model's layer 61 only.
    pattern = [rf"model\.layers\.{N}\..*"]
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", pattern)
    return DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("form", ["shared", "stored"])
def test_teacher_forced(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_layers import MtpModel

    if not hasattr(MtpModel, "forward_layer"):
        pytest.skip("this release of transformers runs its MTP layers only inside generate, which the next test checks")
    folder = write(tmp_path, form)
    model = load_oracle(folder, monkeypatch)
    mtp = MtpModel.from_pretrained(model)
    ids = torch.tensor([random_tokens(70, seed=6)])
    with torch.inference_mode():
        states = model.model(ids).last_hidden_state
        positions = torch.arange(1, 70)[None]
        out = mtp.forward_layer(0, states[:, :-1], positions, None, input_ids=ids[:, 1:])
        expected = mtp._project_to_logits(out)[0]

    ours = load_model(folder, dtype=torch.float32)
    assert ours.has_mtp
    cache = new_cache(ours)
    table = Blocks(cache).take(69)
    tokens = ids[0].tolist()
    # Main and MTP layer, chunk by chunk and then token by token, over one cache.
    logits: list[torch.Tensor] = []
    edges = [0, 13, 64, *range(65, 70)]
    for start, end in itertools.pairwise(edges):
        kind = Form.PREFILL if start < 65 else Form.DECODE
        rows = range(end - start)
        main = build_batch([(tokens[start:end], start, table, kind)], rows, return_all_hidden=True)
        hidden = ours.forward(main, cache).all_hidden
        assert hidden is not None
        torch.testing.assert_close(hidden, states[0, start:end], rtol=0, atol=TOLERANCE)
        drafts = build_batch([(tokens[start + 1 : end + 1], start, table, kind)], rows)
        logits.append(ours.forward_mtp(drafts, hidden, cache).logits)
    ours_logits = torch.cat(logits)
    torch.testing.assert_close(ours_logits, expected, rtol=0, atol=TOLERANCE)
    assert torch.equal(ours_logits.argmax(-1), expected.argmax(-1))


def test_drafts_of_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft that transformers proposes while generating is ours after the same history."""
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    folder = write(tmp_path, "shared")
    model = load_oracle(folder, monkeypatch)
    drafts: list[tuple[list[int], int]] = []
    plain = MTPCandidateGenerator.get_candidates

    def spy(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        candidates, logits = plain(self, input_ids, *args, **kwargs)
        if candidates.shape[1] > input_ids.shape[1]:
            drafts.append((input_ids[0].tolist(), int(candidates[0, input_ids.shape[1]])))
        return candidates, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", spy)
    prompt = torch.tensor([random_tokens(9, seed=7)])
    model.generation_config.pad_token_id = 0
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, use_mtp=True
    )
    assert out.shape[1] == 21
    assert len(drafts) >= 6
    ours = load_model(folder, dtype=torch.float32)
    for history, draft in drafts:
        cache = new_cache(ours)
        table = Blocks(cache).take(len(history))
        known, last = history[:-1], history[-1]  # the last token has no state yet: it is the draft's input
        main = build_batch([(known, 0, table, Form.PREFILL)], return_all_hidden=True)
        first = ours.forward(main, cache)
        assert int(first.logits[0].argmax()) == last
        assert first.all_hidden is not None
        batch = build_batch([(history[1:], 0, table, Form.PREFILL)])
        assert int(ours.forward_mtp(batch, first.all_hidden, cache).logits[0].argmax()) == draft


def test_a_checkpoint_without_mtp_tensors_serves(tmp_path: Path) -> None:
    """transformers saves num_nextn_predict_layers = 1 and no such layer."""
    ours = load_model(write_checkpoint(tmp_path, CONFIG, random_tensors(CONFIG)), dtype=torch.float32)
    assert not ours.has_mtp
    assert ours.config.num_mtp_layers == 0
