"""Traces that come with the project, the generators that made them, and loading any trace by one word."""

from gorgo.apps.datasets.describe import TraceStats, describe_trace
from gorgo.apps.datasets.generate import generate_requests, generate_trace, write_trace
from gorgo.apps.datasets.load import load_requests
from gorgo.apps.datasets.remote import RemoteDataset, remote_dataset, remote_datasets
from gorgo.apps.datasets.shape import PoissonShape, Shape, UsersShape, WorkloadShape, read_shape
from gorgo.apps.datasets.shipped import DEMO_TRACE, Dataset, datasets, shapes, shipped_path

__all__ = [
    "DEMO_TRACE",
    "Dataset",
    "PoissonShape",
    "RemoteDataset",
    "Shape",
    "TraceStats",
    "UsersShape",
    "WorkloadShape",
    "datasets",
    "describe_trace",
    "generate_requests",
    "generate_trace",
    "load_requests",
    "read_shape",
    "remote_dataset",
    "remote_datasets",
    "shapes",
    "shipped_path",
    "write_trace",
]
