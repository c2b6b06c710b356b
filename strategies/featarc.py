"""FeatARC: clients are clustered by the representations of their models (Wang et al., ICLR 2023, arXiv 2210.10947).

Section 5 of the paper. There are C models. A client is assigned to the model whose representations are nearest to those
of the client's own last model, by minus their mean cosine on the same images. It trains a copy of that model and is
pulled to its representations by a regularizer (`fedssl.regularizers.alignment`, with the cosine). Each model becomes
the mean of its members. ``clusters=1`` is the paper's "align only", ``regularizer=none`` its "cluster only". C = 1
without the regularizer is federated averaging. With C = K, once each client has a model, every client trains alone.

Deviations from the authors' code: a model is averaged over its own members (theirs indexes clients in another order),
complete partitions are trained on (theirs drops a fifth), and representations are compared with representations, also
in the regularizer (theirs compares a projection with a representation).

Where the paper is silent, our choices are: the models have the same initial weights; images are compared without
augmentation; a client keeps its model if another one is equally near. With ``assign_at="server"`` the server compares
on its own images, so that a client downloads one model instead of C.
"""

from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.cluster_assignment import ClientAssignedClusters, SelectByFeatures, ServerAssignedClusters
from strategies.fedavg import make_weighted_mean


class FeatARC(FedSSLStrategy):
    r"""Averaging within clusters of clients with similar representations.

    $$
    D(h, h') = -\frac{\langle h, h' \rangle}{\lVert h \rVert \, \lVert h' \rVert} \qquad
    c_k = \underset{c}{\operatorname{argmin}} \; \frac{1}{n} \sum_x D(h_{v_k}(x), h_{w_c}(x)) \qquad
    w_c = \sum_{k: c_k = c} \beta_k v_k
    $$

    with $v_k$ the model of client k after its last training, $h_w(x)$ the representation of image x by model w, $w_c$
    the model of cluster c, and $\beta_k$ the weight of a member (``weighting``).
    """

    def __init__(
        self, *, clusters: int = 2, assign_at: str = "client", num_images: int = 512, weighting: str = "uniform"
    ) -> None:
        base_strategy = ServerStrategy(make_weighted_mean(weighting))
        if clusters == 1:
            super().__init__(base_strategy)
        elif assign_at == "server":
            super().__init__(ServerAssignedClusters(base_strategy, clusters=clusters, num_images=num_images))
        else:
            super().__init__(
                ClientAssignedClusters(base_strategy, clusters=clusters), SelectByFeatures(num_images=num_images)
            )
