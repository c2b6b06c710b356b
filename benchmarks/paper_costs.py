"""The cost table of LW-FedSSL (Tun et al., arXiv 2401.11647, Table 3), counted as by its authors, for any schedule.

Computation follows Appendix A.1 and, where it is silent, the values that reproduce the table: multiply-adds of linear
layers, convolutions and attention, and 5 per element of the layer normalizations in the encoder's stages, all called
FLOPs. It is of one image, once per round; images, epochs and, except for SimCLR, the second view do not count. The
online network counts forward, and twice that backward where it is trained; the target network forward; alignment one
forward pass of the encoder. Frozen stages count for every network that has them.

Communication is of the encoder's stages, for a client that takes part in every round: trained stages are downloaded and
uploaded, and with calibration frozen stages are downloaded, too. Heads, the patch embedding and the download of a
stage's last aggregation do not count.

`fedssl.step_cost` and the bytes of messages give the real costs of our clients.
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
    """A piece of the network: FLOPs of its forward pass, and its parameters."""

    forward: int
    parameters: list[nn.Parameter]

    @property
    def training(self) -> int:
        """Return the FLOPs forward and, if a parameter is trained, backward."""
        return self.forward * (3 if any(parameter.requires_grad for parameter in self.parameters) else 1)


def paper_flops(
    method: SSLMethod, schedule: Sequence[Phase], *, image: Tensor, aligned: bool = False, views: int = 1
) -> int:
    """Return the FLOPs of a client over all rounds, for an ``image`` ``(1, channels, height, width)``.

    ``method`` has the head ``projector`` and optionally ``predictor``, and is left in eval mode. ``aligned``: whether
    clients align representations. ``views``: 1, or 2 for SimCLR, which the paper counts without a target network.
    """
    encoder, heads = _pieces(method, image)
    has_target = "target_encoder" in dict(method.named_children())
    total = 0
    for stage in schedule:
        running = encoder[: 1 + stage.depth]  # the first piece is the stem
        representations = sum(piece.forward for piece in running)
        with set_active_stages(method, depth=stage.depth, frozen=stage.frozen):
            costs = sum(piece.training for piece in (*running, *heads))
        costs += (representations + heads[0].forward) * has_target + representations * aligned
        total += stage.rounds * views * costs
    return total


def paper_bytes(method: SSLMethod, schedule: Sequence[Phase], *, calibrated: bool = False) -> tuple[int, int]:
    """Return the downloaded and uploaded bytes of a client over all rounds.

    All stages of the method's encoder must be active. ``calibrated``: whether the server changes all stages each round.
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
    """Return stem and stages of the encoder, and the heads."""
    method.eval()  # batch normalization of a single image
    encoder, children = method.encoder, dict(method.named_children())
    stem = encoder.stage_range("")  # of parameters outside of all stages
    stem_parameters = [parameter for name, parameter in encoder.named_parameters() if encoder.stage_range(name) == stem]
    flops, x = _forward(encoder.run_stem, image)
    pieces = [Piece(flops, stem_parameters)]
    for stage in encoder.stage_modules():
        flops, x = _forward(stage, x)
        pieces.append(Piece(flops, list(stage.parameters())))
    x = encoder.pool(x)
    heads = []
    for name in ("projector", "predictor"):
        if name in children:
            flops, x = _forward(children[name], x)
            heads.append(Piece(flops, list(children[name].parameters())))
    return pieces, heads


def _forward(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[int, Tensor]:
    """Return the FLOPs of a forward pass, and its output."""
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
