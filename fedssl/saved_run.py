"""What a run folder says of its settings, proven before it is used: it may be damaged, or come from elsewhere."""

import io
from pathlib import Path
from types import NoneType

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fedssl.files import damaged, read_text, read_yaml


def read_words(file: Path) -> list[str] | None:
    """The words that a run saved in ``overrides.yaml``; None if there is no such file."""
    words: list[str] | None = read_yaml(file, list)
    if words is not None and not all(isinstance(word, str) for word in words):
        raise damaged(file, "it does not hold words of a command line")
    return words


def read_settings(file: Path) -> DictConfig | None:
    """The settings that a run saved; unknown keys cannot be merged into them. None if there are none."""
    text = read_text(file)
    if text is None:
        return None
    try:
        saved = OmegaConf.load(io.StringIO(text))
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError, OSError) as error:
        raise damaged(file, "it is no YAML") from error
    kinds = {"seed": int, "rounds": int, "run_id": str, "dataset": DictConfig}
    if not isinstance(saved, DictConfig) or not all(
        key in saved and not OmegaConf.is_interpolation(saved, key) and isinstance(saved[key], kind)
        for key, kind in kinds.items()
    ):
        raise damaged(file, "it does not hold the settings of a run")
    if "${" in text:
        raise damaged(file, "it has an interpolation, ${...}, which a run resolves")
    _check_dataset(saved.dataset, file)
    OmegaConf.set_struct(saved, True)
    return saved


def _check_dataset(node: DictConfig, file: Path) -> None:
    """Refuse a saved data set whose settings are not of the kinds that `read_data` takes."""
    kinds: dict[str, tuple[type, ...]] = {
        "_target_": (str,),
        "splits": (DictConfig,),
        **dict.fromkeys(("channels", "size"), (int,)),
        **dict.fromkeys(("limit", "test_limit", "num_classes"), (int, NoneType)),
        **dict.fromkeys(("mean", "std"), (ListConfig,)),
    }
    wrong = [key for key, kind in kinds.items() if key not in node or not isinstance(node[key], kind)]
    if not wrong:
        wrong = [key for key in ("federated", "train", "test") if key not in node.splits]
        wrong += [key for key in ("mean", "std") if not all(isinstance(value, int | float) for value in node[key])]
    if wrong:
        raise damaged(file, f"dataset.{wrong[0]} is missing or of the wrong kind")
