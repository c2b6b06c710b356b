"""Partitions of images among clients: every image belongs to exactly one."""

from fedssl.config.constraint_table import MIN_IMAGES
from fedssl.partition.domains import domain
from fedssl.partition.feature_clustering import feature_clusters
from fedssl.partition.feature_shift import parameter_table, shifted
from fedssl.partition.partition import (
    ImageSubset,
    Partition,
    PartitionInput,
    client_indices,
    labeled_indices,
    make_partition,
    server_indices,
)
from fedssl.partition.partitioners import (
    dirichlet,
    from_file,
    iid,
    natural,
    pathological,
    skew,
    write_partition,
)
from fedssl.partition.quantity import quantity

__all__ = [
    "MIN_IMAGES",
    "ImageSubset",
    "Partition",
    "PartitionInput",
    "client_indices",
    "dirichlet",
    "domain",
    "feature_clusters",
    "from_file",
    "iid",
    "labeled_indices",
    "make_partition",
    "natural",
    "parameter_table",
    "pathological",
    "quantity",
    "server_indices",
    "shifted",
    "skew",
    "write_partition",
]
