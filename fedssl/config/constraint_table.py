"""Types and ranges of settings: one declaration for each, by config group and name.

The site has a page of them. A class with another range for a name has its own entry.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedssl.config.constraint import LARGE, SMALL, Constraint

LOSSLESS = "fp32"
WIRE_DTYPES = (LOSSLESS, "fp16", "bf16", "int8")  # dtypes of exchanged layers, see `fedssl.wire.wire_format`

MIN_IMAGES = 2  # of a client: contrastive losses and batch normalization need two images
MAX_IMAGE_SIZE = 4096  # pixels, of height and width
MAX_CHANNELS = 64  # of an image
MAX_INTEGER = 2**31 - 1


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


def _all(constraint: Constraint, *names: str) -> dict[str, Constraint]:
    return dict.fromkeys(names, constraint)


_BOOL = Constraint(kind=bool)
_NAME = Constraint(kind=str)
_NAME_OR_NULL = _optional(_NAME)
_PATH = _optional(Constraint(kind=Path))
_MAPPING = Constraint(kind=dict)
_MAPPING_OR_NULL = _optional(_MAPPING)
_POSITIVE = Constraint(above=0, minimum=SMALL, maximum=LARGE)
_TEMPERATURE = Constraint(above=0, minimum=1e-4, maximum=LARGE)  # of a softmax, whose inverse is the gradient's scale
_NOT_NEGATIVE = Constraint(minimum=0, maximum=LARGE)
_FRACTION = Constraint(minimum=0, maximum=1)
_BELOW_ONE = Constraint(minimum=0, below=1)
_ABOVE_ZERO = Constraint(above=0, maximum=1)
_SECONDS = Constraint(minimum=1, maximum=1e10)
_PER_SECOND = Constraint(minimum=1, maximum=1e18)
_SIZE = _integer(1, MAX_IMAGE_SIZE)
_STATISTICS = {
    "mean": _list_of(Constraint(minimum=-1e5, maximum=1e5)),
    "std": _list_of(Constraint(above=0, maximum=1e5)),
}
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
    "rho": _NOT_NEGATIVE,
}

CONSTRAINTS: Mapping[str, Mapping[str, Constraint]] = {
    "": {
        "seed": _integer(0, 2**63 - 1),
        "num_clients": _integer(1, 10_000_000),
        "imbalance": Constraint(minimum=1, maximum=LARGE),
        **_all(_integer(1), "clients_per_round", "rounds", "checkpoint_every", "keep_checkpoints"),
        **_all(_integer(0), "unseen_clients", "local_epochs", "adaptation_epochs"),
        **_all(_integer(0), "evaluate_every", "collapse_images", "snapshot_every"),
        "clip_norm": _optional(_POSITIVE),
        "batch_size": _integer(2),
        "device": _NAME,  # those that torch has: `fedssl.machine.devices.select_device`
        "precision": _choice("fp32", "bf16"),
        **_all(_BOOL, "channels_last", "compile", "keep_freed_memory", "evaluate_personalized"),
        **_all(_BOOL, "measure_resources", "plan"),
        "cuda_graphs": _optional(_BOOL),
        "gpu_augmentation": _GPU_AUGMENTATION,
        "threads": _optional(_integer(1, 1024)),  # more threads crash the process
        "wire_dtype": _choice(*WIRE_DTYPES),
        "reply_timeout": Constraint(minimum=1, maximum=1e9),
        "pause_after": _optional(_integer(1)),
        **_all(_PATH, "teacher", "output_dir", "resume"),
        "run_id": _NAME_OR_NULL,
    },
    "statistics": {"max_clients": _optional(_integer(1)), "measured": _MAPPING_OR_NULL},
    "client_state": {"max_bytes": _optional(_integer(1))},
    "sweep": {
        **_all(_optional(_integer(1)), "jobs", "min_rounds"),
        **_all(_NAME_OR_NULL, "address", "metric"),
        "retry": _BOOL,
        "gpus": Constraint(above=0, minimum=1e-3, maximum=LARGE),
        "reduction_factor": _optional(_integer(2)),
        "axes": _MAPPING_OR_NULL,
        "without": _list_of(_NAME),
    },
    "aggregation": {
        "min_updates": _integer(1),
        **_all(_integer(0), "max_retries", "over_selection"),
        "round_deadline": _optional(Constraint(above=0, minimum=SMALL, maximum=1e9)),
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
        **_all(_BELOW_ONE, "dropout_fraction", "corrupted_fraction"),
        **_all(Constraint(minimum=1, maximum=128), "security_bits", "correctness_bits"),
        **_all(_optional(_integer(2)), "neighbors", "threshold"),
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
        **_all(_PER_SECOND, "flops_per_second", "upload_bytes_per_second", "download_bytes_per_second"),
        **_all(Constraint(minimum=0, maximum=10), "sigma_clients", "sigma_rounds"),
    },
    "engine": {
        "name": _choice("auto", "local", "ray", "deployment"),
        "address": _NAME_OR_NULL,
        **_all(_PATH, "root_certificates", "signing_key", "signing_certificate"),
        "client_cpus": _optional(_integer(1)),
        "deliver_every": _optional(_integer(0)),
        "client_gpus": _optional(Constraint(minimum=0)),
    },
    "tracker": {
        **_all(_NAME, "experiment", "project"),
        **_all(_NAME_OR_NULL, "run", "uri"),
        "mode": _choice("offline", "online"),
    },
    "augmentation": {
        "size": _SIZE,
        **_STATISTICS,
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
        **_all(_FRACTION, "flip_prob", "jitter_prob", "gray_prob", "blur_prob", "solarize_prob"),
        **_all(_FRACTION, "vertical_flip_prob", "transpose_prob", "gamma_prob", "noise_prob"),
        "rotation": Constraint(minimum=0, maximum=180),
        "gamma": _range_of(_POSITIVE),
        "noise_std": _range_of(_FRACTION),
        **_all(_NOT_NEGATIVE, "brightness", "contrast", "saturation"),
        "hue": Constraint(minimum=0, maximum=0.5),
        "blur_sigma": _range_of(Constraint(above=0, maximum=MAX_IMAGE_SIZE)),
    },
    "mask": {  # of a view
        "kind": _choice("random", "block", "multi_block"),
        "patch": _optional(_SIZE),
        "ratio": Constraint(above=0, below=1),
        **_all(_range_of(_ABOVE_ZERO), "ratio_range", "target_scale", "context_scale"),
        "prob": _ABOVE_ZERO,
        "aspect_ratio": _range_of(_POSITIVE),
        "num_targets": _integer(1, 1024),
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
        **_all(_NAME_OR_NULL, "hub", "image", "label", "owner", "group", "split_column"),
        "skip_missing": _BOOL,
        **_all(_NAME_OR_NULL, "federated", "train", "test"),  # of dataset.splits
        "channels": _integer(1, MAX_CHANNELS),
        "size": _SIZE,
        **_STATISTICS,
        **_all(_optional(_integer(1)), "limit", "test_limit", "num_classes"),
        "max_pixels": _integer(1, 178_956_970),  # Pillow's limit
        "video_interval": Constraint(minimum=0.001, maximum=86_400),  # seconds
        "background": _integer(0, 255),
        "window": _optional(_list_of(Constraint(minimum=-(2**32), maximum=2**32))),
        "percentiles": _optional(_list_of(Constraint(minimum=0, maximum=100))),
        "pages": _choice("auto", "first", "all", "channels"),
        "dtype": _choice("auto", "uint8", "uint16", "float32"),
        "test_fraction": _BELOW_ONE,
        "held_out": Constraint(kind=str, optional=True, list_of=_NAME),
        "folders": _choice("class", "owner", "owner/class", "domain", "domain/class", "none"),
        "split_folders": _choice("auto", True, False),
        "storage": _choice("decoded", "encoded", "auto"),
    },
    "feature_shift": {
        **_all(_FRACTION, "brightness", "contrast", "color", "noise"),
        "blur": Constraint(minimum=0, maximum=10),
    },
    "partition": {
        **_all(_PATH, "file", "encoder"),
        "alpha": _POSITIVE,
        "distribution": _choice("lognormal", "power_law"),
        "spread": Constraint(minimum=0, maximum=10),
        "beta": _FRACTION,
        **_all(_integer(1), "classes_per_client", "components"),
        "clusters": _optional(_integer(1)),
        "min_size": _integer(0),
        "self_balancing": _BOOL,
    },
    "encoder": {
        "name": _NAME,
        "weights": _NAME_OR_NULL,  # a path, or the name of a model
        "channels": _integer(1),
        "size": _SIZE,
        **_all(_integer(1, 65_536), "width", "heads"),
        "depth": _integer(1, 1000),
        "patch": _integer(1, MAX_IMAGE_SIZE),
        "norm": _choice("batch", "group"),
        "stem": _choice("small", "imagenet"),
        "pool": _choice("token", "mean"),
        "positions": _choice("sincos", "learned"),
        "registers": _integer(0, 1024),
    },
    "method": {
        "teacher_encoder": _MAPPING_OR_NULL,
        **_all(_TEMPERATURE, "temperature", "epsilon"),
        **_all(_TEMPERATURE, "student_temperature", "teacher_temperature", "warmup_teacher_temperature"),
        **_all(_BOOL, "concat_views", "train_patches", "batch_norm", "last_batch_norm", "match_prototypes"),
        **_all(_BOOL, "normalize_patches", "exchange_decoder", "exchange_predictor"),
        **_all(_NOT_NEGATIVE, "lambd", "alignment_weight", "sim_weight", "var_weight", "cov_weight", "patch_weight"),
        **_all(_NOT_NEGATIVE, "gamma_max", "gamma_min"),
        **_all(_FRACTION, "ema_decay", "center_momentum"),
        "target_init": _choice("persist", "reset", "average"),
        "loss_scale": _optional(_POSITIVE),
        **_all(_integer(1, 1_048_576), "hidden_dim", "out_dim", "local_clusters", "queue_size"),
        "num_layers": _integer(1, 1024),
        "activation": _choice("relu", "gelu"),
        "num_classes": _optional(_integer(1)),
        **_all(_integer(0), "sent_per_round", "freeze_prototypes_rounds", "warmup_rounds", "freeze_last_layer_rounds"),
        "dictionary_capacity": _integer(1, 2**24),
        **_all(_integer(2, 1_048_576), "global_clusters", "num_prototypes"),
        "num_latents": _integer(2, 65_536),
        "num_slices": _integer(1, 65_536),
        **_all(_integer(1, 65_536), "decoder_width", "decoder_heads", "predictor_width", "predictor_heads"),
        "num_points": _integer(2, 1024),
        "t_max": Constraint(above=0, minimum=1e-3, maximum=100),
        **_all(_integer(1), "iterations", "queue_start_round"),
        **_all(_integer(1, 1000), "decoder_depth", "predictor_depth"),
        "cache_bytes": _integer(0, 2**40),
        "ema_schedule": _choice("constant", "cosine"),
        **_all(_NOT_NEGATIVE, "uniformity_weight", "separation_weight", "distillation_weight"),
        **_all(_POSITIVE, "t", "max_square", "scale"),
        "share": _ABOVE_ZERO,
        "own_share": _FRACTION,
    },
    "SimCLR": {"loss": _choice("standard", "l_dawa")},
    "BarlowTwins": {"loss": _choice("standard", "l_dawa")},
    "Distillation": {"loss": _choice("cosine", "mse", "similarity")},
    "LeJEPA": {"lambd": _FRACTION},
    "SwAV": {"queue_size": _integer(0, 1_048_576)},
    "regularizer": {
        **_all(_NOT_NEGATIVE, "weight", "alpha", "beta", "tolerance"),
        "temperature": _TEMPERATURE,
        "distance": _choice("info_nce", "cosine"),
        "part": _PARTS,
        "variant": _choice("uot", "tangent_swd"),
        "reduction": _choice("sum", "mean"),
        **_all(_POSITIVE, "cost_scale", "tau_a", "tau_b"),
        "max_iter": _integer(1),
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
        **_all(_integer(1), "blocks", "bottleneck", "rank"),
        "freeze_statistics": _BOOL,
        "alpha": _POSITIVE,
        "targets": _optional(_list_of(Constraint(kind=str))),
        "aggregation": _choice("factors", "freeze_a", "exact", "stack", "svd"),
        "ranks": _optional(_list_of(_integer(1))),
    },
    "server_optimizer": {
        **_all(_POSITIVE, "lr", "tau"),
        **_all(_BELOW_ONE, "momentum", "beta_1", "beta_2"),
    },
    "model_average": {"decay": _BELOW_ONE, "rounds": _integer(1, 16)},
    "strategy": {
        "reported_metrics": _list_of(_NAME),
        "weighting": _WEIGHTING,
        "buffers": _choice("average", "scale"),
        "distance": _choice("mean_conv_l2", "squared_l2"),
        "aggregate": _choice("online", "target"),
        "update": _choice("online", "target", "both"),
        "predictor": _choice("dapu", "global", "local"),
        **_all(Constraint(minimum=0), "predictor_threshold", "tau"),
        "beta": Constraint(above=0, below=0.5),
        "rule": _choice("fedavg", "l_dawa", "m_dawa", "eua", "loss_weighted", "median"),
        "assign_by": _choice("loss", "update_cosine"),
        "assign_at": _choice("client", "server"),
        **_all(_integer(1), "clusters", "cluster_round", "interval", "select"),
        "num_images": _integer(2),
        "file": _PATH,
        "topology": _choice("ring", "grid", "star", "complete", "random_regular", "erdos_renyi", "file"),
        "degree": _optional(_integer(1)),
        "probability": _optional(_ABOVE_ZERO),
        **_all(_integer(0), "malicious", "warmup_rounds"),
        "deviation": _choice("log", "unit"),
        "step": _choice("normalized", "constant"),
        "server_lr": _POSITIVE,
        "weight": _NOT_NEGATIVE,
        "normalize": _BOOL,
        "scale_at": _choice("server", "client"),
    },
    "MOON": {"temperature": _TEMPERATURE},
    "FedDyn": {"alpha": Constraint(above=0, maximum=LARGE)},
    "FedExP": {"epsilon": _NOT_NEGATIVE},
    "adapter": {"blocks": _optional(_integer(1))},
    "domain": {"alpha": _optional(_POSITIVE)},
    "quantity": {"alpha": _optional(_POSITIVE)},
    "LDAWA": {"weighting": _LOSS_WEIGHTING},
    "LDAWAFedU": {"weighting": _LOSS_WEIGHTING},
    "Clustered": {"weighting": _optional(_LOSS_WEIGHTING)},
    "evaluation": {
        **_OPTIMIZER,
        "name": _NAME,
        **_all(_MAPPING_OR_NULL, "lr_schedule", "transform"),
        "datasets": _MAPPING,
        **_all(_integer(1), "k", "max_iterations", "draws"),
        "temperature": _TEMPERATURE,
        **_all(_NOT_NEGATIVE, "l2", "encoder_lr", "head_lr"),
        "labels_per_class": _list_of(_integer(1)),
        "shares": _list_of(_ABOVE_ZERO),
        **_all(_integer(0), "epochs", "batch_norm_epochs", "warmup", "T_max"),
        "batch_size": _integer(2),
        "features": _choice("pooled", "map"),
        "milestones": _list_of(_integer(0)),
        "gamma": _FRACTION,
        "num_ops": _integer(1, 64),
        "magnitude": _integer(0, 30),
        "include_own": _BOOL,
        "gallery": _choice("test", "train"),
        "columns": _optional(_list_of(_NAME)),
        "file": _PATH,
        "masks": _NAME,
        "ignore_index": _optional(_integer(0, 255)),
        "recall_at": _list_of(_integer(1)),
    },
}
