"""Strict loading of a source's weights into an encoder, also of another image size or number of channels."""

import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedssl.atomic_files import atomic_write
from fedssl.config.settings import statistic_of_channels
from fedssl.encoders.base import Encoder
from fedssl.encoders.library import LibraryEncoder
from fedssl.errors import InputError, sanitize
from fedssl.logs import log_once
from fedssl.pretrained.checkpoints import Checkpoint
from fedssl.pretrained.names import LIGHTLY_SEQUENCE, Match, known_statistics, match_names
from fedssl.pretrained.positions import (
    POSITIONS,
    adapt_positions,
    fold_class_position,
    fold_register_positions,
    has_fixed_positions,
    patches_per_side,
)
from fedssl.pretrained.sources import file_of, read_source

_MAX_LISTED = 3  # tensors of each kind in an error message
_MAX_NETWORKS = 10  # ignored networks and heads in the log
_ADAPTER = re.compile(r"\badapters\.\d+\.(down|up)\.")
_COUNTER = "num_batches_tracked"  # last component of a name that checkpoints of torch before 0.4.1 lack
_CLASS, _REGISTERS = r"(.*\.)?(cls_token|class_token)", r"(.*\.)?(reg_token|register_tokens)"
_POSITIONS = r"(.*\.)?(pos_embed|encoder\.pos_embedding)"
_OTHER_POSITIONS = rf"{_POSITIONS} \(.*"  # with their shapes
_STATISTICS = "running_mean|running_var|num_batches_tracked"  # of batch normalization
# In names of that library's vision transformers and ResNets.
_OF_TRANSFORMERS = (".attention.attention.query.weight", "embedder.embedder.convolution.weight")
# Prefixes of MoCo v3 (https://github.com/facebookresearch/moco-v3), and the heads of its transformers by their width.
_MOCO_V3 = re.compile(r"(.*\.)?(base|momentum)_encoder\.")
_SMALL_KERNEL = 3  # of the first convolution for small images
_MOCO_V3_HEADS = {384: 12, 768: 12, 1024: 16, 1280: 16}
_SET_REGISTERS = "set encoder.registers to the number of register tokens of the weights"
# Settings of this project's encoders to change, by how a tensor does not fit and by its name.
_REMEDIES = {
    "are missing": {
        _CLASS: "set encoder.pool=mean",
        _REGISTERS: _SET_REGISTERS,
        rf".*\.({_STATISTICS})": "set encoder.norm=group, or, if they were trained with batch normalization, save "
        "network.state_dict(), which has its statistics",
    },
    "are unexpected": {
        _CLASS: "set encoder.pool=token",
        _POSITIONS: "set encoder.positions=learned",
        _REGISTERS: _SET_REGISTERS,
        rf".*\.({_STATISTICS})": "set encoder.norm=batch",
    },
    "have other shapes": {
        r"conv1\.weight \(.*": "set encoder.stem to that of the weights (imagenet: 7x7, small: 3x3)",
        rf"{_REGISTERS} \(.*": _SET_REGISTERS,
    },
}


def _read_once(source: str) -> Checkpoint:
    """Return `read_source` of a source, from memory unless its file has changed since the last call.

    A server builds its method several times. The tensors of the last source stay in memory.
    """
    file = file_of(source)
    found = file.stat() if file is not None and file.is_file() else None
    return _read(source, found and (found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=1)
def _read(source: str, version: tuple[int, int, int] | None) -> Checkpoint:
    return read_source(source)


def load_pretrained(encoder: Encoder, source: str) -> str:
    """Load the weights of a source into an encoder; return what was renamed, ignored or adapted.

    Every tensor of the encoder must be in the source, and every tensor of the source must be the encoder's, part of a
    classifier or head, or part of another network. Raise an `InputError` otherwise.
    """
    checkpoint = _read_once(source)
    template = encoder.state_dict()
    match = match_names(checkpoint.tensors, template)
    if match is None:
        remedy = "set the encoder that the weights were trained with"
        if any(name.endswith(_OF_TRANSFORMERS) for name in checkpoint.tensors):
            remedy = "transformers has its own names; use the same weights of timm, or give the tensors timm's names"
        raise InputError(
            f"encoder.weights={source} has no tensor of the encoder: it has {_listed(list(checkpoint.tensors))}, and "
            f"the encoder has {_listed(list(template))}; {remedy}"
        )
    tensors, adapted = _fit(encoder, template, checkpoint, match, source=source)
    encoder.load_state_dict({**template, **tensors})
    _check_heads(encoder, match, checkpoint.heads, source=source)
    _warn_of_stem(match, tensors, source=source)
    changes = [f"{len(tensors)} tensors with {match.layout} and the prefix {match.prefix or 'none'}"]
    if match.alternatives:
        changes.append(f"not used: other networks with the same names ({_listed(match.alternatives)})")
    if match.ignored:
        ignored = [f"{name} ({count})" for name, count in match.ignored.items()]
        changes.append(f"ignored {_listed(ignored, maximum=_MAX_NETWORKS)}")
    if adapted:
        changes.append(f"adapted {', '.join(adapted)}")
    return "; ".join(changes)


def _check_heads(encoder: Encoder, match: Match, stated: int | None, *, source: str) -> None:
    """Refuse another number of attention heads than the source's: no tensor depends on it, but the outputs do.

    Warn if the number follows only from the names of the source.
    """
    heads = {number for module in encoder.modules() if isinstance(number := getattr(module, "num_heads", None), int)}
    if stated is not None and heads - {stated}:
        raise InputError(
            f"encoder.weights={source} was trained with {stated} attention heads, and the encoder has {max(heads)}; "
            f"set encoder.heads={stated}"
        )
    expected = _MOCO_V3_HEADS.get(encoder.feature_dim)
    if _MOCO_V3.fullmatch(match.prefix) and expected and heads - {expected}:
        log_once(
            logging.WARNING,
            f"encoder.weights={source} has the names of MoCo v3, whose vision transformers of this width have "
            f"{expected} attention heads, and the encoder has {max(heads)}; set encoder.heads={expected} with "
            "encoder=vit_small or another one that has this setting",
        )


def _warn_of_stem(match: Match, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Warn of libraries whose ResNets begin in another way, which no tensor shows."""
    kernel, found = tensors.get("conv1.weight"), ""
    if match.layout == LIGHTLY_SEQUENCE:
        found = "of a sequence of lightly's modules, which lacks the activation after bn1 that this encoder has"
    elif match.prefix.endswith("backbone.") and kernel is not None and kernel.shape[-1] == _SMALL_KERNEL:
        found = "of solo-learn, whose small stem pads images by 2 pixels, and that of this encoder by 1"
    if found:
        line = f"encoder.weights={source} has the names {found}"
        log_once(logging.WARNING, f"{line}: its features differ from those of the source until it is trained further")


def initial_statistics(source: str, *, channels: int) -> dict[str, tuple[float, ...]] | None:
    """Return ``mean`` and ``std`` of the images that the source was trained on, one number for each channel.

    None if they are unknown. For another number of channels, all channels have the mean over the source's.
    """
    checkpoint = _read_once(source)
    mean, std, known = checkpoint.mean, checkpoint.std, known_statistics(checkpoint.tensors)
    if known is not None and mean is None:
        mean, std = (known[0],), (known[1],)
    if mean is None or std is None:
        return None
    return {"mean": statistic_of_channels(mean, channels), "std": statistic_of_channels(std, channels)}


def initial_pixels(source: str) -> Mapping[str, Any]:
    """Return the settings of the pixels that the source was trained on, see `PixelSettings`; empty if unknown."""
    return _read_once(source).pixels


def store_initial_encoder(encoder: Encoder, file: Path) -> None:
    """Write the encoder's tensors as a source for resumed runs."""
    weights = dict(encoder.state_dict())
    atomic_write(file, lambda stream: torch.save(weights, stream))


def _fit(
    encoder: Encoder, template: Mapping[str, Tensor], checkpoint: Checkpoint, match: Match, *, source: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors with the encoder's names, shapes and dtypes, and a description of those that were adapted."""
    tensors: dict[str, Tensor] = {}
    adapted, misshapen, infinite, integers = [], [], [], []
    values = {name: _widened(checkpoint.tensors[stored].detach()) for name, stored in match.sources.items()}
    if fold_class_position(values, encoder):
        adapted.append("the class token by its position")
    if fold_register_positions(values, encoder):
        adapted.append("the register tokens by their positions")
    for name, value in values.items():
        expected = template[name]
        fitting = adapt_tensor(name, value, encoder, expected)
        if fitting is None or fitting.shape != expected.shape:
            misshapen.append(f"{name} {tuple(value.shape)} instead of {tuple(expected.shape)}")
            continue
        if fitting.shape != value.shape:
            kind = "positions" if name in POSITIONS else "channels"
            adapted.append(f"{kind} of {name} from {tuple(value.shape)} to {tuple(fitting.shape)}")
            if kind == "channels" and value.shape[1] > (used := fitting.shape[1]) > 1:
                line = f"encoder.weights={source} has {value.shape[1]} channels, of which the first {used} are used"
                log_once(logging.WARNING, f"{line}; bring those of the images into the same order")
        if expected.is_floating_point() and not value.is_floating_point():
            integers.append(name)
        tensors[name] = fitting.to(expected.dtype)
        if not torch.isfinite(tensors[name]).all():
            infinite.append(name)
    missing = [name for name in template if name not in match.sources and not name.endswith(_COUNTER)]
    unexpected = [name for name in match.unexpected if not has_fixed_positions(checkpoint.tensors[name], encoder)]
    problems = {
        "are missing": missing,
        "are unexpected": unexpected,
        "have other shapes": misshapen,
        "have values that are not finite": infinite,
        "are integers, as of a quantized network": integers,
    }
    found = [f"{len(names)} {kind} ({_listed(names)})" for kind, names in problems.items() if names]
    if found:
        raise InputError(
            f"encoder.weights={source} does not fit the encoder: of {len(template)} tensors, {', '.join(found)}; "
            f"{_remedy(encoder, problems)}"
        )
    return tensors, adapted


def _widened(tensor: Tensor) -> Tensor:
    """Return weights in half precision as float32, in which sums and interpolations are exact enough."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def _remedy(encoder: Encoder, problems: Mapping[str, Collection[str]]) -> str:
    """Return what to do about tensors that do not fit, by how they do not."""
    found = [(kind, name) for kind, names in problems.items() for name in names]
    # Positions follow from the class token and the registers, whose remedies are theirs.
    found = [(kind, name) for kind, name in found if not re.fullmatch(_OTHER_POSITIONS, name)]
    if any(_ADAPTER.search(name) for _, name in found):
        return (
            "it is the encoder of a run with tuning=adapter, which no other run can start from; set encoder.weights to "
            "the source of that run"
        )
    missing, all_statistics = (
        [name for name in names if re.fullmatch(rf".*\.({_STATISTICS})", name) and not name.endswith(_COUNTER)]
        for names in (problems["are missing"], encoder.state_dict())
    )
    if 0 < len(missing) < len(all_statistics):
        return "they have the statistics of some layers only; save all tensors of network.state_dict()"
    remedies = dict.fromkeys(
        next((remedy for pattern, remedy in _REMEDIES.get(kind, {}).items() if re.fullmatch(pattern, name)), None)
        for kind, name in found
    )
    known = [remedy for remedy in remedies if remedy]
    is_of_library = isinstance(encoder, LibraryEncoder)  # whose settings are its own
    if not known or len(known) < len(remedies) or is_of_library:
        return "set the encoder that the weights were trained with, or weights of this encoder"
    return " and ".join(known)


def _listed(names: Sequence[str], *, maximum: int = _MAX_LISTED) -> str:
    return sanitize(", ".join(name[:100] for name in names[:maximum])) + (", ..." if len(names) > maximum else "")


def adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """Convert a kernel ``(out, in, height, width)`` to another number of input channels, as timm's `adapt_input_conv`.

    One channel has the sum over all, so that a gray image has the same output as three equal channels. Otherwise the
    channels are repeated and multiplied by in / channels, which keeps the output for equal channels if channels is a
    multiple of in.
    """
    before = weight.shape[1]
    if channels == 1:
        return weight.sum(dim=1, keepdim=True)
    repeated = weight.repeat(1, math.ceil(channels / before), 1, 1)[:, :channels]
    return repeated * (before / channels)


def adapt_tensor(name: str, value: Tensor, encoder: Encoder, template: Tensor) -> Tensor | None:
    """Return the tensor of a checkpoint with the shape of the encoder's ``template``, or None if it does not fit.

    Kernels on images are adapted to their channels. A network may have several, and they may not be its first ones.
    """
    if value.shape == template.shape:
        return value
    is_kernel = value.ndim == template.ndim == 4 and template.shape[1] == encoder.channels
    if is_kernel and _without(value, 1) == _without(template, 1):
        return adapt_channels(value, template.shape[1])
    if name in POSITIONS and value.ndim == 3 and value.shape[2] == template.shape[2]:
        side = patches_per_side(encoder)
        return None if side is None else adapt_positions(value, side=side, prefix=template.shape[1] - side * side)
    return None


def _without(tensor: Tensor, axis: int) -> list[int]:
    return [length for number, length in enumerate(tensor.shape) if number != axis]
