"""L-DAWA_FedU (Rehman et al., ICCV 2023): L-DAWA weighted by examples (Eq. 5) on the server, FedU on the clients.

The paper describes it in one sentence, and there is no published code. With SimCLR, which has no predictor, DAPU
decides on the projector. See `strategies.fedu`.
"""

from strategies.fedu import FedUClient
from strategies.l_dawa import LDAWA


class LDAWAFedU(LDAWA):
    r"""L-DAWA with FedU's client side.

    $$
    w^{(l)} = \frac{\sum_k n_k \, \delta_k^{(l)} \, w_k^{(l)}}{\sum_k n_k} \qquad
    p_k \leftarrow \begin{cases} p_g & d_k < \mu \\ p_k & \text{else} \end{cases}
    $$

    with the cosine $\delta_k^{(l)}$ of `strategies.l_dawa.LDAWA` and the distance $d_k$ of `strategies.fedu.FedU`.
    """

    def __init__(
        self,
        *,
        weighting: str = "examples",
        buffers: str = "average",
        warmup_rounds: int = 0,
        normalize: bool = False,
        scale_at: str = "server",
        aggregate: str = "online",
        update: str = "online",
        predictor: str = "dapu",
        distance: str = "mean_conv_l2",
        predictor_threshold: float = 0.4,
    ) -> None:
        client = FedUClient(
            aggregate=aggregate,
            update=update,
            predictor=predictor,
            distance=distance,
            predictor_threshold=predictor_threshold,
        )
        super().__init__(
            weighting=weighting,
            buffers=buffers,
            warmup_rounds=warmup_rounds,
            normalize=normalize,
            scale_at=scale_at,
            client=client,
        )
