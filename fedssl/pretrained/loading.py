"""Strict loading of a source's weights into an encoder."""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from fedssl.atomic_files import atomic_write
from fedssl.config.settings import statistic_of_channels
from fedssl.encoders.base import Encoder
from fedssl.encoders.library import LibraryEncoder
from fedssl.errors import InputError
from fedssl.pretrained.adapting import POSITIONS, adapt_tensor, fold_class_position
from fedssl.pretrained.checkpoints import Checkpoint
from fedssl.pretrained.names import Match, known_statistics, match_names
from fedssl.pretrained.sources import file_of, read_source
from fedssl.safe_io import sanitize

_MAX_LISTED = 3  # tensors of each kind in an error message
_MAX_NETWORKS = 10  # ignored networks and heads in the log
_ADAPTER = re.compile(r"\badapters\.\d+\.(down|up)\.")
_COUNTER = "num_batches_tracked"  # last component of a name that checkpoints of torch before 0.4.1 lack
_CLASS, _REGISTERS = r"(.*\.)?(cls_token|class_token)", r"(.*\.)?(reg_token|register_tokens)"
_POSITIONS = r"(.*\.)?(pos_embed|encoder\.pos_embedding)"
_SET_REGISTERS = "set encoder.registers to the number of register tokens of the weights"
# Settings of this project's encoders to change, by how a tensor does not fit and by its name.
_REMEDIES = {
    "are missing": {_CLASS: "set encoder.pool=mean", _REGISTERS: _SET_REGISTERS},
    "are unexpected": {
        _CLASS: "set encoder.pool=token",
        _POSITIONS: "set encoder.positions=learned",
        _REGISTERS: _SET_REGISTERS,
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
        raise InputError(
            f"encoder.weights={source} has no tensor of the encoder: it has {_listed(list(checkpoint.tensors))}, and "
            f"the encoder has {_listed(list(template))}; set the encoder that the weights were trained with"
        )
    tensors, adapted = _fit(encoder, template, checkpoint, match, source=source)
    encoder.load_state_dict({**template, **tensors})
    changes = [f"{len(tensors)} tensors with {match.layout.name} and the prefix {match.prefix or 'none'}"]
    if match.alternatives:
        changes.append(f"not used: other networks with the same names ({_listed(match.alternatives)})")
    if match.ignored:
        ignored = [f"{name} ({count})" for name, count in match.ignored.items()]
        changes.append(f"ignored {_listed(ignored, maximum=_MAX_NETWORKS)}")
    if adapted:
        changes.append(f"adapted {', '.join(adapted)}")
    return "; ".join(changes)


def initial_statistics(source: str, *, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return mean and standard deviation of the images that the source was trained on, one number for each channel.

    None if they are unknown. For another number of channels, all channels have the mean over the source's.
    """
    checkpoint = _read_once(source)
    mean, std, known = checkpoint.mean, checkpoint.std, known_statistics(checkpoint.tensors)
    if known is not None and mean is None:
        mean, std = (known[0],), (known[1],)
    if mean is None or std is None:
        return None
    return statistic_of_channels(mean, channels), statistic_of_channels(std, channels)


def store_initial_encoder(encoder: Encoder, file: Path) -> None:
    """Write the encoder's tensors as a source for resumed runs."""
    weights = dict(encoder.state_dict())
    atomic_write(file, lambda stream: torch.save(weights, stream))


def _fit(
    encoder: Encoder, template: Mapping[str, Tensor], checkpoint: Checkpoint, match: Match, *, source: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors with the encoder's names, shapes and dtypes, and a description of those that were adapted."""
    first_kernel = next((name for name, value in template.items() if value.ndim == 4), "")
    tensors: dict[str, Tensor] = {}
    adapted, misshapen, infinite = [], [], []
    values = {name: checkpoint.tensors[stored].detach() for name, stored in match.sources.items()}
    if fold_class_position(values, encoder):
        adapted.append("the class token by its position")
    for name, value in values.items():
        expected = template[name]
        fitting = adapt_tensor(name, value, encoder, expected, first_kernel=first_kernel)
        if fitting is None or fitting.shape != expected.shape:
            misshapen.append(f"{name} {tuple(value.shape)} instead of {tuple(expected.shape)}")
            continue
        if fitting.shape != value.shape:
            kind = "positions" if name in POSITIONS else "channels"
            adapted.append(f"{kind} of {name} from {tuple(value.shape)} to {tuple(fitting.shape)}")
        tensors[name] = fitting.to(expected.dtype)
        if not torch.isfinite(tensors[name]).all():
            infinite.append(name)
    missing = [name for name in template if name not in match.sources and not name.endswith(_COUNTER)]
    problems = {
        "are missing": missing,
        "are unexpected": match.unexpected,
        "have other shapes": misshapen,
        "have values that are not finite": infinite,
    }
    found = [f"{len(names)} {kind} ({_listed(names)})" for kind, names in problems.items() if names]
    if found:
        raise InputError(
            f"encoder.weights={source} does not fit the encoder: of {len(template)} tensors, {', '.join(found)}; "
            f"{_remedy(encoder, problems)}"
        )
    return tensors, adapted


def _remedy(encoder: Encoder, problems: Mapping[str, Collection[str]]) -> str:
    """Return what to do about tensors that do not fit, by how they do not."""
    found = [(kind, name) for kind, names in problems.items() for name in names]
    if any(_ADAPTER.search(name) for _, name in found):
        return (
            "it is the encoder of a run with tuning=adapter, which no other run can start from; set encoder.weights to "
            "the source of that run"
        )
    remedies = dict.fromkeys(
        next((remedy for pattern, remedy in _REMEDIES.get(kind, {}).items() if re.fullmatch(pattern, name)), None)
        for kind, name in found
    )
    known = [remedy for remedy in remedies if remedy]
    if len(known) < len(remedies) or isinstance(encoder, LibraryEncoder):  # the settings of a library's are its own
        return "set the encoder that the weights were trained with, or weights of this encoder"
    return " and ".join(known)


def _listed(names: Sequence[str], *, maximum: int = _MAX_LISTED) -> str:
    return sanitize(", ".join(name[:100] for name in names[:maximum])) + (", ..." if len(names) > maximum else "")
