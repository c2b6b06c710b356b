"""t-SNE (van der Maaten and Hinton, 2008), without torch."""

import numpy as np

from fedssl.seeding import derive_seed


def tsne(features: np.ndarray) -> np.ndarray:
    """Compute the t-SNE of at least 2 features ``(n, dim)``, ``(n, 2)``, whatever the number of cores."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    init = "pca" if np.ptp(features, axis=0).any() else "random"  # equal points have no principal directions
    reducer = TSNE(
        perplexity=min(30.0, (len(features) - 1) / 3), init=init, random_state=derive_seed(0, "t-SNE") % 2**32
    )
    with threadpool_limits(limits=1):  # sums of several threads depend on their order
        points: np.ndarray = reducer.fit_transform(features)
    return points
