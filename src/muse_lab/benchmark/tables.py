"""Results as text: cells of tables, captions and notes."""

from __future__ import annotations

from muse_lab.benchmark.results import BenchmarkResults, BenchmarkSettings, Case
from muse_lab.benchmark.sweeps import find_sweep, format_heads, format_shape
from muse_lab.benchmark.timing import LONG_RUN_SECONDS, NOISY


def caption(results: BenchmarkResults) -> str:
    settings = results.settings
    warm_up = "one uncounted warm-up"
    if settings.device == "cpu":
        warm_up += f" (counted as a repeat where it took more than {LONG_RUN_SECONDS:g} s)"
    return (
        f"Times are medians of {settings.repeats} repeats after {warm_up}; all attentions of one length and "
        "scaled_dot_product_attention (SDPA) take turns in every repeat, and the speed-up is the "
        "ratio of two medians. The spread is the distance between the quartiles of forward + backward as a share of "
        "the median, of the attention or of SDPA, whichever is larger. The forward pass is recorded by autograd; the "
        "backward pass gives the gradients of query, key and value. RSE and cosine compare outputs with exact "
        "attention on the same data. Extra memory is the peak of one forward and backward pass (on a CPU, with batch "
        "1 and one head), without the inputs, with the output and the gradients. "
        f"{_backend_sentence(results)} On CUDA, the host is ahead of the GPU, as in training."
    )


def _backend_sentence(results: BenchmarkResults) -> str:
    """Which operator SDPA ran through, and at which shapes where there are several."""
    shapes: dict[str, dict[str, None]] = {}
    for case in sorted_cases(results):
        shapes.setdefault(case.sdpa_backend, {})[format_shape(case.shape, results.settings.sweep)] = None
    if len(shapes) == 1:
        return f"SDPA ran through {next(iter(shapes))}."
    listed = {name: ", ".join(where) for name, where in shapes.items()}
    return f"SDPA ran through {'; '.join(f'{name} at {where}' for name, where in listed.items())}."


def noise_lines(results: BenchmarkResults) -> list[str]:
    """A line about times that vary by more than `NOISY`, if any do."""
    noisy = [case for case in sorted_cases(results) if case.spread is not None and case.spread > NOISY]
    if not noisy:
        return []
    shapes = dict.fromkeys(format_shape(case.shape, results.settings.sweep) for case in noisy)
    worst = max(case.spread for case in noisy if case.spread is not None)
    return [
        f"This machine was too noisy: times at {', '.join(shapes)} have a spread of up to {worst:.0%}, above the bound "
        f"of {NOISY:.0%}, and their speed-ups are uncertain. Measure again on an idle machine, or with more repeats."
    ]


def sorted_cases(results: BenchmarkResults) -> list[Case]:
    """Cases by shape, the length first, and then by the run in which they took turns; attentions as requested."""
    together = list(dict.fromkeys(case.sdpa_times for case in results.cases))
    return sorted(results.cases, key=lambda case: (case.shape, together.index(case.sdpa_times)))


def format_seconds(seconds: float) -> str:
    """Three significant digits, in ms below ten seconds."""
    if seconds >= 10:
        return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
    milliseconds = seconds * 1000
    digits = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2
    return f"{milliseconds:.{digits}f} ms"


def format_ratio(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def format_error(error: float) -> str:
    return "0" if error == 0 else f"{error:.3f}" if error >= 0.001 else f"{error:.1e}"


def format_spread(spread: float | None) -> str:
    return "-" if spread is None else f"{spread:.0%}"


def format_memory(count: int | None) -> str:
    if count is None:
        return "-"
    mebibytes = count / 2**20
    return f"{mebibytes:.1f} MiB" if mebibytes < 100 else f"{mebibytes:.0f} MiB"


def settings_line(settings: BenchmarkSettings) -> str:
    """The data and settings of a measurement, in words."""
    kind = "clustered synthetic queries, keys and values"
    if settings.captures is not None:
        kind = f"queries, keys and values of {settings.captures}"
    attention = "causal" if settings.causal else "full"
    varied = () if settings.sweep is None else find_sweep(settings.sweep).varied_in_shape
    batch = "the batch that the table says" if "batch" in varied else f"batch {settings.batch}"
    heads = "as many heads as the table says" if "heads" in varied else format_heads(settings.heads, settings.key_heads)
    head_dim = "the dimension that the table says" if "head_dim" in varied else settings.head_dim
    return (
        f"{kind}, {attention} attention, {batch}, {heads} of {head_dim}, {settings.dtype}, seed {settings.seed}, on "
        f"{settings.device}"
    )
