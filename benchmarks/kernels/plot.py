"""Draws how near each kernel comes to the roofline, and to its best public peer.

python benchmarks/kernels/plot.py --record benchmarks/results/h200-v2lite.json --out docs/h200-kernels.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

LABELS = {"mla_decode": "MLA decode", "mla_prefill": "MLA prefill", "experts": "experts"}


def label(row: dict[str, Any]) -> str:
    shape = row["shape"]
    match row["name"]:
        case "mla_decode":
            return f"MLA decode, {shape['heads']} heads, {shape['batch']} × {shape['context']:,}"
        case "mla_prefill":
            prefix = f" after {shape['prefix']:,}" if shape["prefix"] else ""
            return f"MLA prefill, {shape['heads']} heads, {shape['batch']} × {shape['queries']:,}{prefix}"
        case "experts":
            return f"experts, {shape['tokens']:,} tokens"
    return f"{row['name']}, {shape['tokens']:,} tokens"


def is_shown(row: dict[str, Any]) -> bool:
    """Rows with a share and a peer, in their default form."""
    shape = row["shape"] or {}
    if row.get("roofline_share") is None or row.get("ratio") is None or shape.get("deterministic"):
        return False
    return row["name"] in LABELS or (row["name"] in ("qkv_a", "o_proj") and shape["tokens"] in (1, 16, 64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in json.loads(args.record.read_text())["kernels"] if is_shown(row)][::-1]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 0.24 * len(rows) + 1), sharey=True, layout="constrained")
    names = [label(row) for row in rows]
    left.barh(names, [100 * row["roofline_share"] for row in rows], color="tab:blue")
    left.set_xlim(0, 105)
    left.set_title("share of the roofline, %")
    colors = ["tab:green" if row["ratio"] >= 1 else "tab:orange" for row in rows]
    right.barh(names, [row["ratio"] for row in rows], color=colors)
    right.axvline(1, color="black", linewidth=1)
    right.set_title("the best peer's time over ours")
    for axis in (left, right):
        axis.grid(axis="x", alpha=0.3)
        axis.margins(y=0.01)
    figure.savefig(args.out, dpi=90)
    print(f"plot: {args.out}")


if __name__ == "__main__":
    main()
