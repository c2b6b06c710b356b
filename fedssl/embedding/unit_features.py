"""Centered features of length 1, whose inner products are cosines.

They are centered because representations behind a ReLU all have high cosines.
"""

import numpy as np

_ROUNDING = 1e-5  # of a centered feature compared with its length before


def unit_features(features: np.ndarray, *, center: np.ndarray | None = None) -> np.ndarray:
    """Center features ``(n, dim)``, by default with their mean, and scale them to length 1, float32 ``(n, dim + 1)``.

    A feature equal to the center has no direction; it becomes the last unit vector. Features of a collapsed encoder, or
    of equal images, therefore have the cosine 1.
    """
    exact = features.astype(np.float64)
    centered = exact - (exact.mean(axis=0) if center is None else center)
    lengths = np.linalg.norm(centered, axis=1)
    is_mean = lengths <= _ROUNDING * np.linalg.norm(exact, axis=1)
    centered[is_mean], lengths[is_mean] = 0, 1
    return np.column_stack([centered / lengths[:, None], is_mean]).astype(np.float32)
