"""Sources of weights: files, run folders, and the models of timm, torchvision and the Hugging Face Hub.

A source is a path, ``timm:NAME``, ``torchvision:NAME`` or ``hf:REPO``. Models are read from the libraries' caches, or
downloaded. Only safetensors and files without code are read.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedssl.config.literal import user_path
from fedssl.config.overrides import did_you_mean
from fedssl.config.saved_run import warn_unless_finished
from fedssl.encoders.library import require_timm
from fedssl.errors import InputError, reason_of
from fedssl.pretrained.checkpoints import Checkpoint, read_checkpoint

_TIMEOUT = 10.0  # seconds until the Hub counts as not reachable
_MAX_CONFIG_BYTES = 2**20


def absolute_source(source: str) -> str:
    """Return the source with an absolute path; raise an `InputError` if its prefix is unknown."""
    prefix, name = _split(source)
    if prefix:
        return f"{prefix}:{name}"
    if re.match(r"\w+://", source):
        raise InputError(
            f"encoder.weights={source} is an address; download the file, and set encoder.weights to its path"
        )
    if not source:
        raise InputError("encoder.weights is empty; set a file, a run folder, timm:NAME, torchvision:NAME or hf:REPO")
    return str(user_path(source).absolute())


def read_source(source: str) -> Checkpoint:
    """Return tensors and statistics of a source; raise an `InputError` if it cannot be read."""
    prefix, name = _split(source)
    if not prefix:
        return read_checkpoint(file_of(source) or Path(name))
    with torch.random.fork_rng(devices=[]):  # a library may draw weights before it loads others
        return _READERS[prefix](name)


def file_of(source: str) -> Path | None:
    """Return the file of a source, or None if it names a library's model; `InputError` for a folder without one.

    A folder is that of a run, or one for the Hugging Face Hub.
    """
    prefix, name = _split(source)
    if prefix:
        return None
    path = Path(name)
    files = [path / "encoder.pt", path / "model.safetensors"] if path.is_dir() else [path]
    for file in files:
        if file.is_file() or file == path:
            warn_unless_finished(file)
            return file
    raise InputError(
        f"encoder.weights={path} is a folder without encoder.pt or model.safetensors; set the folder of a finished "
        "run, or a file"
    )


def _split(source: str) -> tuple[str, str]:
    """Return the prefix, "" for a path, and the rest."""
    found = re.fullmatch(r"(\w+):([^/\\].*)", source, flags=re.DOTALL)
    if found is None or Path(source).exists():
        return "", source
    if found[1] not in _READERS:
        raise InputError(
            f"encoder.weights={source} has the unknown prefix {found[1]}{did_you_mean(found[1], list(_READERS))}; set "
            "a file, a run folder, timm:NAME, torchvision:NAME or hf:REPO"
        )
    return found[1], found[2]


def _read_timm(name: str) -> Checkpoint:
    """Read weights by timm's name, such as ``vit_small_patch16_224.augreg_in1k``, or of its default tag."""
    require_timm(f"encoder.weights=timm:{name}")
    import timm

    if name not in [*timm.list_models(), *timm.list_pretrained()]:
        near = did_you_mean(name, [*timm.list_models(), *timm.list_pretrained()])
        raise InputError(f"encoder.weights=timm:{name} is not a model of timm {timm.__version__}{near}")
    config: Any = timm.get_pretrained_cfg(name)
    if not config.hf_hub_id:
        raise InputError(f"encoder.weights=timm:{name} has no weights on the Hugging Face Hub; choose another tag")
    file = _hub_file(config.hf_hub_id, "model.safetensors", source=f"timm:{name}")
    # timm converts weights that have the names of their first publication. It reads safetensors without code.
    overlay = {"file": str(file), "source": "file", "custom_load": False}
    try:
        network = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay)
    except Exception as error:  # the file can have any content
        raise InputError(
            f"encoder.weights=timm:{name}: timm cannot load {file} ({reason_of(error)}); delete it to download it again"
        ) from error
    return Checkpoint(tensors=network.state_dict(), mean=tuple(config.mean), std=tuple(config.std))


def _read_torchvision(name: str) -> Checkpoint:
    """Read the default weights of a model, or an entry such as ``ResNet50_Weights.IMAGENET1K_V1``."""
    from torch import hub
    from torchvision import models

    names = models.list_models(module=models)
    try:
        weights: Any = models.get_weight(name) if "." in name else models.get_model_weights(name)["DEFAULT"]
    except (ValueError, KeyError, TypeError) as error:
        hint = "; an entry has the form ResNet50_Weights.IMAGENET1K_V2" if "." in name else did_you_mean(name, names)
        raise InputError(f"encoder.weights=torchvision:{name} is not a model of torchvision{hint}") from error
    file = Path(hub.get_dir()) / "checkpoints" / weights.url.rpartition("/")[2]
    if not file.is_file():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            hub.download_url_to_file(weights.url, str(file), hash_prefix=file.stem.rpartition("-")[2], progress=False)
        except Exception as error:  # any error of the network
            raise InputError(
                f"encoder.weights=torchvision:{name} cannot be downloaded ({reason_of(error)}); place {weights.url} at "
                f"{file}"
            ) from error
    transforms = weights.transforms()
    tensors = read_checkpoint(file).tensors
    if not hasattr(transforms, "mean"):  # of detection
        return Checkpoint(tensors=tensors)
    return Checkpoint(tensors=tensors, mean=tuple(transforms.mean), std=tuple(transforms.std))


def _read_hub(repository: str) -> Checkpoint:
    """Read ``model.safetensors`` of a repository, and the statistics of timm's ``config.json`` if it has one."""
    source = f"hf:{repository}"
    checkpoint = read_checkpoint(_hub_file(repository, "model.safetensors", source=source))
    if checkpoint.mean is not None:
        return checkpoint
    try:
        config = json.loads(_hub_file(repository, "config.json", source=source).read_text()[:_MAX_CONFIG_BYTES])
        mean, std = (tuple(map(float, config["pretrained_cfg"][key])) for key in ("mean", "std"))
    except (InputError, ValueError, OSError, KeyError, TypeError):  # the weights are usable without it
        return checkpoint
    return Checkpoint(tensors=checkpoint.tensors, mean=mean or None, std=std or None)


def _hub_file(repository: str, name: str, *, source: str) -> Path:
    """Return a file of the Hub from the local cache, or download it; raise an `InputError` if neither is possible."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import RemoteEntryNotFoundError
    from huggingface_hub.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # without a warning for every attempt
    try:
        cached = try_to_load_from_cache(repository, name)
        if isinstance(cached, str):
            return Path(cached)
        return Path(hf_hub_download(repository, name, etag_timeout=_TIMEOUT))
    except RemoteEntryNotFoundError as error:
        raise InputError(
            f"encoder.weights={source}: {repository} has no {name}; download its weights in another format, such as "
            "pytorch_model.bin, and set encoder.weights to the path of this file"
        ) from error
    except Exception as error:  # of the network, of the repository or of its name
        raise InputError(
            f"encoder.weights={source}: {name} of {repository} is not in the cache and cannot be downloaded "
            f"({type(error).__name__}); download https://huggingface.co/{repository}/resolve/main/{name} elsewhere, "
            "and set encoder.weights to the path of this file"
        ) from error
    finally:
        logging.set_verbosity(verbosity)


_READERS: Mapping[str, Callable[[str], Checkpoint]] = {
    "timm": _read_timm,
    "torchvision": _read_torchvision,
    "hf": _read_hub,
}
