"""`gorgo report`: one HTML page from the results of simulate, replay and demo."""

from gorgo.apps.report.command import require_extra, write_report, write_tuning_plot

__all__ = ["require_extra", "write_report", "write_tuning_plot"]
