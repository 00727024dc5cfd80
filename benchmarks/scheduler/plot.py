"""A picture of one simulation."""

from __future__ import annotations

from pathlib import Path

from .simulator import Result


def plot(result: Result, path: Path, *, title: str) -> None:
    """Latency distributions, and the queue, the running and the KV cache over time, as an image file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    done = [outcome for outcome in result.outcomes if not outcome.error]
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    for axis, values, label in (
        (axes[0][0], [outcome.ttft_s for outcome in done], "TTFT, s"),
        (axes[0][1], [1e3 * o.tpot_s for o in done if o.num_output_tokens > 1], "TPOT, ms"),
    ):
        axis.ecdf(values or [0.0])
        axis.set(xlabel=label, ylabel="share of requests")
        axis.grid(alpha=0.3)
    at_s = [sample.at_s for sample in result.samples]
    axes[1][0].plot(at_s, [sample.num_waiting for sample in result.samples], label="waiting")
    axes[1][0].plot(at_s, [sample.num_running for sample in result.samples], label="running")
    axes[1][0].set(xlabel="time, s", ylabel="requests")
    axes[1][0].legend()
    axes[1][1].plot(at_s, [sample.kv_usage for sample in result.samples])
    axes[1][1].set(xlabel="time, s", ylabel="KV blocks held, share", ylim=(0, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
