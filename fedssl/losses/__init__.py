"""Losses: pure functions of projections z, predictions p, scores or patches of the views of images.

They have the standard forms, as written in the docstrings, except for two of L-DAWA's code, `nt_xent_one_sided` and
`barlow_twins_unbiased`, which are options of methods. All are computed in at least float32, also inside autocast.
"""

from fedssl.losses.contrastive import info_nce, nt_xent, nt_xent_one_sided, relational
from fedssl.losses.cosine import byol, negative_cosine
from fedssl.losses.decorrelation import barlow_twins, barlow_twins_unbiased
from fedssl.losses.precision import at_least_float32

__all__ = [
    "at_least_float32",
    "barlow_twins",
    "barlow_twins_unbiased",
    "byol",
    "info_nce",
    "negative_cosine",
    "nt_xent",
    "nt_xent_one_sided",
    "relational",
]
