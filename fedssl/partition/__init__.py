"""Partitions of images among clients: every image belongs to exactly one."""

from fedssl.partition.base import ImageSubset, Partition
from fedssl.partition.feature_clustering import feature_clusters
from fedssl.partition.partition import client_indices, make_partition, server_indices
from fedssl.partition.partition_file import from_file, write_partition
from fedssl.partition.partitioners import MIN_IMAGES, classes, dirichlet, iid, natural, skew

__all__ = [
    "MIN_IMAGES",
    "ImageSubset",
    "Partition",
    "classes",
    "client_indices",
    "dirichlet",
    "feature_clusters",
    "from_file",
    "iid",
    "make_partition",
    "natural",
    "server_indices",
    "skew",
    "write_partition",
]
