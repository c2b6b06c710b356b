"""FedBN (Li et al., ICLR 2021): batch normalization stays on the client, all other layers are averaged.

Batch norm is detected by module type, not by a "bn" in its name, which in the authors' code (and in that of Dec-SSL)
misses the normalizations of shortcuts and stems. From its second participation on, a client uses its own scale, shift,
running statistics and counter of such a module.

These layers are exchanged nevertheless, because the global model is evaluated and exported with them, and because a new
client starts from them. The global model contains the clients' averages (as in Dec-SSL's comparison). Clients do not
load them from their second participation on.
"""

from torch.nn.modules.batchnorm import _BatchNorm

from fedssl.arrays import Layers
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import clone_tensors, local_names, part_name
from fedssl.rules import Problem
from fedssl.wire.messages import TrainPlan
from strategies.base import ClientStrategy, FedSSLStrategy, ServerStrategy
from strategies.fedavg import make_weighted_mean
from strategies.run_context import RunContext
from strategies.types import ClientState


def batch_norm_names(method: SSLMethod) -> list[str]:
    """Return the names of the layers of all batch normalizations, except broadcast parts and base layers, in order."""
    base = set(method.base_names)
    modules = {name for name, module in method.named_modules() if isinstance(module, _BatchNorm)}
    return [
        name
        for name in method.named_tensors
        if name.rpartition(".")[0] in modules and part_name(name) not in method.broadcast_parts and name not in base
    ]


class FedBNClient(ClientStrategy):
    """Client that keeps its batch normalization."""

    keeps = "its batch norm"

    def problem(self, context: RunContext) -> Problem:
        if not batch_norm_names(context.method):
            return "strategy=fedbn but the model trains no batch normalization; use strategy=fedavg"
        return None

    def state_to_save(
        self, method: SSLMethod, plan: TrainPlan, *, start: Layers, state: ClientState | None
    ) -> ClientState:
        own = {*local_names(method), *batch_norm_names(method)}
        return clone_tensors(
            method, [name for name in method.named_tensors if name in own and name not in method.inactive_names]
        )


class FedBN(FedSSLStrategy):
    r"""Federated averaging in which every client keeps its own batch normalization.

    $$
    w^{(l)} = \sum_k \beta_k w_k^{(l)} \qquad
    \text{start of } k: \; \begin{cases} w_k^{(l)} & l \in B \\ w^{(l)} & l \notin B \end{cases}
    $$

    with B the batch normalizations: scale, shift, running statistics and counter.
    """

    def __init__(self, *, weighting: str = "examples") -> None:
        super().__init__(ServerStrategy(make_weighted_mean(weighting)), FedBNClient())
