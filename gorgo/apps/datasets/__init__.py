"""Traces that come with the project, and the generator that made them."""

from gorgo.apps.datasets.describe import TraceFigures, describe_trace
from gorgo.apps.datasets.generate import generate_trace, write_trace
from gorgo.apps.datasets.shape import WorkloadShape, read_shape
from gorgo.apps.datasets.shipped import DEMO_TRACE, Dataset, datasets, shipped_path

__all__ = [
    "DEMO_TRACE",
    "Dataset",
    "TraceFigures",
    "WorkloadShape",
    "datasets",
    "describe_trace",
    "generate_trace",
    "read_shape",
    "shipped_path",
    "write_trace",
]
