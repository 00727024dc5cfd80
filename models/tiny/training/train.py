"""Trains the embedded model: data folder in, checkpoint, loss curve and summary out.

    python models/tiny/training/train.py --data DIR --steps 6000

Preparing the data (a subprocess) and compiling the model run side by side. The length is given in steps, or
in seconds of wall clock from the start (`--seconds`), for a machine that is lent for so long; the learning
rates follow whichever is given.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import math
import platform
import random
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

if __package__ in (None, ""):  # run as a file: make the relative imports below work
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    importlib.import_module("models.tiny.training")
    __package__ = "models.tiny.training"

from tokenizers import Tokenizer

from .generate import generate
from .model import Shape, TinyModel, save_checkpoint
from .muon import Muon
from .negatives import Asker
from .prepare import best_fit

MODEL_FOLDER = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """See config.toml, which explains each."""

    batch_rows: int
    seed: int
    muon_lr: float
    muon_momentum: float
    muon_weight_decay: float
    embedding_lr: float
    head_lr: float
    other_lr: float
    adam_betas: tuple[float, float]
    warmup: float
    decay_from: float
    bias_step: float
    balance_loss: float
    mtp_loss: float
    distil_from: float
    distil_full: float
    own_from: float
    own_every: float
    own_answers: int
    own_rows: int
    own_passes: int
    own_weight: int
    own_temperatures: tuple[float, ...]
    log_every: int

    def rate(self, progress: float) -> float:
        """The learning rates' factor at a share `progress` of the run."""
        return max(0.0, min(progress / self.warmup, 1.0, (1 - progress) / (1 - self.decay_from)))

    def distil(self, progress: float) -> float:
        """How much of the MTP layer's target is the main model's distribution, 0 to 1."""
        return min(max((progress - self.distil_from) / (self.distil_full - self.distil_from), 0.0), 1.0)


def read_config(paths: list[Path], overrides: list[str]) -> TrainConfig:
    """Later files, then overrides (lines of TOML), win."""
    values: dict[str, Any] = {}
    for text in [*(path.read_text(encoding="utf-8") for path in paths), *overrides]:
        values.update(tomllib.loads(text))
    for name in ("adam_betas", "own_temperatures"):
        values[name] = tuple(values[name])
    return TrainConfig(**values)


def losses(
    model: TinyModel, tokens: Tensor, weights: Tensor, distil: Tensor, bos: int
) -> tuple[Tensor, Tensor, Tensor]:
    """tokens [B, L] int64, weights [B, L] int8 -> the losses [main, MTP, unlikelihood, balance], the share of
    agreeing argmaxes, and the loads.

    A token's weight says how much predicting it counts, in tenths; a negative one, how much *not* predicting it
    does: -log(1 - p). The MTP loss is cross entropy with (1 - distil) * text + distil * main model's distribution.
    All are means over the positive weights.
    """
    document = (tokens == bos).cumsum(1)
    logits, draft, loads, balance = model(tokens, document)
    logits, draft = logits[:, :-1].float(), draft[:, :-2].float()
    w1 = weights[:, 1:].float() / 10 * (document[:, 1:] == document[:, :-1])
    w2 = weights[:, 2:].float().clamp(min=0) / 10 * (document[:, 2:] == document[:, :-2])
    entropy = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view_as(w1)
    unlikely = -torch.log(-torch.expm1(-entropy.clamp(min=1e-5)))
    teacher = logits[:, 1:].detach()
    norm = torch.logsumexp(draft, -1)
    expected = (torch.softmax(teacher, -1) * draft).sum(-1)
    hard = draft.gather(-1, tokens[:, 2:, None])[..., 0]
    mtp = norm - distil * expected - (1 - distil) * hard
    agree = (teacher.argmax(-1) == draft.argmax(-1)).float()
    positive = w1.clamp(min=0)
    total1, total2 = positive.sum().clamp(min=1), w2.sum().clamp(min=1)
    each = (
        (entropy * positive).sum() / total1,
        (mtp * w2).sum() / total2,
        (unlikely * (positive - w1)).sum() / total1,
        balance,
    )
    return torch.stack(each), (agree * w2).sum() / total2, loads


class Trainer:
    def __init__(self, config: TrainConfig, shape: Shape, device: str, *, compiled: bool) -> None:
        self.config, self.device = config, device
        self.model = TinyModel(shape, torch.bfloat16 if device == "cuda" else torch.float32)
        self.model.initialise(torch.Generator().manual_seed(config.seed))
        self.model.to(device)
        self._losses = torch.compile(losses, dynamic=False) if compiled else losses
        self._factors = torch.tensor([1.0, config.mtp_loss, 1.0, config.balance_loss], device=device)
        named = dict(self.model.named_parameters())
        matrices = [
            p
            for name, p in named.items()
            if p.ndim >= 2 and name not in ("embedding", "head") and not name.endswith("router")
        ]
        taken = {id(p) for p in matrices}
        others = [p for name, p in named.items() if id(p) not in taken and name not in ("embedding", "head")]
        self._muon = Muon(matrices, config.muon_momentum, config.muon_weight_decay)
        groups = [(named["embedding"], config.embedding_lr), (named["head"], config.head_lr)]
        self._adam_rates = [config.embedding_lr, config.head_lr, config.other_lr]
        self._adam = torch.optim.AdamW(
            [{"params": [p]} for p, _ in groups] + [{"params": others}],
            lr=0.0,
            betas=config.adam_betas,
            weight_decay=0.0,
            fused=device == "cuda",
        )

    def gradients(self, tokens: Tensor, weights: Tensor, distil: float, bos: int) -> tuple[Tensor, Tensor]:
        """-> [main, MTP, unlikelihood, balance, agreement] and the loads; leaves gradients on the parameters."""
        target = torch.tensor(distil, device=self.device)
        each, agree, loads = self._losses(self.model, tokens.long(), weights, target, bos)
        (each * self._factors).sum().backward()
        return torch.cat((each, agree[None])).detach(), loads.detach()

    def update(self, loads: Tensor, rate: float) -> None:
        for group, lr in zip(self._adam.param_groups, self._adam_rates, strict=True):
            group["lr"] = lr * rate
        self._adam.step()
        self._muon.step(self.config.muon_lr * rate)
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for moe, load in zip(self.model.moes(), loads, strict=True):
                moe.bias += self.config.bias_step * (load.mean() - load).sign() * min(rate * 4, 1.0)


class OwnAnswers:
    """The model's own answers: packed rows of tokens, with negative weights at what it should not have said."""

    def __init__(self, config: TrainConfig, asker: Asker, rows: NDArray[np.integer]) -> None:
        self._config, self._asker, self._rows, self._rng = config, asker, rows, random.Random(config.seed)
        self._tokens = self._weights = torch.empty(0)
        self._queue: list[int] = []

    def sample(self, model: TinyModel, length: int) -> str:
        """Answer new prompts, keep the answers with marked tokens, and queue them. Returns what was found, in words."""
        config, asker = self._config, self._asker
        prompts = asker.prompts(self._rows, config.own_answers, self._rng)
        temperatures = [self._rng.choice(config.own_temperatures) for _ in prompts]
        answers = generate(
            model,
            prompts,
            temperature=temperatures,
            top_p=[0.95] * len(prompts),
            max_tokens=300,
            eos=asker.eos,
            seed=self._rng.randrange(2**31),
        )
        documents, weights = [], []
        for prompt, answer in zip(prompts, answers, strict=True):
            marks = asker.marks(prompt, answer)
            if any(marks):
                documents.append(prompt + answer)
                weights.append([0] * len(prompt) + [-config.own_weight * mark for mark in marks])
        rows = list(best_fit([len(d) for d in documents], length, self._rng))
        self._tokens = torch.full((len(rows), length), asker.eos, dtype=torch.int16)
        self._weights = torch.zeros((len(rows), length), dtype=torch.int8)
        for r, row in enumerate(rows):
            ids = [token for i in row for token in documents[i]]
            self._tokens[r, : len(ids)] = torch.tensor(ids, dtype=torch.int16)
            flat = [weight for i in row for weight in weights[i]]
            self._weights[r, : len(ids)] = torch.tensor(flat, dtype=torch.int8)
        self._queue = [r for _ in range(config.own_passes) for r in self._rng.sample(range(len(rows)), len(rows))]
        marked = sum(w < 0 for weight in weights for w in weight)
        return f"own answers: {len(documents)} of {len(prompts)} marked, {marked} tokens, {len(rows)} rows"

    def take(self) -> tuple[Tensor, Tensor] | None:
        """The next `own_rows` rows, tokens and weights, or None when the queue is empty."""
        count = self._config.own_rows
        if len(self._queue) < count:
            return None
        picked, self._queue = self._queue[:count], self._queue[count:]
        return self._tokens[picked], self._weights[picked]


def write_curve(path: Path, rows: list[dict[str, float]]) -> None:
    """Write loss.csv and loss.png."""
    with (path / "loss.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" for k, v in row.items()} for row in rows)
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return
    figure, left = plt.subplots(figsize=(8, 4.5))
    millions = [row["tokens"] / 1e6 for row in rows]
    left.plot(millions, [row["main_loss"] for row in rows], label="main loss")
    left.plot(millions, [row["mtp_loss"] for row in rows], label="MTP loss")
    left.set(xlabel="million tokens", ylabel="nats a token", ylim=(1.0, 5.0))
    right = left.twinx()
    right.plot(millions, [row["mtp_agreement"] for row in rows], color="tab:green", alpha=0.6, label="MTP agreement")
    right.set(ylabel="share of equal argmaxes", ylim=(0, 1))
    figure.legend(loc="upper center", ncols=3)
    figure.savefig(path / "loss.png", dpi=110)


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the .xz files named in data.sha256")
    parser.add_argument("--out", type=Path, default=Path("tiny-out"), help="where the checkpoint and the curve go")
    parser.add_argument("--config", type=Path, help="a file whose lines win over config.toml's, such as finetune.toml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a line of the configuration"
    )
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, help="how many steps to train")
    length.add_argument("--seconds", type=float, help="end training this long after the start")
    parser.add_argument("--workers", type=int, default=2, help="processes that prepare the data")
    parser.add_argument("--limit", type=int, help="documents of each shard, for a trial")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    config = read_config([Path(__file__).with_name("config.toml"), *([args.config] if args.config else [])], args.set)
    args.out.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)

    rows_path = args.out / "rows.npz"
    command = [
        sys.executable,
        "-m",
        "models.tiny.training.prepare",
        "--data",
        str(args.data.resolve()),
        "--out",
        str(rows_path.resolve()),
    ]
    command += ["--workers", str(args.workers)] + (["--limit", str(args.limit)] if args.limit else [])
    preparing = subprocess.Popen(command, cwd=MODEL_FOLDER.parents[1])

    torch.set_float32_matmul_precision("high")
    torch.manual_seed(config.seed)
    asker = Asker(Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json")))
    trainer = Trainer(
        config,
        Shape.read(MODEL_FOLDER / "config.json"),
        args.device,
        compiled=args.device == "cuda",
    )
    bos = 0
    if args.device == "cuda":
        tokens = torch.randint(0, 8192, (config.batch_rows, 512), device=args.device, dtype=torch.int32)
        for _ in range(2):
            trainer.gradients(tokens, torch.ones_like(tokens, dtype=torch.int8), 0.0, bos)
        trainer.model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        say("compiled")
    if preparing.wait() != 0:
        raise SystemExit("preparing the data failed")
    with np.load(rows_path) as rows:
        tokens = torch.from_numpy(rows["tokens"].astype(np.int16)).to(args.device)
        weights = torch.from_numpy(rows["weights"].astype(np.int8)).to(args.device)
        own, next_own = OwnAnswers(config, asker, rows["tokens"]), config.own_from
    rows_path.unlink()
    say(f"{len(tokens)} rows on {args.device}")

    begun, step, num_tokens, curve = time.monotonic(), 0, 0, list[dict[str, float]]()
    sums = torch.zeros(5, device=args.device)
    order = torch.empty(0, dtype=torch.long)
    generator = torch.Generator().manual_seed(config.seed)
    loads_seen: Tensor | None = None
    while True:
        now = time.monotonic()
        progress = step / args.steps if args.steps else (now - begun) / (started + args.seconds - begun)
        if progress >= 1:
            break
        if len(order) < config.batch_rows:
            order = torch.cat((order, torch.randperm(len(tokens), generator=generator)))
        picked, order = order[: config.batch_rows].to(args.device), order[config.batch_rows :]
        batch, counts = tokens[picked], weights[picked]
        if progress >= next_own:
            say(own.sample(trainer.model, tokens.shape[1]))
            next_own = progress + config.own_every
        if (taken := own.take()) is not None:
            batch[: config.own_rows], counts[: config.own_rows] = taken[0].to(args.device), taken[1].to(args.device)
        values, loads = trainer.gradients(batch, counts, config.distil(progress), bos)
        trainer.update(loads, config.rate(progress))
        loads_seen = loads if loads_seen is None else loads_seen.lerp(loads, 0.05)
        sums += values
        step += 1
        num_tokens += tokens.shape[1] * config.batch_rows
        if step % config.log_every == 0 or step == args.steps:
            since = step % config.log_every or config.log_every
            main_loss, mtp_loss, unlikely, balance, agree = (
                sums / since
            ).tolist()  # waits for the device: bounds what is in flight
            sums.zero_()
            row = {
                "step": step,
                "tokens": num_tokens,
                "seconds": time.monotonic() - begun,
                "rate": config.rate(progress),
            }
            row |= {"main_loss": main_loss, "mtp_loss": mtp_loss, "unlikelihood": unlikely}
            row |= {"balance": balance, "mtp_agreement": agree}
            curve.append(row)
            if not math.isfinite(main_loss):
                raise SystemExit(f"the loss is {main_loss} at step {step}")
            if step % (config.log_every * 12) == 0 or step <= 4 * config.log_every:
                speed = num_tokens / row["seconds"]
                say(
                    f"step {step} loss {main_loss:.3f} mtp {mtp_loss:.3f} unlikely {unlikely:.4f} agree {agree:.3f} {speed / 1e3:.0f} k tok/s, {num_tokens / 1e6:.0f} M tokens"
                )
    save_checkpoint(trainer.model, args.out / "model.safetensors")
    say(f"saved after {step} steps, {num_tokens / 1e6:.1f} M tokens")
    write_curve(args.out, curve)
    assert loads_seen is not None
    uneven = (loads_seen / loads_seen.mean(1, keepdim=True)).cpu()
    summary = {
        "steps": step,
        "tokens": num_tokens,
        "epochs": round(num_tokens / tokens.numel(), 2),
        "training_s": round(curve[-1]["seconds"], 1),
        "main_loss": curve[-1]["main_loss"],
        "mtp_loss": curve[-1]["mtp_loss"],
        "expert_load_min_max": [round(uneven.min().item(), 3), round(uneven.max().item(), 3)],
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "python models/tiny/training/train.py --data DIR "
        + (f"--steps {args.steps}" if args.steps else f"--seconds {args.seconds:g}"),
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    say(json.dumps(summary))


if __name__ == "__main__":
    main()
