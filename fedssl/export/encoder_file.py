"""The file of a trained encoder, written at the end of a run and loaded in one line.

    encoder = load_encoder("encoder.pt")
    with torch.no_grad():
        h = encoder(encoder.preprocess(images))  # images of Pillow, or uint8 (batch, channels, height, width)

The file is a dictionary that ``torch.load(weights_only=True)`` reads: ``format``, ``encoder`` (the settings of
``conf/encoder``), ``mean``, ``std``, ``metadata`` and ``weights`` (the encoder's ``state_dict``, for ResNets with
torchvision's names). An encoder with adapters also has their settings (``adapters``), and another format, which earlier
versions reject. Loading runs no code that the file chooses: it calls a function of ``fedssl.encoders`` or the
``build`` function of the caller.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedssl import encoders
from fedssl.atomic_files import atomic_write
from fedssl.config.targets import user_encoder
from fedssl.datasets.raster import pixel_settings
from fedssl.encoders.library import require_timm
from fedssl.errors import InputError, reason_of, sanitize
from fedssl.export.preprocess import Preprocess
from fedssl.export.weights import read_safetensors
from fedssl.machine.device_copies import copy_to_cpu
from fedssl.machine.devices import is_gpu
from fedssl.machine.meta_device import shapes_only
from fedssl.plain_values import plain_values
from fedssl.safe_io import check_tensors_like, read_tensors

_FORMATS = "fedssl-encoder-"
FORMAT = f"{_FORMATS}1"
_KEYS = frozenset({"format", "encoder", "mean", "std", "metadata", "weights"})
_KEYS_OF = {FORMAT: _KEYS, f"{_FORMATS}2": _KEYS | {"adapters"}}  # by format
MAX_BYTES = 2**33  # of a file


def save_encoder(
    path: str | Path,
    encoder: nn.Module,
    *,
    settings: Mapping[str, Any],
    mean: Sequence[float],
    std: Sequence[float],
    metadata: Mapping[str, Any],
) -> None:
    """Write an encoder with all settings needed to use it; an existing file is replaced atomically.

    Parameters
    ----------
    path : str or Path
        The file; its folder must exist.
    encoder : nn.Module
        Encoder built from ``settings``, on any device, with or without adapters.
    settings : mapping
        The resolved ``encoder`` group of the run's config: ``_target_`` and the arguments, as plain values.
    mean, std : sequence of float
        Statistics of the standardization, per channel, of pixels in [0, 1].
    metadata : mapping
        Further information (method, strategy, round, dataset) as JSON values, with `pixel_metadata` of the data set.
    """
    if not len(mean) == len(std) == settings["channels"]:
        raise InputError(
            f"mean={list(mean)} and std={list(std)} need one number for each of the {settings['channels']} channels; "
            "set dataset.mean and dataset.std"
        )
    tensors = encoder.state_dict()
    if any(is_gpu(tensor.device) for tensor in tensors.values()):
        tensors = dict(zip(tensors, copy_to_cpu(list(tensors.values())), strict=True))
    adapters = encoder.adapter_settings if isinstance(encoder, encoders.Encoder) else None
    content = {
        "format": f"{_FORMATS}2" if adapters else FORMAT,
        **({"adapters": adapters} if adapters else {}),
        "encoder": _plain(settings),
        "mean": [float(value) for value in mean],
        "std": [float(value) for value in std],
        "metadata": _plain(metadata),
        # Copies: a weight may be a view of a larger buffer, which would be saved completely. Bridges are not needed
        # after training; they serve the first stages in layer-wise training.
        "weights": {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
            if not name.startswith("bridges.")
        },
    }
    atomic_write(Path(path), lambda stream: torch.save(content, stream))


def load_encoder(path: str | Path, *, build: Callable[..., nn.Module] | None = None) -> nn.Module:
    """Load the encoder that a run or :func:`save_encoder` wrote, in eval mode on the CPU.

    Its parameters can be trained further; wrap feature extraction in ``torch.no_grad()``. Raise an `InputError` if the
    file is damaged or not an encoder's, or if ``build`` is needed.

    Parameters
    ----------
    path : str or Path
        The file, usually ``encoder.pt`` of a run folder.
    build : callable, optional
        Builds the encoder from its saved settings, given as keywords: for your own encoder, the class or function of
        its ``_target_``. None for the function of ``fedssl.encoders`` that the file names.

    Returns
    -------
    nn.Module
        Maps ``(batch, channels, size, size)`` to ``(batch, feature_dim)``, with the attributes ``feature_dim``,
        ``channels``, ``size``, ``mean``, ``std`` (tuples, one number per channel), ``metadata`` (dict) and
        ``preprocess`` (a :class:`Preprocess`). Its ``state_dict`` has only the encoder's parameter names.
    """
    content = read_content(Path(path))
    settings = content["encoder"]
    target = str(settings.get("_target_"))
    known = _builder(target) if build is None else None
    build = build or known
    if build is None:
        raise InputError(
            f"{path} holds the encoder {target}, which is not part of fedssl; pass the function that builds it, as in "
            f"load_encoder(path, build={target.rpartition('.')[2]}), or its settings with --config-dir FOLDER or "
            "fedssl.load(DIR, config_dir=FOLDER)"
        )
    if known is encoders.timm:
        require_timm(str(path))
    try:
        if known is not None:  # first without memory, since the settings may need any amount
            with shapes_only():
                check_tensors_like(content["weights"], _build(known, content).state_dict())
        with torch.random.fork_rng(devices=[]):  # weights drawn only to be overwritten
            encoder = _build(build, content)
        _load(encoder, content)
    except Exception as error:  # a constructor can raise any exception for such settings
        raise InputError(
            f"the weights in {path} do not fit its settings: {reason_of(error)}; export the encoder again"
        ) from error
    encoder.channels, encoder.size = settings["channels"], settings["size"]
    encoder.mean, encoder.std = tuple(content["mean"]), tuple(content["std"])
    encoder.metadata = content["metadata"]
    pixels = pixel_settings(encoder.metadata)
    encoder.preprocess = Preprocess(size=encoder.size, mean=encoder.mean, std=encoder.std, **pixels)
    result: nn.Module = encoder.eval()
    return result


def _build(build: Callable[..., nn.Module], content: Mapping[str, Any]) -> Any:
    """Build the encoder of a file, with its adapters if it has any."""
    encoder: Any = build(**{key: value for key, value in content["encoder"].items() if key != "_target_"})
    if "adapters" in content:
        encoder.add_adapters(**content["adapters"])
    return encoder


def _load(encoder: nn.Module, content: Mapping[str, Any]) -> None:
    check_tensors_like(content["weights"], encoder.state_dict())
    encoder.load_state_dict(content["weights"], strict=True)


def load_weights(path: str | Path, encoder: nn.Module) -> Mapping[str, Any]:
    """Load the weights of an encoder's file into an existing encoder.

    Return the file's ``encoder`` settings, ``size``, ``mean`` and ``std``, and the settings of its pixels.
    """
    content = read_content(Path(path))
    try:
        _load(encoder, content)
    except Exception as error:  # names and values can have any type
        raise InputError(
            f"{path} holds another encoder than this run's ({reason_of(error)}); give one with the same settings of "
            "encoder"
        ) from error
    settings = content["encoder"]
    about = {"encoder": settings, "size": settings["size"], "mean": content["mean"], "std": content["std"]}
    return about | pixel_settings(content["metadata"])


def describe_encoder(path: str | Path) -> dict[str, Any]:
    """Return the architecture and the preprocessing of an encoder's file as plain values, as a teacher needs them.

    ``encoder`` is the name of a function of ``fedssl.encoders``, ``arguments`` are its arguments, ``mean`` and ``std``
    are the statistics of the standardization, and ``adapters``, if there are any, their settings. Raise an
    `InputError` if another function built the encoder.
    """
    content = read_content(Path(path))
    arguments = dict(content["encoder"])
    target = str(arguments.pop("_target_", None))
    if _builder(target) is None:
        raise InputError(f"{path} holds the encoder {target}, which is not part of fedssl; give another teacher")
    shared = {key: value for key, value in content.items() if key in ("mean", "std", "adapters")}
    return {"encoder": target.rpartition(".")[2], "arguments": arguments, **shared}


def saved_target(path: str | Path) -> str:
    """Return the dotted name of the function that built the encoder; raises `InputError` as `load_encoder`."""
    return str(read_content(Path(path))["encoder"].get("_target_"))


def load_user_encoder(file: Path, folders: Sequence[Path]) -> nn.Module:
    """Return the encoder of a file as `load_encoder`, also one of the user's config directories."""
    return load_encoder(file, build=user_encoder(saved_target(file), folders))


def _builder(target: str) -> Callable[..., nn.Module] | None:
    """Return the function of ``fedssl.encoders`` with this dotted name; None if there is none."""
    package, _, name = target.rpartition(".")
    if package != encoders.__name__ or name not in encoders.__all__:
        return None
    function = vars(encoders)[name]
    return None if isinstance(function, type) else function


def read_content(path: Path) -> dict[str, Any]:
    """Return the content of a file of `save_encoder` or in the format safetensors; raises as `load_encoder`.

    The checksums of ``torch.save`` cover every byte of an ``encoder.pt``.
    """
    try:
        read = read_safetensors if path.suffix == ".safetensors" else read_tensors
        content = read(path, max_bytes=MAX_BYTES)
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist; choose the encoder.pt of a run folder") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); choose the encoder.pt of a run folder") from error
    except Exception as error:  # a damaged or foreign file can raise any exception
        raise InputError(
            f"{path} is damaged or not an encoder's file ({reason_of(error)}); choose the encoder.pt of a run folder"
        ) from error
    found = sanitize(content.get("format", ""))[:40] if isinstance(content, dict) else ""
    if found.startswith(_FORMATS) and found not in _KEYS_OF:
        readable = " and ".join(_KEYS_OF)
        raise InputError(f"{path} has the format {found} and this version reads {readable}; upgrade fedssl here")
    if not isinstance(content, dict) or content.keys() != _KEYS_OF.get(found) or not _is_encoder(content):
        raise InputError(f"{path} does not hold an encoder; choose the encoder.pt of a run folder")
    try:
        return content | {key: _checked(content[key], key) for key in content.keys() - {"weights"}}
    except ValueError as error:
        raise InputError(f"{path} is not used, because its {error}; choose the encoder.pt of a run folder") from error


def _checked(value: Any, key: str) -> Any:
    """Return plain values; ``_target_`` of the encoder is compared with a list before it is called."""
    if key != "encoder":
        return plain_values(value, key)
    target = {name: str(value[name]) for name in ("_target_",) if name in value}
    return target | plain_values({name: inner for name, inner in value.items() if name not in target}, key)


def _is_encoder(content: dict[str, Any]) -> bool:
    """Return whether the values have the types that `save_encoder` writes."""
    settings, statistics = content["encoder"], (content["mean"], content["std"])
    return (
        all(isinstance(content[key], dict) for key in content.keys() & {"encoder", "metadata", "weights", "adapters"})
        and all(isinstance(settings.get(key), int) and 0 < settings[key] <= 4096 for key in ("channels", "size"))
        and all(isinstance(values, list) and len(values) == settings["channels"] for values in statistics)
        and all(isinstance(value, float) and math.isfinite(value) for values in statistics for value in values)
        and min(content["std"]) > 0
    )


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert to plain Python values, which ``weights_only`` can read."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(values)))
    return plain
