"""FedBN (Li et al., ICLR 2021): batch normalisation stays with the client, everything else is averaged.

Batch norm is found by the type of the module, not by a "bn" in its name, which in the authors' code (and in that of
Dec-SSL) misses the normalisations of shortcuts and stems. Scale, shift, running statistics and counter of such a module
are the client's own from its second participation on.

They travel nevertheless: the global model needs some, because it is evaluated and exported, and because a new client
begins with it. It holds the clients' averages (as in Dec-SSL's comparison), which clients do not load any more from
their second participation on.
"""

from dataclasses import replace

from torch.nn.modules.batchnorm import _BatchNorm

from fedssl.arrays import Layers
from fedssl.errors import InputError
from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import clone_tensors, local_names, part_name
from fedssl.wire.messages import TrainPlan
from strategies.base import ClientStrategy, FedSSLStrategy, ServerStrategy
from strategies.fedavg import mean
from strategies.interfaces import ClientState, CommunicationSummary, StrategyContext


def batch_norm_names(method: SSLMethod) -> list[str]:
    """Names of the layers of all batch normalisations but those that a server side gives, in the order of the model."""
    modules = {name for name, module in method.named_modules() if isinstance(module, _BatchNorm)}
    return [
        name
        for name in method.named_tensors
        if name.rpartition(".")[0] in modules and part_name(name) not in method.broadcast_parts
    ]


class FedBNClient(ClientStrategy):
    """A client that keeps its batch normalisation."""

    def validate(self, context: StrategyContext) -> None:
        if not batch_norm_names(context.method):
            raise InputError("strategy=fedbn but the model has no batch normalisation; use strategy=fedavg")

    def describe_communication(self, method: SSLMethod, usual: CommunicationSummary) -> CommunicationSummary:
        return replace(usual, local_state=", ".join(["its batch norm", *method.local_parts]))

    def state_to_save(
        self, method: SSLMethod, plan: TrainPlan, *, start: Layers, state: ClientState | None
    ) -> ClientState:
        own = {*local_names(method), *batch_norm_names(method)}
        return clone_tensors(
            method, [name for name in method.named_tensors if name in own and name not in method.inactive_names]
        )


class FedBN(FedSSLStrategy):
    """Federated averaging in which every client keeps its own batch normalisation; parameters as in `FedAvg`."""

    def __init__(self, *, weighting: str = "examples") -> None:
        super().__init__(ServerStrategy(mean(weighting)), FedBNClient())
