"""Clustered federated learning: several models under any rule, by the clients' losses or the angles of their updates.

``assign_by="loss"`` is IFCA (Ghosh et al., NeurIPS 2020, arXiv 2006.04088): every client downloads all models and
trains the one with the smallest loss on its own images. ``assign_by="update_cosine"`` is hierarchical clustering of the
updates of one round by their angles (Briggs et al., IJCNN 2020, arXiv 2004.11791). `strategies.featarc` clusters by
representations.

Our choices: IFCA's models start with the same weights, and clients without a preference are assigned in turn, where the
paper initializes the models at random. Losses are those of the self-supervised method in training mode, on the same
views for all models. Briggs et al. cut their tree at a distance, here it is cut into a number of clusters.
"""

import logging
from collections.abc import Callable, Mapping

from fedssl.errors import InputError
from fedssl.logs import log_once
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.cluster_assignment import ClientAssignedClusters, OneShotClusters, SelectByLoss
from strategies.eua import EUA
from strategies.fedavg import FedAvg
from strategies.l_dawa import LDAWA
from strategies.loss_weighted import LossWeighted
from strategies.m_dawa import MDAWA
from strategies.robust import Median

NUM_IMAGES = 512  # default of ``num_images``
WEIGHTED_RULES: Mapping[str, Callable[..., FedSSLStrategy]] = {"fedavg": FedAvg, "l_dawa": LDAWA}
UNWEIGHTED_RULES: Mapping[str, Callable[..., FedSSLStrategy]] = {
    "eua": EUA,
    "loss_weighted": LossWeighted,
    "m_dawa": MDAWA,
    "median": Median,
}


class Clustered(FedSSLStrategy):
    r"""Several models, each aggregated over its own clients.

    $$
    \text{loss: } c_k = \underset{c}{\operatorname{argmin}} \; \mathcal{L}_k(w_c) \qquad
    \text{update\_cosine: } d(A, B) = \frac{1}{|A| |B|} \sum_{i \in A} \sum_{j \in B}
    \left( 1 - \frac{\langle \Delta_i, \Delta_j \rangle}{\lVert \Delta_i \rVert \, \lVert \Delta_j \rVert} \right)
    $$

    with $c_k$ the model of client k, $\mathcal{L}_k(w_c)$ the loss of model c on its images, and d the distance of two
    clusters of updates $\Delta_k$ (without running statistics). The nearest clusters are merged until C remain.
    """

    def __init__(
        self,
        *,
        clusters: int = 2,
        assign_by: str = "loss",
        rule: str = "fedavg",
        weighting: str | None = None,
        num_images: int = NUM_IMAGES,
        cluster_round: int = 1,
    ) -> None:
        base = base_strategy_of(rule, weighting)
        others = (cluster_round, 1) if assign_by == "loss" else (num_images, NUM_IMAGES)
        if others[0] != others[1]:
            name = "cluster_round" if assign_by == "loss" else "num_images"
            log_once(logging.WARNING, f"strategy.{name}={others[0]} has no effect on strategy.assign_by={assign_by}")
        if clusters == 1:
            super().__init__(base)
        elif assign_by == "update_cosine":
            super().__init__(OneShotClusters(base, clusters=clusters, cluster_round=cluster_round))
        else:
            super().__init__(ClientAssignedClusters(base, clusters=clusters), SelectByLoss(num_images=num_images))


def base_strategy_of(rule: str, weighting: str | None) -> ServerStrategy:
    """Return the server side of a rule. Raises `InputError` for a weighting of a rule without one."""
    if weighting is None:
        return {**WEIGHTED_RULES, **UNWEIGHTED_RULES}[rule]().server
    if rule not in WEIGHTED_RULES:
        raise InputError(f"strategy.weighting={weighting} but strategy.rule={rule} has no weighting; set it null")
    return WEIGHTED_RULES[rule](weighting=weighting).server
