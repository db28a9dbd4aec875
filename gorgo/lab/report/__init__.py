"""`gorgo report`: one HTML page of tables and plots from the results of simulate, replay, demo and tune.

Owns what `gorgo report` and `gorgo history --plot` write, and the check that the extra `report` is installed:
matplotlib and jinja2 are imported only after that check. Leaves the reading to `runs`, the page to `report`, and the
drawings to `plots`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.errors import MissingExtra, ReportError

#: File name extensions of a tuning plot.
PLOTS = (".svg", ".png", ".pdf")
#: Forms of plots beside SVG.
FORMS = ("png", "pdf")
EXTRA = ("matplotlib", "jinja2")
#: Names of the files of a report.
_OWN_FILE = re.compile(r"\d+-[a-z0-9-]+\.(svg|csv|png|pdf)")


def write_report(folder: Path, *, policies: Sequence[str] = (), forms: Sequence[str] = ()) -> Path:
    """Write report.html and the files of report/ in `folder`, of all results in and below it; return the page's path.

    With `policies` only their runs are drawn, and the best baseline is one of them. Plots are SVG, and of `forms` too.
    Files of an earlier report that the new one has not are deleted. Raises `MissingExtra` without the extra `report`,
    and `ReportError` for a folder without results or a damaged file.
    """
    require_extra()
    from gorgo.lab.report.report import FILES, report
    from gorgo.lab.report.runs import find_results

    html, contents = report(find_results(folder, policies=policies), forms=forms)
    target, beside = folder / "report.html", folder / FILES
    beside.mkdir(exist_ok=True)
    for name, content in contents.items():
        write_atomically(beside / name, content, mode=PUBLIC)
    write_atomically(target, html.encode(), mode=PUBLIC)
    for path in beside.iterdir():
        if _OWN_FILE.fullmatch(path.name) and path.name not in contents:
            path.unlink()
    return target


def write_tuning_plot(path: Path, generations: Sequence[Mapping[str, Any]]) -> None:
    """Plot rows of history.json. Raises `MissingExtra`, `ReportError` for an unknown format, `OSError`."""
    require_extra()
    if path.suffix not in PLOTS or not generations:
        expected = f"expected a name that ends in {', '.join(PLOTS)}" if generations else "no generation to plot yet"
        raise ReportError(f"{path}: {expected}")
    from gorgo.lab.report.plots import tuning_plot
    from gorgo.lab.report.runs import ReportGeneration
    from gorgo.lab.report.style import plot_file

    names = ReportGeneration.__dataclass_fields__
    rows = [ReportGeneration(**{name: row[name] for name in names}) for row in generations]
    content = plot_file(partial(tuning_plot, rows), path.suffix.removeprefix("."))
    write_atomically(path, content, mode=PUBLIC)


def require_extra(what: str = "a report") -> None:
    """Raise `MissingExtra` without the extra `report`, which `what` needs."""
    for package in EXTRA:
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            raise MissingExtra(
                f"{what} needs {package}, which is not installed: pip install 'gorgo-router[report]'"
            ) from error
