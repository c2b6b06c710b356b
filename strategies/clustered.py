"""Clustered federated learning: several models under any rule, by the clients' losses or the angles of their updates.

``assign_by="loss"`` is IFCA (Ghosh et al., NeurIPS 2020, arXiv 2006.04088): every client receives all models and trains
the one with the smallest loss on its own images. ``assign_by="update_cosine"`` is hierarchical clustering of the
updates of one round by their angles (Briggs et al., IJCNN 2020, arXiv 2004.11791). `strategies.featarc` groups by
representations.

Ours: IFCA's models begin alike, and clients that cannot tell them apart are dealt to them in turn, where the paper
draws the models at random; losses are those of the self-supervised method on views drawn alike for all models, in
training mode; Briggs et al. cut their tree at a distance, here it is cut into so many clusters.
"""

from collections.abc import Callable, Mapping

from fedssl.errors import InputError
from strategies.base import ClientStrategy, FedSSLStrategy, ServerStrategy
from strategies.cluster_assignment import ClientAssignedClusters, OneShotClusters, SelectByLoss
from strategies.eua import EUA
from strategies.featarc import check_num_images
from strategies.fedavg import FedAvg
from strategies.l_dawa import LDAWA
from strategies.loss import LossWeighted
from strategies.m_dawa import MDAWA
from strategies.robust import Median
from strategies.weighted_sum import check_choice

WEIGHTED_RULES: Mapping[str, Callable[..., FedSSLStrategy]] = {"fedavg": FedAvg, "l_dawa": LDAWA, "m_dawa": MDAWA}
UNWEIGHTED_RULES: Mapping[str, Callable[..., FedSSLStrategy]] = {
    "eua": EUA,
    "loss_weighted": LossWeighted,
    "median": Median,
}
CHOICES = ("loss", "update_cosine")


class Clustered(FedSSLStrategy):
    """Several models, each aggregated over its own clients.

    Parameters
    ----------
    clusters : int
        The number of models, at least 1 and at most that of clients.
    assign_by : {"loss", "update_cosine"}
        As in the module.
    rule : str
        The aggregation within a cluster: a key of `WEIGHTED_RULES` or `UNWEIGHTED_RULES`, with the options that it
        has by itself.
    weighting : str or None
        Of those in `WEIGHTED_RULES`; None: their own.
    num_images : int
        On how many images losses are compared, at least 2.
    cluster_round : int
        In which round updates are sorted, for ``assign_by="update_cosine"``.

    Raises
    ------
    InputError
        One of them is not such a value.
    """

    def __init__(
        self,
        *,
        clusters: int = 2,
        assign_by: str = "loss",
        rule: str = "fedavg",
        weighting: str | None = None,
        num_images: int = 512,
        cluster_round: int = 1,
    ) -> None:
        check_choice("strategy.assign_by", assign_by, CHOICES)
        check_num_images(num_images)
        server: ServerStrategy
        client: ClientStrategy | None = None
        if assign_by == "update_cosine":
            server = OneShotClusters(base_strategy_of(rule, weighting), clusters=clusters, cluster_round=cluster_round)
        else:
            server, client = (
                ClientAssignedClusters(base_strategy_of(rule, weighting), clusters=clusters),
                SelectByLoss(num_images=num_images),
            )
        super().__init__(server, client)


def base_strategy_of(rule: str, weighting: str | None) -> ServerStrategy:
    """The server side of the rule of this name; raises `InputError` if there is none, or it has no such weighting."""
    check_choice("strategy.rule", rule, (*WEIGHTED_RULES, *UNWEIGHTED_RULES))
    if weighting is None:
        return {**WEIGHTED_RULES, **UNWEIGHTED_RULES}[rule]().server
    if rule not in WEIGHTED_RULES:
        raise InputError(f"strategy.weighting={weighting} but strategy.rule={rule} has no weighting; set it null")
    return WEIGHTED_RULES[rule](weighting=weighting).server
