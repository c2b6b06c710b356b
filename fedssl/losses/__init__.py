"""Losses: pure functions of the outputs for the views of images, such as projections z and predictions p.

They have the standard forms, as written in the docstrings, except for two of L-DAWA's code, `nt_xent_one_sided` and
`barlow_twins_unbiased`, which are options of methods. All are computed in at least float32, also inside autocast.
"""

from fedssl.losses.contrastive import info_nce, nt_xent, nt_xent_one_sided, relational
from fedssl.losses.decorrelation import barlow_twins, barlow_twins_unbiased, vicreg
from fedssl.losses.distances import byol, feature_mse, negative_cosine, similarity_distillation, teacher_distance
from fedssl.losses.gaussianity import epps_pulley, sigreg
from fedssl.losses.masked_images import ijepa, masked_reconstruction, patchify
from fedssl.losses.precision import at_least_float32
from fedssl.losses.prototypes import dino, masked_tokens, sinkhorn, swav

__all__ = [
    "at_least_float32",
    "barlow_twins",
    "barlow_twins_unbiased",
    "byol",
    "dino",
    "epps_pulley",
    "feature_mse",
    "ijepa",
    "info_nce",
    "masked_reconstruction",
    "masked_tokens",
    "negative_cosine",
    "nt_xent",
    "nt_xent_one_sided",
    "patchify",
    "relational",
    "sigreg",
    "similarity_distillation",
    "sinkhorn",
    "swav",
    "teacher_distance",
    "vicreg",
]
