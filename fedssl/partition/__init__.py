"""Who holds what: every picture belongs to exactly one client."""

from fedssl.partition.deal import MIN_PICTURES, auxiliary, classes, dirichlet, iid, skew, split

__all__ = ["MIN_PICTURES", "auxiliary", "classes", "dirichlet", "iid", "skew", "split"]
