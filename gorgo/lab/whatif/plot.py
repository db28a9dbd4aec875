"""The picture of a judgement: each estimate with its interval, and the twin beside."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.lab.report.output import require_extra
from gorgo.lab.whatif.judge import Judgement
from gorgo.lab.whatif.twin import Twin

#: Colours of the estimators, in the order from below.
_COLOURS = {"ips": "#767676", "snips": "#0072B2", "dr": "#D55E00"}


def write_judgement_plot(path: Path, judgement: Judgement, twin: Twin | None = None) -> None:
    """Write the picture as SVG. Raises `MissingExtra` without the extra `report`."""
    require_extra("a plot")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from gorgo.lab.report.style import RC

    image = BytesIO()
    with mpl.rc_context(RC):
        # Outcomes have units of their own, so that no axis is shared but that of the estimators.
        figure = Figure(figsize=(9.0, 2.6), layout="constrained")
        axes = figure.subplots(1, len(judgement.outcomes), sharey=True, squeeze=False).ravel().tolist()
        for panel, outcome in zip(axes, judgement.outcomes, strict=True):
            for place, (name, colour) in enumerate(_COLOURS.items()):
                found = outcome.changes.get(name)  # type: ignore[call-overload] # a name of the table
                if found is None:
                    continue
                panel.plot([found.low, found.high], [place, place], color=colour, linewidth=2)
                panel.plot([found.change], [place], "o", color=colour, markersize=6)
            before, after = (twin.times_ms() if twin else {}).get(outcome.name, (None, None))
            if before is not None and after is not None:
                panel.plot([after - before], [len(_COLOURS)], "D", color="#009E73", markersize=6)
            panel.axvline(0.0, color="#000000", linewidth=0.8)
            panel.set_ylim(-0.6, len(_COLOURS) + 0.6)
            panel.set_yticks(range(len(_COLOURS) + 1), [*_COLOURS, "twin"])
            panel.set_title(f"{outcome.name}, {outcome.logged:.3g} {outcome.unit} in the log")
            panel.set_xlabel(f"change, {'points' if outcome.unit == '%' else outcome.unit}")
        figure.savefig(image, format="svg", metadata={"Date": None})
    write_atomically(path, image.getvalue(), mode=PUBLIC)
