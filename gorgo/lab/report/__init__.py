"""`gorgo report`: one HTML page of tables and plots from the results of simulate, replay, demo and tune.

Owns what `gorgo report` and `gorgo history --plot` write, and the check that the extra `report` is installed:
matplotlib and jinja2 are imported only after that check. Leaves the page to `report`, and the drawings to `plots`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.errors import MissingExtra, ReportError

#: File name extensions of a tuning plot.
PLOTS = (".svg", ".png", ".pdf")
EXTRA = ("matplotlib", "jinja2")
#: SLOs of the first token that are drawn by default: an interactive answer, and a patient one.
SLOS_MS = (500.0, 2000.0)
#: Panels that are readable in one plot.
MAX_SLOS = 4
#: Names of the files of a report.
_OWN_FILE = re.compile(r"\d+-[a-z0-9-]+\.(svg|csv|png|pdf)")
#: Forms of plots beside SVG.
FORMS = ("png", "pdf")


def write_report(
    folder: Path,
    *,
    slos_ms: Sequence[float] = SLOS_MS,
    policies: Sequence[str] = (),
    forms: Sequence[str] = (),
    show_progress: bool = True,
) -> Path:
    """Write report.html and the files of report/ in `folder`, of all results in and below it; return the page's path.

    With `policies` only their runs are drawn, and the best baseline is one of them. Plots are SVG, and of `forms` too.
    Files of an earlier report that the new one has not are deleted. Raises `MissingExtra` without the extra `report`,
    and `ReportError` for a folder without results or a damaged file.
    """
    require_extra()
    from gorgo.lab.report.report import FILES, find_results, report

    made = report(find_results(folder, policies=policies, show_progress=show_progress), slos_ms, forms=forms)
    target, beside = folder / "report.html", folder / FILES
    beside.mkdir(exist_ok=True)
    written = {name: _encoded(text) for name, text in made.files.items()} | dict(made.pictures)
    for name, content in written.items():
        write_atomically(beside / name, content, mode=PUBLIC)
    write_atomically(target, _encoded(made.html), mode=PUBLIC)
    for path in beside.iterdir():
        if _OWN_FILE.fullmatch(path.name) and path.name not in written:
            path.unlink()
    return target


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # folder names are shown, which need not be valid text


def write_tuning_plot(path: Path, generations: Sequence[Mapping[str, Any]]) -> None:
    """Plot rows of history.json. Raises `MissingExtra`, `ReportError` for an unknown format, `OSError`."""
    require_extra()
    if path.suffix not in PLOTS or not generations:
        expected = f"expected a name that ends in {', '.join(PLOTS)}" if generations else "no generation to plot yet"
        raise ReportError(f"{path}: {expected}")
    import matplotlib as mpl

    from gorgo.lab.report.plots import tuning_plot
    from gorgo.lab.report.runs import ReportGeneration
    from gorgo.lab.report.style import RC

    names = ReportGeneration.__dataclass_fields__
    image = BytesIO()
    with mpl.rc_context(RC):
        figure = tuning_plot([ReportGeneration(**{name: row[name] for name in names}) for row in generations])
        figure.savefig(image, format=path.suffix.removeprefix("."))
    write_atomically(path, image.getvalue(), mode=PUBLIC)


def require_extra(what: str = "a report") -> None:
    """Raise `MissingExtra` without the extra `report`, which `what` needs."""
    for package in EXTRA:
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            raise MissingExtra(
                f"{what} needs {package}, which is not installed: pip install 'gorgo-router[report]'"
            ) from error
