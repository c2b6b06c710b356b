"""FeatARC: clients are grouped by what their models see (Wang et al., ICLR 2023, arXiv 2210.10947, section 5).

There are C models. A client belongs to the model whose representations are nearest to those of the client's own last
model, by the mean of minus their cosine on the same images; it trains a copy of that model, whose representations it
stays near to by a regulariser (`fedssl.regularizers.alignment`, with the cosine); each model becomes the mean of its
own members. ``clusters=1`` is the paper's "align only", ``regularizer=none`` its "cluster only". C = 1 without the
regulariser is federated averaging, and with C = K, once each client has a model, every client trains alone.

Where this differs from the authors' code: a model is averaged over its own members (theirs takes clients by their
places in another order), whole partitions are trained on (theirs leaves out a fifth), and representations are compared
with representations, also in the regulariser (theirs compares a projection with a representation).

Ours, where the paper says nothing: the models begin alike; images are compared as they are, without augmentation; a
client stays with its model if another is only as near. With ``assign_at="server"`` the server compares on images of
its own, so that one model travels down and not C.
"""

from fedssl.errors import InputError
from strategies.base import FedSSLStrategy, ServerStrategy
from strategies.cluster_assignment import ClientAssignedClusters, SelectByFeatures, ServerAssignedClusters
from strategies.fedavg import mean
from strategies.weighted_sum import check_choice

PLACES = ("client", "server")


class FeatARC(FedSSLStrategy):
    """Averaging within clusters of clients whose representations are alike.

    Parameters
    ----------
    clusters : int
        C, the number of models, at least 1 and at most that of clients.
    assign_at : {"client", "server"}
        Who compares: every client, on its own images, for which it receives all models; or the server, on its own.
    num_images : int
        On how many images models are compared, at least 2.
    weighting : {"uniform", "examples"}
        Of the members of a cluster: alike, or by their numbers of images.

    Raises
    ------
    InputError
        One of them is not such a value.
    """

    def __init__(
        self, *, clusters: int = 2, assign_at: str = "client", num_images: int = 512, weighting: str = "uniform"
    ) -> None:
        check_choice("strategy.assign_at", assign_at, PLACES)
        check_num_images(num_images)
        base_strategy = ServerStrategy(mean(weighting))
        if assign_at == "server":
            super().__init__(ServerAssignedClusters(base_strategy, clusters=clusters, num_images=num_images))
        else:
            super().__init__(
                ClientAssignedClusters(base_strategy, clusters=clusters), SelectByFeatures(num_images=num_images)
            )


def check_num_images(num_images: int) -> None:
    """Refuse, by an `InputError`, too few images to compare models on."""
    if num_images < 2:
        raise InputError(f"strategy.num_images={num_images} must be at least 2, on which models are compared")
