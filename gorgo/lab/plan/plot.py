"""The plot of a plan: cost against attainment, a mark per simulated fleet."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.lab.plan.plan import Plan
from gorgo.lab.report.output import require_extra


def write_plan_plot(path: Path, plan: Plan) -> None:
    """Write the plot as SVG. Raises `MissingExtra` without the extra `report`."""
    require_extra("a plot")
    import matplotlib as mpl

    from gorgo.lab.report.style import BROAD, GREY, RC, panels

    groups = plan.demand.groups
    image = BytesIO()
    with mpl.rc_context(RC):
        figure, axes = panels(len(groups), BROAD, sharey=True)
        for place, (panel, group) in enumerate(zip(axes, groups, strict=True)):
            wanted = plan.found.measured[0].objective[place] if plan.found.measured else 0.0
            for serves, colour, marker in ((False, GREY, "x"), (True, "#0072B2", "o")):
                chosen = [one for one in plan.found.measured if one.serves is serves]
                label = "serves all regions" if serves else "does not"
                shares = [one.attained[place] * 100 for one in chosen]
                panel.scatter([one.cost for one in chosen], shares, c=colour, marker=marker, s=26, label=label)
            panel.axhline(wanted * 100, color="#D55E00", linewidth=1, linestyle="--", label="wanted")
            panel.set_title(f"clients of {group.region}")
            panel.set_xlabel("cost of an hour")
            panel.set_ylabel("requests within the objective, %")
        axes[0].legend(loc="lower right")
        figure.savefig(image, format="svg", metadata={"Date": None})
    write_atomically(path, image.getvalue(), mode=PUBLIC)
