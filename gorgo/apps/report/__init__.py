"""`gorgo report`: one HTML page of tables and plots from the results of simulate, replay, demo and tune."""

from gorgo.apps.report.report import write_report, write_tuning_plot

__all__ = ["write_report", "write_tuning_plot"]
