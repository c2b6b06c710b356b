"""Settings: composed from conf/ by Hydra, checked across fields, kept as one resolved YAML per run.

A wrong name, choice or type is answered with one sentence that names the nearest valid ones.
"""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedssl.errors import InputError
from fedssl.machine.threads import default_threads

CONF = Path(__file__).resolve().parent.parent / "conf"

MINIMUM = {
    "seed": 0,
    "num_clients": 1,
    "clients_per_round": 1,
    "rounds": 1,
    "local_epochs": 0,
    "batch_size": 2,
    "client_timeout": 1,
    "evaluate_every": 0,
    "health_pictures": 0,
    "checkpoint_every": 1,
    "keep_checkpoints": 1,
}
CHOICES = {"device": ("auto", "cpu", "cuda"), "precision": ("fp32", "bf16")}

# Settings that do not change the numbers of a run, and its length.
MAY_CHANGE = (
    *("rounds", "engine", "tracker", "device", "threads", "allocator", "client_timeout"),
    *("evaluate_every", "final_evaluation", "health_pictures", "measure_resources"),
    *("checkpoint_every", "keep_checkpoints"),
)


def compose(overrides: Sequence[str]) -> DictConfig:
    """The resolved settings for command-line words such as ``strategy=fedavg partition.alpha=0.1``.

    Raises
    ------
    InputError
        A name, choice or value is not valid; see `check` for the fields.
    """
    check_names(overrides)
    settings = _compose(overrides)
    groups = [word for word in overrides if word.partition("=")[0].split("@")[0] in _groups()]
    values = dict(_flatten(settings))
    for key, default in _flatten(_compose(groups)):
        if key in values:  # a word may delete a key: ~key
            _check_type(key, values[key], default)
    check(settings)
    settings.threads = settings.threads or default_threads(settings.dataset.size)
    if settings.output_dir is not None:
        settings.output_dir = str(settings.output_dir)
    if settings.dataset.get("path"):
        settings.dataset.path = str(Path(str(settings.dataset.path)).expanduser().absolute())
    return settings


def check(settings: DictConfig) -> None:
    """Check fields against each other and against their ranges; raises `InputError`."""
    for key, minimum in MINIMUM.items():
        if settings[key] < minimum:
            raise InputError(f"{key}={settings[key]} but it must be at least {minimum}; set {key}={minimum} or more")
    for key, choices in CHOICES.items():
        if settings[key] not in choices:
            raise InputError(f"{key}={settings[key]} is not valid; choose one of {', '.join(choices)}")
    if settings.health_pictures == 1:
        raise InputError("health_pictures=1 but a picture alone has no spread; set 2 or more, or 0 to turn it off")
    if settings.clients_per_round > settings.num_clients:
        raise InputError(
            f"clients_per_round={settings.clients_per_round} is more than num_clients={settings.num_clients}; "
            "lower clients_per_round or raise num_clients"
        )
    if settings.strategy["_target_"] == "strategies.local_only.LocalOnly":
        if settings.calibration.at:
            raise InputError(
                "calibration=auxiliary trains the model that clients share, but with strategy=local_only they share "
                "none; set calibration=none"
            )
        if settings.server_optimizer["_target_"] != "strategies.server_optimizer.Assign":
            raise InputError(
                "server_optimizer takes steps with the model that clients share, but with strategy=local_only they "
                "share none; set server_optimizer=none"
            )
    clip_norm = settings.clip_norm
    if clip_norm is not None and (type(clip_norm) not in (int, float) or not clip_norm > 0):
        raise InputError(f"clip_norm={clip_norm} must be a positive number, or null to take any gradient as it is")
    if settings.threads is not None and (type(settings.threads) is not int or settings.threads < 1):
        raise InputError(
            f"threads={settings.threads} but it must be a whole number of at least 1, or null for automatic"
        )


def check_names(overrides: Sequence[str]) -> None:
    """Check the keys and choices of command-line words, sweeps included, without composing each job."""
    parsed = _parse(overrides)
    groups = _groups()
    chosen = []
    for override in parsed:
        group = override.key_or_group.split("@")[0]
        if group in groups:
            _check_choices(override, group)
            if not override.is_sweep_override():
                chosen.append(str(override.input_line))
    known = [key for key, _ in _flatten(_compose(chosen), inner=True)]
    swept = [o.key_or_group for o in parsed if o.is_sweep_override() and o.key_or_group in groups]
    for override in parsed:
        key = override.key_or_group
        if override.is_delete() and key.split(".")[0] not in ("evaluation", "final_evaluation"):
            raise InputError(f"~{key} takes away a setting that is needed; set it to another value")
        open_key = override.is_add() or override.is_force_add() or override.is_delete() or key.startswith("hydra")
        below_swept = any(key.startswith(f"{group}.") for group in swept)
        if key.split("@")[0] not in groups and key not in known and not (open_key or below_swept):
            raise InputError(f"there is no setting {key!r}{_nearest(key, known)}; `fedssl --cfg job` shows all")


def load_run(overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Settings and complete overrides of a run, new or resumed.

    With ``resume=FOLDER`` the words of that folder's run come first; of the new ones only those in `MAY_CHANGE` may
    differ from it.

    Raises
    ------
    InputError
        Besides what `compose` raises: the folder holds no run, or a run with other settings.
    """
    given = [override.value() for override in _parse(overrides) if override.key_or_group == "resume"]
    if not given or given[-1] is None:
        return compose(overrides), list(overrides)
    folder = Path(str(given[-1])).resolve()
    if not (folder / "config.yaml").is_file() or not (folder / "overrides.yaml").is_file():
        raise InputError(f"resume={folder} is not a run folder: it has no config.yaml; give the folder of a run")
    saved = _read(folder / "config.yaml")
    own = ("resume", "output_dir", "run_id")
    words = [*_read(folder / "overrides.yaml"), *overrides]
    last = {word.partition("=")[0]: word for word in words}  # a word of now takes the place of one of then
    words = [word for key, word in last.items() if key not in own]
    words += [f"output_dir={quote(str(folder))}", f"resume={quote(str(folder))}"]
    settings = compose(words)
    settings.run_id = saved.run_id
    changed = {
        key: values
        for key, values in differences(saved, settings).items()
        if key not in own and key.split(".")[0] not in MAY_CHANGE
    }
    if settings.rounds != saved.rounds and grows(settings):
        changed["rounds"] = (saved.rounds, settings.rounds)  # they decide which stage a round belongs to
    if changed:
        listed = ", ".join(f"{key}={old} (now {new})" for key, (old, new) in changed.items())
        raise InputError(f"resume={folder} was run with {listed}; leave these as they were, or start a new run")
    return settings, words


def make(node: DictConfig, *args: Any, **kwargs: Any) -> Any:
    """Build the object that a node of the settings describes (`_target_`).

    Hydra's ``instantiate``, except that an `InputError` comes out as it was raised.
    """
    try:
        return instantiate(node, *args, **kwargs)
    except InstantiationException as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, InputError):
            cause = cause.__cause__
        if isinstance(cause, InputError):
            raise cause from None
        raise InputError(f"{node.get('_target_')} refuses its settings: {' '.join(str(cause).split())}") from error


def save_run(settings: DictConfig, overrides: Sequence[str], folder: Path) -> None:
    """Write what `load_run` reads: the resolved settings and the words that gave them."""
    for name, content in (("overrides.yaml", OmegaConf.create(list(overrides))), ("config.yaml", settings)):
        partial = folder / f"{name}.partial"
        partial.write_text(OmegaConf.to_yaml(content))
        os.replace(partial, folder / name)


def quote(text: str) -> str:
    """A value as Hydra reads it back, whatever is in it."""
    # In Hydra's quotes a backslash counts as an escape only before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + found[2].replace("'", "\\'"), text)
    return f"'{escaped}'"


def grows(settings: DictConfig) -> bool:
    """Whether the schedule begins with a part of the encoder."""
    return str(settings.schedule["_target_"]) != "fedssl.schedule.phases.end_to_end"


def differences(one: DictConfig, other: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ between two settings, with both values."""
    left, right = dict(_flatten(one)), dict(_flatten(other))
    keys = dict.fromkeys([*left, *right])
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def _compose(overrides: Sequence[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            settings = hydra_compose("config", overrides=list(overrides))
            OmegaConf.resolve(settings)
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(" ".join(str(error).split())) from error
    return settings


def _read(path: Path) -> Any:
    return OmegaConf.load(path)


def _parse(overrides: Sequence[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"cannot read the command line: {reason}; write key=value, quoted where it has spaces"
        ) from error


def _groups() -> dict[str, list[str]]:
    """Choices of each configuration group; one in a subfolder has its name before it, as in ``method=fedu/byol``."""
    return {
        folder.name: sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml"))
        for folder in CONF.iterdir()
        if folder.is_dir()
    }


def _check_choices(override: Override, group: str) -> None:
    value = override.value()
    names = value.list if isinstance(value, ChoiceSweep) else [value]
    choices = _groups()[group]
    listed = ", ".join(choices)
    unknown = [str(name) for name in names if isinstance(name, str) and name not in choices]
    if unknown:
        raise InputError(f"{group}={unknown[0]} does not exist{_nearest(unknown[0], choices)}; choose one of {listed}")
    patterns: list[str] = value.include if isinstance(value, Glob) else []
    idle = [pattern for pattern in patterns if not Glob(include=[pattern]).filter([c for c in choices if "/" not in c])]
    if idle:
        raise InputError(f"{group}=glob({idle[0]}) finds nothing, and nothing in subfolders; name some of {listed}")


def _nearest(name: str, choices: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}" if close else ""


def _flatten(node: DictConfig, prefix: str = "", *, inner: bool = False) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; with ``inner`` also the keys of nested nodes."""
    for key in node:
        value, name = node[key], prefix + str(key)
        if isinstance(value, DictConfig):
            if inner:
                yield name, value
            yield from _flatten(value, f"{name}.", inner=inner)
        else:
            yield name, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _check_type(key: str, value: Any, default: Any) -> None:
    """A value must have the type of its default; whole numbers serve as fractions, and null defaults take anything."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", list: "a list like [1,2]"}
    allowed = (int, float) if isinstance(default, float) else (type(default),)
    mistaken_bool = isinstance(value, bool) and not isinstance(default, bool)
    if default is not None and (not isinstance(value, allowed) or mistaken_bool):
        raise InputError(f"{key}={value} is not {names[type(default)]}; the default is {default}")
