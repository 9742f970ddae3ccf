"""Learning curves as PNG, for one run or several; drawn twice, for light and for dark pages."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mapd_verl.evaluation.records import summarise
from mapd_verl.evaluation.runs import Run

#: Okabe and Ito's colours, told apart with any colour vision; the dark page gets lighter ones.
_THEMES: dict[str, dict[str, Any]] = {
    "light": {"ink": "#1f2328", "grid": "#d8dee4", "paper": "#ffffff",
              "lines": ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9"]},
    "dark": {"ink": "#e6edf3", "grid": "#30363d", "paper": "#0d1117",
             "lines": ["#56b4e9", "#ff8a5b", "#2fbf94", "#e79bc8", "#f0c000", "#9ecbff"]},
}  # fmt: skip
THEMES = tuple(_THEMES)
_SMOOTH = 5
_SIZE = (5.2, 3.1)


@dataclass(frozen=True)
class Curve:
    """One panel: a file name, a title, a sentence on what it shows, and its PNG for each theme."""

    name: str
    title: str
    caption: str
    png: dict[str, bytes]


def draw_curves(runs: Sequence[Run]) -> list[Curve]:
    """All panels for which at least one run has figures."""
    panels: list[tuple[str, str, str, Callable[..., bool]]] = [
        ("em", "Exact match", "Thin: training rollouts of each step (temperature 1), thick: their mean over "
         f"{_SMOOTH} steps. Dots: validation questions with 95% Wilson intervals.", _em),
        ("searches", "Searches per question", "Queries that reached the retrieval service, mean per rollout; "
         "dots: validation.", _searches),
        ("length", "Response length (tokens)", "Solid: tokens that the policy wrote; dashed: with observations. "
         "A collapse shows here first.", _length),
        ("kl", "KL on policy tokens (nats)", "Solid: student to privileged teacher, mean over distilled tokens; "
         "dashed: to the reference model.", _kl),
        ("sources", "Privileged context of the rollouts", "Share of rollouts whose teacher read each source; "
         "'none' carries no distillation term.", _sources),
        ("tags", "Well-formed turns", "Share of turns with one complete action and nothing malformed; "
         "dashed: rollouts that gave an answer.", _tags),
    ]  # fmt: skip
    curves = []
    for name, title, caption, draw in panels:
        png = {theme: _render(draw, runs, theme, title) for theme in THEMES}
        if all(data is not None for data in png.values()):
            curves.append(Curve(name, title, caption, {theme: data for theme, data in png.items() if data}))
    return curves


def _render(draw: Callable[..., bool], runs: Sequence[Run], theme: str, title: str) -> bytes | None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    style = _THEMES[theme]
    figure = Figure(figsize=_SIZE, dpi=150, facecolor=style["paper"], layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_facecolor(style["paper"])
    axes.set_title(title, color=style["ink"], fontsize=10, loc="left", fontweight="bold")
    axes.set_xlabel("training step", color=style["ink"], fontsize=8)
    if not draw(axes, runs, style["lines"]):
        return None
    axes.tick_params(colors=style["ink"], labelsize=8, length=0)
    axes.grid(color=style["grid"], linewidth=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(
            handles, labels, fontsize=8, frameon=False, labelcolor=style["ink"], loc="outside lower center", ncols=4
        )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _colours(runs: Sequence[Run], palette: Sequence[str]) -> dict[str, str]:
    """One colour an arm; its seeds share it."""
    arms = list(dict.fromkeys(run.arm for run in runs))
    return {arm: palette[i % len(palette)] for i, arm in enumerate(arms)}


def moving_mean(values: Sequence[float], window: int = _SMOOTH) -> list[float]:
    """Mean of each value and up to ``window - 1`` before it."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / (i + 1 - max(0, i - window + 1)) for i in range(len(values))]


def _lines(
    axes: Any, runs: Sequence[Run], palette: Sequence[str], names: Sequence[str], style: str = "-", scale: float = 1.0
) -> bool:
    """For each arm a strong line, the moving mean over its seeds, with each seed's raw values faint behind it.

    Returns whether anything was drawn.
    """
    labelled = set(axes.get_legend_handles_labels()[1])
    drawn = False
    for arm, colour in _colours(runs, palette).items():
        by_step: dict[int, list[float]] = {}
        for run in (run for run in runs if run.arm == arm):
            steps, values = run.series(*names)
            values = [scale * value for value in values]
            if style == "-":
                axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.35)
            for step, value in zip(steps, values, strict=True):
                by_step.setdefault(step, []).append(value)
        if by_step:
            steps = sorted(by_step)
            means = moving_mean([sum(by_step[step]) / len(by_step[step]) for step in steps])
            label = None if arm in labelled else arm
            axes.plot(steps, means, color=colour, linewidth=1.8, linestyle=style, label=label)
            drawn = True
    return drawn


def _dots(axes: Any, runs: Sequence[Run], palette: Sequence[str], value: Callable[[Any], tuple[float, float, float]],
          scale: float = 1.0) -> bool:  # fmt: skip
    """Validation: one dot a step with its interval."""
    colours, drawn = _colours(runs, palette), False
    for run in runs:
        for step, records in run.validation.items():
            if not records:
                continue
            mean, low, high = (scale * x for x in value(summarise(records)[0]))
            axes.errorbar([step], [mean], yerr=[[max(0.0, mean - low)], [max(0.0, high - mean)]], fmt="o", ms=4,
                          color=colours[run.arm], elinewidth=1, capsize=2)  # fmt: skip
            drawn = True
    return drawn


def _em(axes: Any, runs: Sequence[Run], palette: Sequence[str]) -> bool:
    drawn = _lines(axes, runs, palette, ("agent/acc", "critic/score/mean"), scale=100)
    drawn |= _dots(axes, runs, palette, lambda s: (s.em.mean, s.em.low, s.em.high), scale=100)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:.0f}%")
    return drawn


def _searches(axes: Any, runs: Sequence[Run], palette: Sequence[str]) -> bool:
    drawn = _lines(axes, runs, palette, ("agent/searches",))
    drawn |= _dots(axes, runs, palette, lambda s: (s.searches,) * 3)
    axes.set_ylim(bottom=0)
    return drawn


def _length(axes: Any, runs: Sequence[Run], palette: Sequence[str]) -> bool:
    drawn = _lines(axes, runs, palette, ("agent/policy_tokens",))
    drawn |= _lines(axes, runs, palette, ("agent/response_tokens", "response_length/mean"), "--")
    axes.set_ylim(bottom=0)
    return drawn


def _kl(axes: Any, runs: Sequence[Run], palette: Sequence[str]) -> bool:
    drawn = _lines(axes, runs, palette, ("distillation/kl",))
    drawn |= _lines(axes, runs, palette, ("actor/kl_loss",), "--")
    axes.set_ylim(bottom=0)
    return drawn


def _tags(axes: Any, runs: Sequence[Run], palette: Sequence[str]) -> bool:
    drawn = _lines(axes, runs, palette, ("agent/valid_turns",), scale=100)
    drawn |= _lines(axes, runs, palette, ("agent/answered",), "--", scale=100)
    axes.set_ylim(0, 102)
    axes.yaxis.set_major_formatter("{x:.0f}%")
    return drawn


def _sources(axes: Any, runs: Sequence[Run], palette: Sequence[str]) -> bool:
    """Stacked shares of the first run that logged them: its arm's other seeds look alike."""
    prefix = "mapd/source/"
    for run in runs:
        names = sorted({n.removeprefix(prefix) for v in run.metrics.values() for n in v if n.startswith(prefix)})
        steps = [step for step, values in sorted(run.metrics.items()) if any(prefix + n in values for n in names)]
        if not names or not steps:
            continue
        names.sort(key=lambda n: n == "none")  # no source on top
        shares = [[100 * run.metrics[step].get(prefix + name, 0.0) for step in steps] for name in names]
        colours = [*palette[: len(names) - 1], "#8b949e"] if names[-1] == "none" else list(palette[: len(names)])
        if len(steps) == 1:  # an area needs two points
            steps, shares = [steps[0], steps[0] + 1], [s * 2 for s in shares]
        axes.stackplot(steps, shares, labels=[n.replace("_", " ") for n in names], colors=colours, alpha=0.8)
        axes.set_ylim(0, 100)
        axes.yaxis.set_major_formatter("{x:.0f}%")
        if len(runs) > 1:
            axes.set_xlabel(f"training step ({run.name})")
        return True
    return False


__all__ = ["THEMES", "Curve", "draw_curves", "moving_mean"]
