"""The embedded model in plain torch: the training forward, a cached step for sampling, and its checkpoint.

It computes what DeepSeek-V3 computes (arXiv:2412.19437, sections 2.1 and 2.2) in a form that suits a model
of 19 million parameters: all experts of a layer are one wide gated MLP whose hidden units are multiplied by
the routing weights (zero for experts not chosen), and attention is two batched products under a mask
of documents. B is rows of a batch, L their length, D the hidden size, H heads, E experts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The fields of config.json that the arithmetic needs, under their published names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    rope_theta: float
    rms_norm_eps: float

    @classmethod
    def read(cls, path: Path) -> Shape:
        config = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in x's dtype; the weight is kept in float32 while training."""
    return F.linear(x, weight.to(x.dtype))


class Norm(nn.Module):
    """Root-mean-square norm, in float32 whatever the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * y.to(x.dtype)


def rope_table(length: int, dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i/dim): two [length, dim / 2] float32 tables."""
    inverse = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    angle = torch.arange(length, dtype=torch.float32, device=device)[:, None] * inverse
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs (x0, x1), (x2, x3), ... of x [..., L, dim]; pairs come out split in halves.

    Queries and keys are rearranged alike, so their products are those of the published convention.
    """
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1).to(x.dtype)


def among_top(x: Tensor, count: int) -> Tensor:
    """Whether each entry is among the `count` largest of its last dimension; of equal ones the first counts as larger.

    By counting the larger ones: over 4 or 16 entries this fuses with its neighbours, where a sort does not.
    """
    mine, other = x[..., :, None], x[..., None, :]
    place = torch.arange(x.shape[-1], device=x.device)
    earlier = place[None, :] < place[:, None]
    return ((other > mine) | ((other == mine) & earlier)).sum(-1) < count


class Attention(nn.Module):
    """Multi-head latent attention, non-absorbed."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        heads, qk = s.num_attention_heads, s.qk_nope_head_dim + s.qk_rope_head_dim
        self.q_a = nn.Parameter(torch.empty(s.q_lora_rank, s.hidden_size))
        self.q_norm = Norm(s.q_lora_rank, s.rms_norm_eps)
        self.q_b = nn.Parameter(torch.empty(heads * qk, s.q_lora_rank))
        self.kv_a = nn.Parameter(torch.empty(s.kv_lora_rank + s.qk_rope_head_dim, s.hidden_size))
        self.kv_norm = Norm(s.kv_lora_rank, s.rms_norm_eps)
        self.kv_b = nn.Parameter(torch.empty(heads * (s.qk_nope_head_dim + s.v_head_dim), s.kv_lora_rank))
        self.o = nn.Parameter(torch.zeros(s.hidden_size, heads * s.v_head_dim))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, L, D] -> q and k [B, H, L, nope + rope], v [B, H, L, v]."""
        s = self.s
        batch, length, _ = x.shape
        heads = s.num_attention_heads
        q = linear(self.q_norm(linear(x, self.q_a)), self.q_b).view(batch, length, heads, -1).transpose(1, 2)
        q_nope, q_pe = q.split((s.qk_nope_head_dim, s.qk_rope_head_dim), -1)
        c_kv, k_pe = linear(x, self.kv_a).split((s.kv_lora_rank, s.qk_rope_head_dim), -1)
        kv = linear(self.kv_norm(c_kv), self.kv_b).view(batch, length, heads, -1).transpose(1, 2)
        k_nope, v = kv.split((s.qk_nope_head_dim, s.v_head_dim), -1)
        k_pe = rotate(k_pe, cos, sin)[:, None].expand(batch, heads, length, s.qk_rope_head_dim)
        return torch.cat((q_nope, rotate(q_pe, cos, sin)), -1), torch.cat((k_nope, k_pe), -1), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """-> [B, L, D]; `mask` [B, 1, L, L] is true where a query may look."""
        scores = (q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        out = torch.softmax(scores, -1).to(v.dtype) @ v
        return linear(out.transpose(1, 2).flatten(2), self.o)


class DenseMlp(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2, s.intermediate_size, s.hidden_size))
        self.down = nn.Parameter(torch.zeros(s.hidden_size, s.intermediate_size))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = linear(x, self.gate_up.flatten(0, 1)).chunk(2, -1)
        return linear(F.silu(gate) * up, self.down)


class Moe(nn.Module):
    """Routed experts 0..E-1 and the shared one, stored last in the same tensors."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.router = nn.Parameter(torch.empty(s.n_routed_experts, s.hidden_size))
        self.register_buffer("bias", torch.zeros(s.n_routed_experts))
        self.gate_up = nn.Parameter(torch.empty(2, s.n_routed_experts + 1, s.moe_intermediate_size, s.hidden_size))
        self.down = nn.Parameter(torch.zeros(s.n_routed_experts + 1, s.hidden_size, s.moe_intermediate_size))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, D] -> weights [N, E], chosen [N, E] (0 or 1) and scores [N, E], all float32.

        Sigmoid scores; the bias moves the choice only. The groups with the best two experts are kept first.
        """
        s = self.s
        scores = torch.sigmoid(F.linear(x.float(), self.router.float()))
        biased = (scores.detach() + self.bias).view(-1, s.n_group, s.n_routed_experts // s.n_group)
        groups = (biased * among_top(biased, 2)).sum(-1)
        biased = biased.masked_fill(~among_top(groups, s.topk_group)[..., None], float("-inf")).flatten(1)
        chosen = among_top(biased, s.num_experts_per_tok).float()
        weights = scores * chosen
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * s.routed_scaling_factor
        return weights, chosen, scores

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, L, D] -> output, tokens an expert got [E], and the balance loss (a number)."""
        flat = x.flatten(0, 1)
        weights, chosen, scores = self.route(flat)
        gate, up = linear(flat, self.gate_up.flatten(0, 2)).chunk(2, -1)
        hidden = (F.silu(gate) * up).view(flat.shape[0], -1, self.s.moe_intermediate_size)
        weights = torch.cat((weights, torch.ones_like(weights[:, :1])), -1).to(x.dtype)
        hidden = (hidden * weights[..., None]).flatten(1)
        out = linear(hidden, self.down.transpose(0, 1).flatten(1))
        load = chosen.sum(0)
        share = (scores / scores.sum(-1, keepdim=True)).mean(0)
        balance = (load / load.sum() * share).sum() * self.s.n_routed_experts
        return out.view_as(x), load, balance


class Layer(nn.Module):
    def __init__(self, s: Shape, dense: bool) -> None:
        super().__init__()
        self.attention_norm = Norm(s.hidden_size, s.rms_norm_eps)
        self.attention = Attention(s)
        self.mlp_norm = Norm(s.hidden_size, s.rms_norm_eps)
        self.mlp: DenseMlp | Moe = DenseMlp(s) if dense else Moe(s)


class Mtp(nn.Module):
    """The multi-token-prediction layer: from the main model's normed output at i and token i+1, token i+2."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.token_norm = Norm(s.hidden_size, s.rms_norm_eps)
        self.hidden_norm = Norm(s.hidden_size, s.rms_norm_eps)
        self.join = nn.Parameter(torch.empty(s.hidden_size, 2 * s.hidden_size))
        self.layer = Layer(s, dense=False)
        self.norm = Norm(s.hidden_size, s.rms_norm_eps)


class TinyModel(nn.Module):
    def __init__(self, s: Shape, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.s, self.dtype = s, dtype
        self.embedding = nn.Parameter(torch.empty(s.vocab_size, s.hidden_size))
        self.layers = nn.ModuleList(Layer(s, dense=i < s.first_k_dense_replace) for i in range(s.num_hidden_layers))
        self.norm = Norm(s.hidden_size, s.rms_norm_eps)
        self.head = nn.Parameter(torch.zeros(s.vocab_size, s.hidden_size))
        self.mtp = Mtp(s)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Output matrices start at zero, inputs near 1 / sqrt(fan-in), embeddings at 0.5."""
        for name, p in self.named_parameters():
            if p.ndim < 2 or name == "head" or name.endswith((".o", ".down")):
                continue
            scale = 0.5 if name == "embedding" else 0.02 if name.endswith("router") else p.shape[-1] ** -0.5 * 0.6
            p.copy_(torch.randn(p.shape, generator=generator) * scale)

    def moes(self) -> list[Moe]:
        """Every mixture of the model, the MTP layer's last."""
        return [layer.mlp for layer in [*self.layers, self.mtp.layer] if isinstance(layer.mlp, Moe)]

    def _block(
        self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x = x + layer.attention.attend(*layer.attention.project(layer.attention_norm(x), cos, sin), mask)
        if isinstance(layer.mlp, DenseMlp):
            return x + layer.mlp(layer.mlp_norm(x)), None, None
        out, load, balance = layer.mlp(layer.mlp_norm(x))
        return x + out, load, balance

    def forward(self, tokens: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """tokens, document [B, L] -> logits [B, L, V] (at i: token i+1), MTP logits [B, L, V] (at i: token i+2; the
        last is meaningless), loads [num MoE, E] and the mean balance loss. Positions see their own document only.
        """
        mask, cos, sin = self._frame(tokens, document)
        embedded = F.embedding(tokens, self.embedding).to(self.dtype)
        x = embedded
        loads, balances = [], []
        for layer in self.layers:
            x, load, balance = self._block(layer, x, cos, sin, mask)
            if load is not None and balance is not None:
                loads.append(load)
                balances.append(balance)
        hidden = self.norm(x)
        following = torch.cat((embedded[:, 1:], embedded[:, :1]), 1)
        x = linear(torch.cat((self.mtp.token_norm(following), self.mtp.hidden_norm(hidden)), -1), self.mtp.join)
        x, load, balance = self._block(self.mtp.layer, x, cos, sin, mask)
        assert load is not None
        assert balance is not None
        loads.append(load)
        balances.append(balance)
        return (
            linear(hidden, self.head),
            linear(self.mtp.norm(x), self.head),
            torch.stack(loads),
            torch.stack(balances).mean(),
        )

    def hidden(self, tokens: Tensor, document: Tensor) -> Tensor:
        """The main model's normed output, [B, L, D]; arguments as of `forward`."""
        mask, cos, sin = self._frame(tokens, document)
        x = F.embedding(tokens, self.embedding).to(self.dtype)
        for layer in self.layers:
            x, _, _ = self._block(layer, x, cos, sin, mask)
        return self.norm(x)

    def _frame(self, tokens: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Who may see whom [B, 1, L, L], and the rotation tables."""
        length = tokens.shape[1]
        cos, sin = rope_table(length, self.s.qk_rope_head_dim, self.s.rope_theta, tokens.device)
        place = torch.arange(length, device=tokens.device)
        same = document[:, :, None] == document[:, None, :]
        return (same & (place[:, None] >= place[None, :]))[:, None], cos, sin

    def step(self, tokens: Tensor, cache: list[tuple[Tensor, Tensor]], position: int) -> Tensor:
        """One token a row, all rows at `position`: tokens [B] -> logits [B, V] float32; keys and values join `cache`.

        `cache` holds, for each layer, keys [B, H, Lmax, nope + rope] and values [B, H, Lmax, v].
        """
        cos, sin = rope_table(position + 1, self.s.qk_rope_head_dim, self.s.rope_theta, tokens.device)
        x = F.embedding(tokens, self.embedding).to(self.dtype)[:, None]
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            q, k, v = layer.attention.project(layer.attention_norm(x), cos[-1:], sin[-1:])
            keys[:, :, position : position + 1], values[:, :, position : position + 1] = k, v
            x = x + layer.attention.attend(q, keys[:, :, : position + 1], values[:, :, : position + 1], None)
            out = layer.mlp(layer.mlp_norm(x))
            x = x + (out[0] if isinstance(out, tuple) else out)
        return linear(self.norm(x[:, 0]), self.head).float()

    def new_cache(self, rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
        s, device = self.s, self.embedding.device
        qk = s.qk_nope_head_dim + s.qk_rope_head_dim
        return [
            (
                torch.empty(rows, s.num_attention_heads, length, qk, dtype=self.dtype, device=device),
                torch.empty(rows, s.num_attention_heads, length, s.v_head_dim, dtype=self.dtype, device=device),
            )
            for _ in self.layers
        ]


def published_names(model: TinyModel) -> dict[str, Tensor]:
    """The model's tensors under the names of the published DeepSeek-V3 checkpoints (views, not copies).

    The MTP layer comes after the last layer; its embedding and head are the main model's and are left out.
    """
    out = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.head,
    }
    mtp = model.mtp
    for i, layer in enumerate([*model.layers, mtp.layer]):
        p, a, mlp = f"model.layers.{i}.", layer.attention, layer.mlp
        out[p + "input_layernorm.weight"] = layer.attention_norm.weight
        out[p + "post_attention_layernorm.weight"] = layer.mlp_norm.weight
        out[p + "self_attn.q_a_proj.weight"] = a.q_a
        out[p + "self_attn.q_a_layernorm.weight"] = a.q_norm.weight
        out[p + "self_attn.q_b_proj.weight"] = a.q_b
        out[p + "self_attn.kv_a_proj_with_mqa.weight"] = a.kv_a
        out[p + "self_attn.kv_a_layernorm.weight"] = a.kv_norm.weight
        out[p + "self_attn.kv_b_proj.weight"] = a.kv_b
        out[p + "self_attn.o_proj.weight"] = a.o
        if isinstance(mlp, DenseMlp):
            out[p + "mlp.gate_proj.weight"], out[p + "mlp.up_proj.weight"] = mlp.gate_up[0], mlp.gate_up[1]
            out[p + "mlp.down_proj.weight"] = mlp.down
            continue
        out[p + "mlp.gate.weight"] = mlp.router
        out[p + "mlp.gate.e_score_correction_bias"] = mlp.bias
        for e in range(mlp.s.n_routed_experts + 1):
            q = p + (f"mlp.experts.{e}." if e < mlp.s.n_routed_experts else "mlp.shared_experts.")
            out[q + "gate_proj.weight"], out[q + "up_proj.weight"] = mlp.gate_up[0, e], mlp.gate_up[1, e]
            out[q + "down_proj.weight"] = mlp.down[e]
    p = f"model.layers.{len(model.layers)}."
    out[p + "enorm.weight"], out[p + "hnorm.weight"] = mtp.token_norm.weight, mtp.hidden_norm.weight
    out[p + "eh_proj.weight"], out[p + "shared_head.norm.weight"] = mtp.join, mtp.norm.weight
    return out


@torch.no_grad()
def save_checkpoint(model: TinyModel, path: Path) -> None:
    """Write model.safetensors: BF16, the routing bias in float32.

    The bias is shifted so that its least entry is zero: the choice is the same, and biased scores stay positive
    for code that marks the experts of closed groups with zero instead of minus infinity.
    """
    tensors = {}
    for name, tensor in published_names(model).items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = (tensor - tensor.min()).float().cpu().clone()
        else:
            tensors[name] = tensor.detach().to(torch.bfloat16).cpu().contiguous().clone()
    save_file(tensors, str(path), metadata={"format": "pt"})


@torch.no_grad()
def load_checkpoint(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> TinyModel:
    """Read config.json and model.safetensors of `folder`; activations are of `dtype`, the weights too."""
    model = TinyModel(Shape.read(folder / "config.json"), dtype)
    stored = load_file(str(folder / "model.safetensors"))
    views = published_names(model)
    if stored.keys() != views.keys():
        raise ValueError(f"{folder}: tensors differ: {sorted(stored.keys() ^ views.keys())[:4]}")
    for name, view in views.items():
        view.copy_(stored[name])
    for moe in model.moes():
        moe.bias.data = moe.bias.float()
    model = model.to(device)
    for name, p in model.named_parameters():
        if not name.endswith("router"):
            p.data = p.data.to(dtype)
    return model.eval()
