"""Partitions of pictures among clients: every picture belongs to exactly one."""

from fedssl.partition.deal import auxiliary, split
from fedssl.partition.rules import MIN_PICTURES, classes, dirichlet, iid, natural, skew

__all__ = ["MIN_PICTURES", "auxiliary", "classes", "dirichlet", "iid", "natural", "skew", "split"]
