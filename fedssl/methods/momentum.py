"""Base classes of methods with an online network and a target network that is its moving average, such as BYOL.

As in the code of FedU and FedEMA the decay of the target is constant, and by default the target stays with the client
between rounds. It starts as a copy of the online network. In FedU's code a client's first target *is* the online
network and therefore identical to it at every step. In the code of FedU2 targets are exchanged and averaged
(``target_init="average"``); in LW-FedSSL's Algorithm 2 they are copied in every round (``target_init="reset"``).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fedssl.encoders import Encoder
from fedssl.encoders.base import frozen_copy
from fedssl.methods.base import SSLMethod
from fedssl.methods.heads import MLP, predictor_for


class EMAMethod(SSLMethod):
    """Online networks, and targets of some of them that are their moving average; a subclass adds the targets.

    The target is in train mode like the online network. The moving average covers parameters only and is updated after
    each step: ``ema_decay`` 0 copies the online network, 1 never changes the target. If the encoder grows by stages,
    ``target_init`` "persist" and "average" start with a copy of the online network in every stage.
    """

    target_encoder: Encoder

    def __init__(
        self, encoder: Encoder, *, ema_decay: float, target_init: str = "persist", ema_schedule: str = "constant"
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.ema_decay, self.ema_schedule = ema_decay, ema_schedule
        self.follows_rounds = ema_schedule != "constant"
        self._followed: list[str] = []
        self.target_init = target_init

    @property
    def current_decay(self) -> float:
        """Decay of the target in the current round, constant within it: clients participate more or less often."""
        if self.ema_schedule == "constant":
            return self.ema_decay
        done = min((self.round - 1) / max(self.rounds - 1, 1), 1.0)
        return 1 - (1 - self.ema_decay) * (1 + math.cos(math.pi * done)) / 2

    @property
    def step_constants(self) -> tuple[float, ...]:
        return (self.current_decay,)

    def add_target(self, part: str) -> None:
        """Add the target of a part, ``target_`` followed by its name: a copy, which the moving average then updates."""
        self.add_module(f"target_{part}", frozen_copy(self.get_submodule(part)))
        self._followed.append(part)
        if self.target_init != "average":
            self.local_parts = (*self.local_parts, f"target_{part}")
        self._ema_pairs = self._pairs()

    def start_round(self, *, first: bool) -> None:
        super().start_round(first=first)
        if self.target_init == "reset" or (first and self.target_init == "persist"):
            for online, target in self._networks():
                target.load_state_dict(online.state_dict())

    def train(self, mode: bool = True) -> "EMAMethod":
        """Set training mode, and update the list of averaged parameters, because the trained ones may have changed."""
        super().train(mode)
        self._ema_pairs = self._pairs()
        return self

    def _networks(self) -> list[tuple[nn.Module, nn.Module]]:
        return [(self.get_submodule(part), self.get_submodule(f"target_{part}")) for part in self._followed]

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        pairs = [
            pair
            for network, target in self._networks()
            for pair in zip(network.parameters(), target.parameters(), strict=True)
            if pair[0].requires_grad
        ]
        return [online for online, _ in pairs], [target for _, target in pairs]

    def on_step_end(self) -> None:
        online, target = self._ema_pairs
        # target = decay * target + (1 - decay) * online; torch ignores the third argument.
        get_ema_multi_avg_fn(self.current_decay)(target, online, 0)


class EMATargetMethod(EMAMethod):
    r"""Online encoder and projector, and a target encoder and projector that are their moving average.

    Each view has a separate forward pass through each network. Batch normalization of the target uses batch statistics,
    and its running statistics come from its own forward passes. A batch needs at least three images: batch
    normalization maps any two images to 1 and -1.

    $$
    \text{after a step: } \xi \leftarrow m \, \xi + (1 - m) \, \theta \qquad
    \text{at the start of a round: } \xi \leftarrow
    \begin{cases} \xi_k & \text{persist} \\ \theta & \text{reset} \\ \xi_g & \text{average} \end{cases}
    $$

    with $\theta$ the trained online weights, $\xi$ those of the target, m the decay, $\xi_k$ the client's last target
    ($\theta$ in its first round), and $\xi_g$ the server's mean of targets.

    ``predictor`` builds the predictor from the length of a projection, which must equal the length of its output; None:
    the method has none.
    """

    min_batch_size = 3
    projector: MLP
    target_projector: MLP

    def __init__(
        self,
        encoder: Encoder,
        *,
        projector: Callable[[int], MLP],
        predictor: Callable[[int], MLP] | None = None,
        ema_decay: float,
        target_init: str = "persist",
        ema_schedule: str = "constant",
    ) -> None:
        super().__init__(encoder, ema_decay=ema_decay, target_init=target_init, ema_schedule=ema_schedule)
        self.projector = projector(encoder.feature_dim)
        for part in ("encoder", "projector"):
            self.add_target(part)
        if predictor is not None:
            self.predictor = predictor_for(self.projector, predictor)

    def forward_views(self, view1: Tensor, view2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the online network's predictions p1, p2 and the target's projections z1, z2, each ``(batch, dim)``."""
        p1, p2 = (self.predictor(self.projector(self.encoder(view))) for view in (view1, view2))
        with torch.no_grad():
            z1, z2 = (self.target_projector(self.target_encoder(view)) for view in (view1, view2))
        return p1, p2, z1, z2
