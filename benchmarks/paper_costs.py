"""The cost table of LW-FedSSL (Tun et al., arXiv 2401.11647, Table 3), as its authors counted, of any schedule.

Computation follows Appendix A.1 and, where that is silent, what reproduces the table: multiply-adds of linear layers,
convolutions and attention, and 5 per element of the layer normalisations in the encoder's stages, all called FLOPs. It
is that of one image, once per round: images, epochs and, but for SimCLR, the second view do not count. The online
network counts forward, and twice that backward where it is trained; the target network forward; alignment one forward
pass of the encoder. Frozen stages count for every network that has them.

Communication is that of the encoder's stages, for a client that takes part in every round: those that are trained go
down and up, and with calibration the frozen ones come down too. Heads and the patch embedding do not count, nor that a
layer-wise client needs the last aggregation of each stage once more when the next one begins.

`fedssl.step_cost` and the messages' bytes tell what our clients really pay.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedssl.methods.base import SSLMethod
from fedssl.model_arrays import exchanged_names
from fedssl.schedule.phases import Phase
from fedssl.schedule.stages import Stages, set_active_stages
from fedssl.step_cost import count_flops

NORM = 5  # FLOPs per element of a layer normalisation


@dataclass(frozen=True)
class Piece:
    """A stretch of the network: FLOPs of its forward pass, and its parameters."""

    forward: int
    parameters: list[nn.Parameter]

    @property
    def training(self) -> int:
        """FLOPs forward and, if something in it is trained, backward."""
        return self.forward * (3 if any(parameter.requires_grad for parameter in self.parameters) else 1)


def paper_flops(
    method: SSLMethod, schedule: Sequence[Phase], *, image: Tensor, aligned: bool = False, views: int = 1
) -> int:
    """FLOPs of a client over all rounds.

    Parameters
    ----------
    method : SSLMethod
        Its heads are ``projector`` and, if it has one, ``predictor``; it is left in eval mode.
    image : Tensor
        Any, ``(1, channels, height, width)``.
    aligned : bool
        Whether clients align representations.
    views : int
        How many count: 1, and 2 for SimCLR, which the paper counts without a target network.
    """
    encoder, heads = _pieces(method, image)
    followed = "target_encoder" in dict(method.named_children())
    total = 0
    for stage in schedule:
        running = encoder[: 1 + stage.depth]  # the first one is the stem
        representations = sum(piece.forward for piece in running)
        with set_active_stages(method, depth=stage.depth, frozen=stage.frozen):
            costs = sum(piece.training for piece in (*running, *heads))
        costs += (representations + heads[0].forward) * followed + representations * aligned
        total += stage.rounds * views * costs
    return total


def paper_bytes(method: SSLMethod, schedule: Sequence[Phase], *, calibrated: bool = False) -> tuple[int, int]:
    """Bytes down and up of a client over all rounds.

    Parameters
    ----------
    method : SSLMethod
        All stages of its encoder run.
    calibrated : bool
        Whether the server changes all stages in every round.
    """
    prefixes = tuple(f"encoder.{name}." for name in method.encoder.stage_names)
    sizes = {name: method.named_tensors[name].nbytes for name in exchanged_names(method) if name.startswith(prefixes)}
    stages = Stages(method)
    down = up = 0
    for stage in schedule:
        trained = sum(sizes[name] for name in stages.trained(stage, sizes))
        frozen = sum(sizes[name] for name in stages.frozen(stage, sizes))
        up += stage.rounds * trained
        down += stage.rounds * (trained + frozen * calibrated)
    return down, up


@torch.no_grad()
def _pieces(method: SSLMethod, image: Tensor) -> tuple[list[Piece], list[Piece]]:
    """Stem and stages of the encoder, and the heads."""
    method.eval()  # batch normalisation of a single image
    encoder, children = method.encoder, dict(method.named_children())
    stem = encoder.stage_range("")  # of what belongs to no stage
    of_stem = [parameter for name, parameter in encoder.named_parameters() if encoder.stage_range(name) == stem]
    flops, x = _forward(encoder.stem, image)
    found = [Piece(flops, of_stem)]
    for stage in encoder.stages():
        flops, x = _forward(stage, x)
        found.append(Piece(flops, list(stage.parameters())))
    x = encoder.pool(x)
    heads = []
    for name in ("projector", "predictor"):
        if name in children:
            flops, x = _forward(children[name], x)
            heads.append(Piece(flops, list(children[name].parameters())))
    return found, heads


def _forward(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[int, Tensor]:
    """FLOPs of a forward pass, and its output."""
    elements: list[int] = []
    modules = function.modules() if isinstance(function, nn.Module) else ()
    hooks = [
        module.register_forward_hook(lambda module, inputs, output: elements.append(output.numel()))
        for module in modules
        if isinstance(module, nn.LayerNorm)
    ]
    with count_flops() as counter:
        out = function(x)
    for hook in hooks:
        hook.remove()
    # torch counts a multiplication and an addition as two.
    return counter.get_total_flops() // 2 + NORM * sum(elements), out
