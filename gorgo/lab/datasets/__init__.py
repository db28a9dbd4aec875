"""Shipped traces, the generators of their shapes, and loading any trace by file or name."""

from gorgo.lab.datasets.catalogue import (
    DEMO_TRACE,
    Dataset,
    TraceStats,
    content_digest,
    datasets,
    describe_trace,
    generate_requests,
    generate_trace,
    is_shape,
    load_requests,
    own_block_tokens,
    shapes,
    shipped_path,
    unit_warning,
    write_trace,
)
from gorgo.lab.datasets.prefix_shapes import AgentsShape, GroupsShape, HerdShape, RagShape, SharingShape
from gorgo.lab.datasets.published import RemoteDataset, remote_dataset, remote_datasets
from gorgo.lab.datasets.shape import PoissonShape, Shape, UsersShape, WorkloadShape, read_shape

__all__ = [
    "DEMO_TRACE",
    "AgentsShape",
    "Dataset",
    "GroupsShape",
    "HerdShape",
    "PoissonShape",
    "RagShape",
    "RemoteDataset",
    "Shape",
    "SharingShape",
    "TraceStats",
    "UsersShape",
    "WorkloadShape",
    "content_digest",
    "datasets",
    "describe_trace",
    "generate_requests",
    "generate_trace",
    "is_shape",
    "load_requests",
    "own_block_tokens",
    "read_shape",
    "remote_dataset",
    "remote_datasets",
    "shapes",
    "shipped_path",
    "unit_warning",
    "write_trace",
]
