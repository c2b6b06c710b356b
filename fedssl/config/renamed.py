"""Names of earlier versions, with their current names.

`check_renamed` rejects them in overrides and in Flower's run config, and suggests the current name. `update` converts
the settings of a run folder.
"""

import re
from collections.abc import Mapping
from typing import Any

from fedssl.errors import InputError

# Settings by dotted key. Keys below a renamed one, such as updates.min_updates, follow it.
SETTINGS = {
    "transport": "wire_dtype",
    "gpu_views": "gpu_augmentation",
    "allocator": "keep_freed_memory",
    "client_timeout": "reply_timeout",
    "newcomers": "unseen_clients",
    "adapt_epochs": "adaptation_epochs",
    "health_pictures": "collapse_images",
    "evaluate_clients": "evaluate_personalized",
    "keep_models": "snapshot_every",
    "updates": "aggregation",
    "updates.repeats": "aggregation.max_retries",
    "updates.extra_clients": "aggregation.over_selection",
    "updates.deadline": "aggregation.round_deadline",
    "updates.norm_factor": "aggregation.max_norm_ratio",
    "stop_when": "early_stopping",
    "stop_when.metric": "early_stopping.monitor",
    "stop_when.least": "early_stopping.min_delta",
    "stop_when.reach": "early_stopping.threshold",
    "secure": "secure_aggregation",
    "calibration.at": "calibration.when",
    "augmentation.gpu_views": "augmentation.gpu_augmentation",
    "lr_schedule.least": "lr_schedule.eta_min_factor",
    "method.target": "method.target_init",
    "method.one_forward": "method.concat_views",
    "method.dictionary_size": "method.sent_per_round",
    "method.entries": "method.dictionary_capacity",
    "method.memory_size": "method.queue_size",
    "strategy.metrics": "strategy.reported_metrics",
    "strategy.choose_by": "strategy.assign_by",
    "strategy.after": "strategy.cluster_round",
    "strategy.pictures": "strategy.num_images",
}
HEADS = {
    "hidden": "hidden_dim",
    "out": "out_dim",
    "layers": "num_layers",
    "norm": "batch_norm",
    "last_norm": "last_batch_norm",
}
SETTINGS |= {
    f"method.{head}.{old}": f"method.{head}.{new}" for head in ("projector", "predictor") for old, new in HEADS.items()
}
# Old names below the new name of their group, for users who changed only the group.
SETTINGS |= {
    f"{SETTINGS[group]}.{name}": new
    for (group, dot, name), new in [(old.partition("."), new) for old, new in SETTINGS.items()]
    if dot and group in SETTINGS
}
# Settings of a view, in any of augmentation.views, evaluation.view, evaluation.protocols.fine_tune.view, ...
VIEW = {name: f"{name}_prob" for name in ("flip", "jitter", "gray", "blur", "solarize")}
_VIEW_KEY = re.compile(r"(augmentation\.views\.\*|(?:final_)?evaluation\.(?:.+\.)?view)\.(\w+)")

_EARLIER = re.compile(f"^({'|'.join(name for name in SETTINGS if '.' not in name)}):", re.MULTILINE)

# Values by the current name of the setting.
VALUES = {
    "method.target_init": {"keep": "persist", "copy": "reset"},
    "strategy.assign_by": {"weights": "update_cosine"},
    "strategy.rule": {"loss": "loss_weighted"},
}

_EXPERIMENTS = {
    **{f"dec_ssl_{name}": f"dec_ssl/{name}" for name in (*(f"figure{n}" for n in (2, 4, 5, 13, 15, 16)), "table2")},
    "dec_ssl": "dec_ssl/base",
    "dec_ssl_transfer": "dec_ssl/table2_transfer",
    "dec_ssl_clusters": "cifar_clusters",
    "centralised": "centralized",
    "fedu2": "fedu2/base",
    **{
        name: f"lw_fedssl/{name}"
        for name in ("fedmoco", "fedbyol", "fedsimclr", "fedmoco_lw", "fll", "lw_fedssl", "prog_fedssl")
    },
}
# Choices by group.
CHOICES = {
    "strategy": {"loss": "loss_weighted", "orchestra": "fedavg"},
    "partition": {"classes": "pathological"},
    "experiment": _EXPERIMENTS,
}

# Dotted names of classes and functions, or prefixes that end with a dot.
TARGETS = {
    "fedssl.heads.": "fedssl.methods.heads.",
    "fedssl.schedules.": "fedssl.schedule.phases.",
    "fedssl.lr_schedules.": "fedssl.schedule.lr.",
    "server_app.trackers.base.Nothing": "server_app.trackers.base.NullTracker",
    "fedssl.partition.classes": "fedssl.partition.pathological",
    "fedssl.partition.listed": "fedssl.partition.from_file",
    "fedssl.evaluation.linear.Linear": "fedssl.evaluation.linear_probe.LinearProbe",
    "fedssl.evaluation.trained_linear.TrainedLinear": "fedssl.evaluation.sgd_linear_probe.SGDLinearProbe",
    "fedssl.evaluation.probes.Probes": "fedssl.evaluation.protocol.CombinedProtocol",
    "strategies.robust.Krum": "strategies.krum.Krum",
    "strategies.orchestra.Orchestra": "strategies.fedavg.FedAvg",
    "strategies.loss.Loss": "strategies.loss.LossWeighted",
    "strategies.server_optimizer.Assign": "strategies.server_optimizer.NoServerOptimizer",
}

# Keys or key=value, and the rest of the error message.
RENAMED = {
    "method.strategy": "was removed: method=orchestra works with any strategy; remove it",
    "tracker.name": "was removed: choose a file of conf/tracker, e.g. tracker=tensorboard",
    "engine.verbose": "was removed: a run on Ray logs everything; remove it",
    **{old: f"is now {new}" for old, new in SETTINGS.items()},
    **{f"{group}={old}": f"is now {group}={new}" for group, names in CHOICES.items() for old, new in names.items()},
    **{f"{key}={old}": f"is now {key}={new}" for key, names in VALUES.items() for old, new in names.items()},
    "strategy=orchestra": "is now strategy=fedavg: method=orchestra has its own server side, with any strategy",
}


def check_renamed(name: str) -> None:
    """Reject a name of an earlier version, a key or ``key=value``, with the current name."""
    if name in RENAMED:
        hint = [f"{old} is now {new}" for old, new in VALUES.get(SETTINGS.get(name, ""), {}).items()]
        raise InputError(f"{name} {RENAMED[name]}{', and its value ' if hint else ''}{', '.join(hint)}")
    if "=" not in name and (key := current_key(name)) != name:
        raise InputError(f"{name} is now {key}")


def current_key(key: str) -> str:
    """Return the current name of a setting."""
    if match := _VIEW_KEY.fullmatch(key):
        return f"{match[1]}.{VIEW.get(match[2], match[2])}"
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if new := SETTINGS.get(".".join(parts[:length])):
            return ".".join([new, *parts[length:]])
    return key


def current_target(target: str) -> str:
    """Return the current dotted name of a class or function."""
    for old, new in TARGETS.items():
        if target == old or (old.endswith(".") and target.startswith(old)):
            return new + target.removeprefix(old)
    return target


def is_earlier(settings: str) -> bool:
    """Return whether a ``config.yaml`` has names of an earlier version.

    Other runs are not converted, because a class of the user may have a parameter with an old name.
    """
    return _EARLIER.search(settings) is not None


def update(value: Any, key: str = "") -> Any:
    """Return settings, to any depth, with current names. ``key`` is the dotted key of ``value``; empty for a config."""
    if isinstance(value, Mapping):
        inner = {name: f"{key}.{name}" if key else str(name) for name in value}
        return {
            _last(path) if isinstance(name, str) else name: update(value[name], path) for name, path in inner.items()
        }
    if isinstance(value, list):
        return [update(item, f"{key}.*") for item in value]
    if isinstance(value, str):
        if key.rpartition(".")[2] == "_target_":
            return current_target(value)
        return VALUES.get(current_key(key), {}).get(value, value)
    return value


def _last(key: str) -> str:
    """Return the last part of a setting's current name, which stays in the same node."""
    return current_key(key).rpartition(".")[2]


def update_choices(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choice of every group with current names."""
    return {
        current_key(group): CHOICES.get(group, {}).get(name, name) if isinstance(name, str) else name
        for group, name in choices.items()
        if isinstance(group, str)
    }
