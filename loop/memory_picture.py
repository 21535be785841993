"""Draws what each rung costs: bytes a token against the divergence it was measured to cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KINDS = (".png", ".svg")
_INCHES = (7.0, 4.5)
_SMALLEST_KL = 1e-4


class PictureError(ValueError):
    """The picture cannot be drawn; the message says why."""


def check_kind(file: Path) -> None:
    """Raises `PictureError` for a name that says no kind of picture."""
    if file.suffix.lower() not in KINDS:
        raise PictureError(f"--picture {file}: name a file that ends with {' or '.join(KINDS)}")


def draw(records: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Writes the picture: one curve for each base model, each rung labelled, and the noise of exact KV as a line.

    `records` are those of `loop.memory.report`. Raises `PictureError`.
    """
    check_kind(file)
    if not records:
        raise PictureError("nothing was measured yet, so there is nothing to draw: run `kvloop memory measure` first")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)  # no display is asked for; saving as SVG takes its own canvas
    axes = figure.add_subplot()
    bases = list(dict.fromkeys(record["weights_id_base"] for record in records))
    for number, base in enumerate(bases):
        _curve(axes, [record for record in records if record["weights_id_base"] == base], base[:8], f"C{number}")
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=max(_SMALLEST_KL, min(record["noise_kl"] for record in records)))
    axes.set_ylim(0, 3 * max(max(record["kl_mean"], record["noise_kl"], _SMALLEST_KL) for record in records))
    axes.margins(x=0.15)
    axes.set_xlabel("bytes per token (log scale)")
    axes.set_ylabel("mean KL of the next-token distribution, nats")
    axes.set_title("What each rung of KV memory costs")
    axes.legend(loc="upper right")
    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # words stay words: smaller, and can be searched
        figure.savefig(file)


def _curve(axes: Any, records: Sequence[Mapping[str, Any]], name: str, colour: str) -> None:
    ordered = sorted(records, key=lambda record: -record["bytes_per_token"])
    sizes, costs = [record["bytes_per_token"] for record in ordered], [record["kl_mean"] for record in ordered]
    axes.plot(sizes, costs, marker="o", color=colour, label=f"model {name}")
    for record, size, cost in zip(ordered, sizes, costs, strict=True):
        label = f"{record['codec']}\n{record['ratio']:.2f}x"
        axes.annotate(label, (size, cost), textcoords="offset points", xytext=(6, 6), fontsize=9)
    noise = sum(record["noise_kl"] for record in ordered) / len(ordered)
    axes.axhline(noise, color=colour, linestyle=":", linewidth=1, label=f"noise of exact KV, {noise:.4f}")
