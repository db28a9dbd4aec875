"""`gorgo report`: one HTML page of tables and plots from the results of simulate, replay, demo and tune."""

from gorgo.lab.report.output import FORMS, MAX_SLOS, SLOS_MS, require_extra, write_report, write_tuning_plot

__all__ = ["FORMS", "MAX_SLOS", "SLOS_MS", "require_extra", "write_report", "write_tuning_plot"]
