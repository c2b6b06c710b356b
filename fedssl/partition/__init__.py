"""Partitions of images among clients: every image belongs to exactly one."""

from fedssl.partition.base import Division, ImageSubset
from fedssl.partition.clusters import feature_clusters
from fedssl.partition.deal import auxiliary, divide, split
from fedssl.partition.listed import listed, write_division
from fedssl.partition.rules import MIN_IMAGES, classes, dirichlet, iid, natural, skew

__all__ = [
    "MIN_IMAGES",
    "Division",
    "ImageSubset",
    "auxiliary",
    "classes",
    "dirichlet",
    "divide",
    "feature_clusters",
    "iid",
    "listed",
    "natural",
    "skew",
    "split",
    "write_division",
]
