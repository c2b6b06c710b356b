"""Forward passes of views of several sizes (multi-crop, SwAV, arXiv 2006.09882)."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor


def by_size(images: Sequence[Tensor]) -> list[Tensor]:
    """Concatenate consecutive views of equal size along the batch, so that each size needs one forward pass.

    ``images`` are ``(batch, channels, size, size)``, or the output of frozen stages. The order of views is kept.
    """
    return [torch.cat(list(group)) for _, group in groupby(images, key=lambda view: view.shape[1:])]
