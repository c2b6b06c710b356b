"""Types and ranges of settings: one declaration for each, by config group and name.

`fedssl.config.compose` validates the config by them before a run, and constructors validate their arguments.
The site has a page of them. A class with another range for a name has its own entry. A setting that only one class has
may have its range in the mapping ``RANGES`` of the module of this class, which its constructor checks.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import ListConfig

from fedssl.errors import InputError

LOSSLESS = "fp32"
WIRE_DTYPES = (LOSSLESS, "fp16", "bf16", "int8")  # dtypes of exchanged layers, see `fedssl.wire.wire_format`

MIN_IMAGES = 2  # of a client: contrastive losses and batch normalization need two images
MAX_IMAGE_SIZE = 4096  # pixels, of height and width
MAX_INTEGER = 2**31 - 1
_LARGE = 1e6  # a larger weight, rate or noise overflows float32 within a round
_SMALL = 1e-9  # a smaller one vanishes
_REPRESENTABLE = 1e-30, 1e30  # sizes of numbers other than 0 that float32 has, and whose inverse it has
_NAMES = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true and false"),
    str: ("a name", "names"),
    Path: ("a path", "paths"),
    dict: ("a mapping", "mappings"),
}


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """Type and range of a setting."""

    # int, float (which accepts integers), bool, str, Path (a string that names a file or folder), or dict, a mapping of
    # constrained settings
    kind: type = float
    choices: tuple[Any, ...] = ()  # allowed values in place of a type; empty for numbers
    minimum: float = -math.inf  # ``minimum <= value``
    above: float = -math.inf  # ``above < value``
    below: float = math.inf  # ``value < below``
    maximum: float = math.inf  # ``value <= maximum``
    optional: bool = False  # whether null is allowed
    is_list: bool = False  # whether the value is a list of constrained items
    is_range: bool = False  # whether the value is a list [low, high] of two constrained numbers, low <= high
    list_of: "Constraint | None" = None  # a list of these is allowed too

    @property
    def is_text(self) -> bool:
        """Return whether the value is one text."""
        return self.kind in (str, Path) and not self.choices and not self.is_list

    def allows(self, value: Any) -> bool:
        """Return whether a value is valid."""
        if value is None:
            return self.optional
        if self.is_list or self.is_range:
            valid = _is_list(value) and all(self._allows_item(item) for item in value)
            return valid and (self.is_list or (len(value) == 2 and value[0] <= value[1]))
        if self.list_of is not None and _is_list(value):
            return all(self.list_of.allows(item) for item in value)
        return self._allows_item(value)

    def _allows_item(self, value: Any) -> bool:
        if self.choices:
            return any(value == choice and type(value) is type(choice) for choice in self.choices)
        if self.kind in (str, Path, dict):
            return isinstance(value, Mapping if self.kind is dict else str)
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        if not isinstance(value, int if self.kind is int else int | float):
            return False
        if not (value == 0 or _is_representable(value)):
            return False
        return self.minimum <= value <= self.maximum and self.above < value < self.below

    def describe(self, value: Any) -> str:
        """Return what an invalid value must be, e.g. ``a number above 0 and at most 1, or null``."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not math.isfinite(value):
            return str(self).replace("number", "finite number", 1)
        if is_number and -math.inf < self.above < value < self.minimum:  # a technical limit
            return f"at least {self.minimum:g}"
        if is_number and value and self.minimum <= value <= self.maximum and not _is_representable(value):
            return "a number whose size is from {:g} to {:g}".format(*_REPRESENTABLE)
        return f"at most {int(self.maximum):,}" if is_number and value > self.maximum else str(self)

    def __str__(self) -> str:
        """Return the type and the range, without technical limits such as `MAX_INTEGER`, `_LARGE` and `_SMALL`."""
        name = " or ".join(map(str, self.choices)) or _NAMES[self.kind][self.is_list or self.is_range]
        form = "a list [low, high] of " if self.is_range else "a list of " * self.is_list
        other = "" if self.list_of is None else f", or {replace(self.list_of, is_list=True)}"
        bounds = {"of at least": self.minimum, "above": self.above, "below": self.below, "at most": self.maximum}
        bounds |= {"at most": math.inf} if self.maximum >= _LARGE else {}
        bounds |= {"of at least": -math.inf} if self.above > -math.inf else {}
        range_ = " and ".join(f"{bound} {value:g}" for bound, value in bounds.items() if abs(value) < math.inf)
        range_ = re.sub(r"of at least (.*) and at most (.*)", r"from \1 to \2", range_)
        return f"{form}{name} {range_}".rstrip() + other + ", or null" * self.optional


def _is_representable(value: float) -> bool:
    smallest, largest = _REPRESENTABLE
    return smallest <= abs(value) <= largest


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)  # OmegaConf's lists are sequences too


def _integer(minimum: float, maximum: float = MAX_INTEGER) -> Constraint:
    return Constraint(kind=int, minimum=minimum, maximum=maximum)


def _choice(*choices: Any) -> Constraint:
    return Constraint(choices=choices)


def _optional(constraint: Constraint) -> Constraint:
    return replace(constraint, optional=True)


def _list_of(constraint: Constraint) -> Constraint:
    return replace(constraint, is_list=True)


def _range_of(constraint: Constraint) -> Constraint:
    return replace(constraint, is_range=True)


_BOOL = Constraint(kind=bool)
_NAME = Constraint(kind=str)
_NAME_OR_NULL = _optional(_NAME)
_PATH = _optional(Constraint(kind=Path))
_MAPPING = Constraint(kind=dict)
_MAPPING_OR_NULL = _optional(_MAPPING)
_POSITIVE = Constraint(above=0, minimum=_SMALL, maximum=_LARGE)
_TEMPERATURE = Constraint(above=0, minimum=1e-4, maximum=_LARGE)  # of a softmax, whose inverse is the gradient's scale
_NOT_NEGATIVE = Constraint(minimum=0, maximum=_LARGE)
_FRACTION = Constraint(minimum=0, maximum=1)
_BELOW_ONE = Constraint(minimum=0, below=1)
_ABOVE_ZERO = Constraint(above=0, maximum=1)
_SECONDS = Constraint(minimum=1, maximum=1e10)
_PER_SECOND = Constraint(minimum=1, maximum=1e18)
_SIZE = _integer(1, MAX_IMAGE_SIZE)
_MEAN = _list_of(Constraint(minimum=-1e5, maximum=1e5))
_STD = _list_of(Constraint(above=0, maximum=1e5))
_GPU_AUGMENTATION = _choice("torch", "triton")
_PARTS = _choice("projector", "encoder")
_WEIGHTING = _choice("examples", "uniform")
_LOSS_WEIGHTING = _choice("examples", "uniform", "loss")
_OPTIMIZER = {
    "lr": Constraint(minimum=0),
    "momentum": _FRACTION,
    "weight_decay": _NOT_NEGATIVE,
    "nesterov": _BOOL,
    "fused": _optional(_BOOL),
}

CONSTRAINTS: Mapping[str, Mapping[str, Constraint]] = {
    "": {
        "seed": _integer(0, 2**63 - 1),
        "num_clients": _integer(1, 10_000_000),
        "clients_per_round": _integer(1),
        "unseen_clients": _integer(0),
        "rounds": _integer(1),
        "local_epochs": _integer(0),
        "clip_norm": _optional(_POSITIVE),
        "batch_size": _integer(2),
        "device": _NAME,  # those that torch has: `fedssl.machine.devices.select_device`
        "precision": _choice("fp32", "bf16"),
        "channels_last": _BOOL,
        "gpu_augmentation": _GPU_AUGMENTATION,
        "cuda_graphs": _BOOL,
        "compile": _BOOL,
        # More threads crash the process.
        "threads": _optional(_integer(1, 1024)),
        "keep_freed_memory": _BOOL,
        "wire_dtype": _choice(*WIRE_DTYPES),
        "reply_timeout": Constraint(minimum=1, maximum=1e9),
        "evaluate_every": _integer(0),
        "collapse_images": _integer(0),
        "evaluate_personalized": _BOOL,
        "adaptation_epochs": _integer(0),
        "measure_resources": _BOOL,
        "checkpoint_every": _integer(1),
        "keep_checkpoints": _integer(1),
        "plan": _BOOL,
        "pause_after": _optional(_integer(1)),
        "snapshot_every": _integer(0),
        "teacher": _PATH,
        "output_dir": _PATH,
        "resume": _PATH,
        "run_id": _NAME_OR_NULL,
    },
    "client_state": {"max_bytes": _optional(_integer(1))},
    "sweep": {
        "jobs": _optional(_integer(1)),
        "address": _NAME_OR_NULL,
        "metric": _NAME_OR_NULL,
        "retry": _BOOL,
        "gpus": Constraint(above=0, minimum=1e-3, maximum=_LARGE),
        "reduction_factor": _optional(_integer(2)),
        "min_rounds": _optional(_integer(1)),
    },
    "aggregation": {
        "min_updates": _integer(1),
        "max_retries": _integer(0),
        "over_selection": _integer(0),
        "round_deadline": _optional(Constraint(above=0, minimum=_SMALL, maximum=1e9)),
        "buffered": _BOOL,
        "delay_sigma": Constraint(minimum=0, maximum=10),
        "max_norm_ratio": _optional(Constraint(minimum=1)),
        "max_examples": _optional(_integer(1)),
    },
    "early_stopping": {
        "monitor": _NAME_OR_NULL,
        "patience": _optional(_integer(1)),
        "min_delta": Constraint(minimum=0),
        "threshold": _optional(Constraint()),
    },
    "privacy": {
        "clip_norm": _optional(_POSITIVE),
        "noise_multiplier": _POSITIVE,
        "delta": Constraint(above=0, below=1),
    },
    "secure_aggregation": {
        "clipping_range": _optional(_POSITIVE),
        "dropout_fraction": _BELOW_ONE,
        "corrupted_fraction": _BELOW_ONE,
        "security_bits": Constraint(minimum=1, maximum=128),
        "correctness_bits": Constraint(minimum=1, maximum=128),
        "neighbors": _optional(_integer(2)),
        "threshold": _optional(_integer(2)),
        "max_weight": _optional(_integer(MIN_IMAGES, 2**22)),
        "mask_generator": _choice("chacha20", "mt19937"),
    },
    "availability": {
        "file": _PATH,
        "fraction": _ABOVE_ZERO,
        "period": _SECONDS,
        "dropout": _FRACTION,
    },
    "Trace": {"period": _optional(_SECONDS)},
    "client_speed": {
        "file": _PATH,
        "flops_per_second": _PER_SECOND,
        "upload_bytes_per_second": _PER_SECOND,
        "download_bytes_per_second": _PER_SECOND,
        "sigma_clients": Constraint(minimum=0, maximum=10),
        "sigma_rounds": Constraint(minimum=0, maximum=10),
    },
    "engine": {
        "name": _choice("auto", "local", "ray", "deployment"),
        "address": _NAME_OR_NULL,
        "root_certificates": _PATH,
        "signing_key": _PATH,
        "signing_certificate": _PATH,
        "client_cpus": _optional(_integer(1)),
        "deliver_every": _optional(_integer(0)),
        "client_gpus": _optional(Constraint(minimum=0)),
    },
    "tracker": {
        "experiment": _NAME,
        "project": _NAME,
        "run": _NAME_OR_NULL,
        "uri": _NAME_OR_NULL,
        "mode": _choice("offline", "online"),
    },
    "augmentation": {
        "size": _SIZE,
        "mean": _MEAN,
        "std": _STD,
        "gpu_augmentation": _GPU_AUGMENTATION,
        "views": _list_of(_MAPPING),
    },
    "view": {  # of augmentation.views and evaluation.view
        "count": _integer(0, 1024),
        "size": _ABOVE_ZERO,
        "role": _choice("global", "local"),
        "mask": _MAPPING_OR_NULL,
        "crop_scale": _range_of(_ABOVE_ZERO),
        "crop_ratio": _range_of(_POSITIVE),
        "pad": _integer(0, MAX_IMAGE_SIZE),
        "flip_prob": _FRACTION,
        "jitter_prob": _FRACTION,
        "brightness": _NOT_NEGATIVE,
        "contrast": _NOT_NEGATIVE,
        "saturation": _NOT_NEGATIVE,
        "hue": Constraint(minimum=0, maximum=0.5),
        "gray_prob": _FRACTION,
        "blur_prob": _FRACTION,
        "blur_sigma": _range_of(Constraint(above=0, maximum=MAX_IMAGE_SIZE)),
        "solarize_prob": _FRACTION,
    },
    "mask": {  # of a view
        "kind": _choice("random", "block", "multi_block"),
        "patch": _optional(_SIZE),
        "ratio": Constraint(above=0, below=1),
        "ratio_range": _range_of(_ABOVE_ZERO),
        "prob": _ABOVE_ZERO,
        "aspect_ratio": _range_of(_POSITIVE),
        "num_targets": _integer(1, 1024),
        "target_scale": _range_of(_ABOVE_ZERO),
        "context_scale": _range_of(_ABOVE_ZERO),
    },
    "calibration": {
        "dataset": _MAPPING_OR_NULL,
        "when": _optional(_choice("start", "end")),
        "share": _ABOVE_ZERO,
        "epochs": _integer(0),
    },
    "dataset": {
        "path": _PATH,
        "cache": _PATH,  # or auto
        "hub": _NAME_OR_NULL,
        "image": _NAME,
        "label": _NAME_OR_NULL,
        "owner": _NAME_OR_NULL,
        "federated": _NAME_OR_NULL,  # these three of dataset.splits
        "train": _NAME_OR_NULL,
        "test": _NAME_OR_NULL,
        "channels": _choice(1, 3),
        "size": _SIZE,
        "mean": _MEAN,
        "std": _STD,
        "limit": _optional(_integer(1)),
        "test_limit": _optional(_integer(1)),
        "num_classes": _optional(_integer(1)),
        "max_pixels": _integer(1, 178_956_970),  # Pillow's limit
        "background": _integer(0, 255),
        "max_value": _optional(Constraint(above=0)),
        "test_fraction": _BELOW_ONE,
        "folders": _choice("class", "owner", "owner/class", "none"),
        "split_folders": _choice("auto", True, False),
        "storage": _choice("decoded", "encoded", "auto"),
    },
    "partition": {
        "file": _PATH,
        "encoder": _PATH,
        "alpha": _POSITIVE,
        "beta": _FRACTION,
        "classes_per_client": _integer(1),
        "clusters": _optional(_integer(1)),
        "components": _integer(1),
        "min_size": _integer(0),
        "self_balancing": _BOOL,
    },
    "encoder": {
        "name": _NAME,
        "weights": _NAME_OR_NULL,  # a path, or the name of a model
        "channels": _integer(1),
        "size": _SIZE,
        "width": _integer(1, 65_536),
        "depth": _integer(1, 1000),
        "heads": _integer(1, 65_536),
        "patch": _integer(1, MAX_IMAGE_SIZE),
        "norm": _choice("batch", "group"),
        "stem": _choice("small", "imagenet"),
        "pool": _choice("token", "mean"),
        "positions": _choice("sincos", "learned"),
        "registers": _integer(0, 1024),
    },
    "method": {
        "teacher_encoder": _MAPPING_OR_NULL,
        "temperature": _TEMPERATURE,
        "concat_views": _BOOL,
        "lambd": _NOT_NEGATIVE,
        "ema_decay": _FRACTION,
        "target_init": _choice("persist", "reset", "average"),
        "loss_scale": _optional(_POSITIVE),
        "train_patches": _BOOL,
        "hidden_dim": _integer(1, 1_048_576),
        "out_dim": _integer(1, 1_048_576),
        "num_layers": _integer(1, 1024),
        "batch_norm": _BOOL,
        "last_batch_norm": _BOOL,
        "activation": _choice("relu", "gelu"),
        "num_classes": _optional(_integer(1)),
        "sent_per_round": _integer(0),
        "dictionary_capacity": _integer(1, 2**24),
        "alignment_weight": _NOT_NEGATIVE,
        "local_clusters": _integer(1, 1_048_576),
        "global_clusters": _integer(2, 1_048_576),
        "queue_size": _integer(1, 1_048_576),
        "sim_weight": _NOT_NEGATIVE,
        "var_weight": _NOT_NEGATIVE,
        "cov_weight": _NOT_NEGATIVE,
        "num_slices": _integer(1, 65_536),
        "num_points": _integer(2, 1024),
        "t_max": Constraint(above=0, minimum=1e-3, maximum=100),
        "num_prototypes": _integer(2, 1_048_576),
        "epsilon": _TEMPERATURE,
        "iterations": _integer(1),
        "freeze_prototypes_rounds": _integer(0),
        "queue_start_round": _integer(1),
        "match_prototypes": _BOOL,
        "decoder_width": _integer(1, 65_536),
        "decoder_depth": _integer(1, 1000),
        "decoder_heads": _integer(1, 65_536),
        "normalize_patches": _BOOL,
        "exchange_decoder": _BOOL,
        "predictor_width": _integer(1, 65_536),
        "predictor_depth": _integer(1, 1000),
        "predictor_heads": _integer(1, 65_536),
        "exchange_predictor": _BOOL,
        "student_temperature": _TEMPERATURE,
        "teacher_temperature": _TEMPERATURE,
        "warmup_teacher_temperature": _TEMPERATURE,
        "warmup_rounds": _integer(0),
        "center_momentum": _FRACTION,
        "freeze_last_layer_rounds": _integer(0),
        "patch_weight": _NOT_NEGATIVE,
        "cache_bytes": _integer(0, 2**40),
        "ema_schedule": _choice("constant", "cosine"),
    },
    "SimCLR": {"loss": _choice("standard", "l_dawa")},
    "BarlowTwins": {"loss": _choice("standard", "l_dawa")},
    "Distillation": {"loss": _choice("cosine", "mse", "similarity")},
    "LeJEPA": {"lambd": _FRACTION},
    "SwAV": {"queue_size": _integer(0, 1_048_576)},
    "regularizer": {
        "weight": _NOT_NEGATIVE,
        "alpha": _NOT_NEGATIVE,
        "beta": _NOT_NEGATIVE,
        "temperature": _TEMPERATURE,
        "distance": _choice("info_nce", "cosine"),
        "part": _PARTS,
        "variant": _choice("uot", "tangent_swd"),
        "reduction": _choice("sum", "mean"),
        "cost_scale": _POSITIVE,
        "tau_a": _POSITIVE,
        "tau_b": _POSITIVE,
        "max_iter": _integer(1),
        "tolerance": _NOT_NEGATIVE,
        "gpu_iter": _integer(0),
    },
    "optimizer": _OPTIMIZER,
    "lr_schedule": {
        "eta_min_factor": _FRACTION,
        "per_stage": _BOOL,
        "factor": _ABOVE_ZERO,
        "milestones": _list_of(Constraint(above=0, below=1)),
    },
    "schedule": {
        "rounds_per_stage": replace(_choice("uniform", "left_skewed", "right_skewed"), list_of=_integer(1)),
        "depth_dropout": _BELOW_ONE,
        "weight_transfer": _BOOL,
    },
    "tuning": {
        "blocks": _integer(1),
        "bottleneck": _integer(1),
        "freeze_statistics": _BOOL,
        "rank": _integer(1),
        "alpha": _POSITIVE,
        "targets": _optional(_list_of(Constraint(kind=str))),
        "aggregation": _choice("factors", "freeze_a", "exact", "stack", "svd"),
        "ranks": _optional(_list_of(_integer(1))),
    },
    "server_optimizer": {
        "lr": _POSITIVE,
        "momentum": _BELOW_ONE,
        "beta_1": _BELOW_ONE,
        "beta_2": _BELOW_ONE,
        "tau": _POSITIVE,
    },
    "strategy": {
        "reported_metrics": _list_of(_NAME),
        "weighting": _WEIGHTING,
        "buffers": _choice("average", "scale"),
        "distance": _choice("mean_conv_l2", "squared_l2"),
        "aggregate": _choice("online", "target"),
        "update": _choice("online", "target", "both"),
        "predictor": _choice("dapu", "global", "local"),
        "predictor_threshold": Constraint(minimum=0),
        "tau": Constraint(minimum=0),
        "beta": Constraint(above=0, below=0.5),
        "rule": _choice("fedavg", "l_dawa", "m_dawa", "eua", "loss_weighted", "median"),
        "assign_by": _choice("loss", "update_cosine"),
        "assign_at": _choice("client", "server"),
        "clusters": _integer(1),
        "cluster_round": _integer(1),
        "num_images": _integer(2),
        "file": _PATH,
        "topology": _choice("ring", "grid", "star", "complete", "random_regular", "erdos_renyi", "file"),
        "degree": _optional(_integer(1)),
        "probability": _optional(_ABOVE_ZERO),
        "interval": _integer(1),
        "malicious": _integer(0),
        "select": _integer(1),
        "deviation": _choice("log", "unit"),
        "step": _choice("normalized", "constant"),
        "server_lr": _POSITIVE,
        "weight": _NOT_NEGATIVE,
        "normalize": _BOOL,
        "scale_at": _choice("server", "client"),
        "warmup_rounds": _integer(0),
    },
    "adapter": {"blocks": _optional(_integer(1))},
    "LDAWA": {"weighting": _LOSS_WEIGHTING},
    "LDAWAFedU": {"weighting": _LOSS_WEIGHTING},
    "Clustered": {"weighting": _optional(_LOSS_WEIGHTING)},
    "evaluation": {
        **_OPTIMIZER,
        "name": _NAME,
        "lr_schedule": _MAPPING_OR_NULL,
        "transform": _MAPPING_OR_NULL,
        "datasets": _MAPPING,
        "k": _integer(1),
        "temperature": _TEMPERATURE,
        "l2": _NOT_NEGATIVE,
        "max_iterations": _integer(1),
        "labels_per_class": _list_of(_integer(1)),
        "shares": _list_of(_ABOVE_ZERO),
        "draws": _integer(1),
        "epochs": _integer(0),
        "batch_size": _integer(2),
        "batch_norm_epochs": _integer(0),
        "features": _choice("pooled", "map"),
        "encoder_lr": _NOT_NEGATIVE,
        "head_lr": _NOT_NEGATIVE,
        "warmup": _integer(0),
        "milestones": _list_of(_integer(0)),
        "gamma": _FRACTION,
        "T_max": _integer(0),
        "num_ops": _integer(1, 64),
        "magnitude": _integer(0, 30),
        "include_own": _BOOL,
    },
}


def find_constraint(group: str, name: str, *, owner: str = "") -> Constraint | None:
    """Return the constraint of a setting, first that of its class ``owner``; None if it has none."""
    own = CONSTRAINTS.get(owner, {}).get(name)
    return own or CONSTRAINTS.get(group, {}).get(name)


def constraint_of(key: str) -> Constraint | None:
    """Return the constraint of a setting by its dotted key, apart from those of classes; None if it has none."""
    node, _, name = key.rpartition(".")
    return find_constraint(group_of(node), name)


def group_of(key: str) -> str:
    """Return the group of the settings in a node, by its dotted key."""
    return functools.reduce(_group_of, key.split(".") if key else (), "")


def check_arguments(
    group: str, *, owner: str = "", key: str = "", ranges: Mapping[str, Constraint] | None = None, **values: Any
) -> None:
    """Raise `InputError` if an argument of a constructor violates the constraint of its name in the group.

    ``key`` is that of the settings in an error message; empty: the group. ``ranges`` are the ``RANGES`` of a module.
    """
    for name, value in values.items():
        constraint = (ranges or {}).get(name) or find_constraint(group, name, owner=owner)
        assert constraint is not None, f"{group}.{name} has no constraint"
        if not constraint.allows(value):
            raise InputError(f"{key or group}.{name}={as_yaml(value)} must be {constraint.describe(value)}")


def as_yaml(value: Any) -> Any:
    """Return a value as YAML writes it, for an error message."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return list(value) if isinstance(value, tuple) else value


def statistic_of_channels(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return a mean or standard deviation for a number of channels: if it is another one, all have the mean."""
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels


def constraints_in(
    node: Mapping[str, Any], *, installed: frozenset[str], group: str = "", prefix: str = "", owner: str = ""
) -> Iterator[tuple[str, Any, Constraint]]:
    """Yield key, value and constraint of each setting that has one; classes that are not ``installed`` have none."""
    target = str(node.get("_target_") or "")
    owner = target.rpartition(".")[2] or owner
    if target and target not in installed:
        return
    for key, value in node.items():
        name = f"{prefix}{key}"
        constraint = find_constraint(group, str(key), owner=owner)
        nodes = _nodes_in(value) if constraint is None or constraint.kind is dict else {}
        if constraint and not nodes:
            yield name, value, constraint
        inner = _group_of(group, str(key))
        for suffix, settings in nodes.items():
            yield from constraints_in(
                settings, installed=installed, group=inner, prefix=f"{name}{suffix}.", owner=owner
            )


def _nodes_in(value: Any) -> dict[str, Mapping[str, Any]]:
    """Return the mappings of settings in a value, by what their keys have after that of the value."""
    if isinstance(value, Mapping):
        return {"": value}
    items = list(value) if isinstance(value, list | ListConfig) else []
    valid = all(isinstance(item, Mapping) for item in items)
    return {f".{index}": item for index, item in enumerate(items)} if valid else {}


def _group_of(group: str, key: str) -> str:
    """Return the group of the settings in the node ``key`` of a group."""
    named = {"dataset": "dataset", "datasets": "dataset", "view": "view", "views": "view", "mask": "mask"}
    if key in named:
        return named[key]
    return group or ("evaluation" if key == "final_evaluation" else key)
