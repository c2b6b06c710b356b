"""Types and ranges of settings: one declaration for each, by config group and name.

The site has a page of them. A class with another range for a name has its own entry.
"""

from collections.abc import Mapping
from pathlib import Path

from fedssl.config.constraint import LARGE, SMALL, Constraint, all_of, choice, integer, list_of, optional, range_of

LOSSLESS = "fp32"
WIRE_DTYPES = (LOSSLESS, "fp16", "bf16", "int8")  # dtypes of exchanged layers, see `fedssl.wire.wire_format`

MIN_IMAGES = 2  # of a client: contrastive losses and batch normalization need two images
MAX_IMAGE_SIZE = 4096  # pixels, of height and width
MAX_CHANNELS = 64  # of an image

_BOOL = Constraint(kind=bool)
_NAME = Constraint(kind=str)
_NAME_OR_NULL = optional(_NAME)
_PATH = optional(Constraint(kind=Path))
_MAPPING = Constraint(kind=dict)
_MAPPING_OR_NULL = optional(_MAPPING)
_POSITIVE = Constraint(above=0, minimum=SMALL, maximum=LARGE)
_TEMPERATURE = Constraint(above=0, minimum=1e-4, maximum=LARGE)  # of a softmax, whose inverse is the gradient's scale
_NOT_NEGATIVE = Constraint(minimum=0, maximum=LARGE)
_FRACTION = Constraint(minimum=0, maximum=1)
_BELOW_ONE = Constraint(minimum=0, below=1)
_ABOVE_ZERO = Constraint(above=0, maximum=1)
_SECONDS = Constraint(minimum=1, maximum=1e10)
_PER_SECOND = Constraint(minimum=1, maximum=1e18)
_SIZE = integer(1, MAX_IMAGE_SIZE)
_STATISTICS = {
    "mean": list_of(Constraint(minimum=-1e5, maximum=1e5)),
    "std": list_of(Constraint(above=0, maximum=1e5)),
}
_GPU_AUGMENTATION = choice("torch", "triton")
_LOSS_WEIGHTING = choice("examples", "uniform", "loss")
_OPTIMIZER = {
    "lr": Constraint(minimum=0),
    "momentum": _FRACTION,
    **all_of(_NOT_NEGATIVE, "weight_decay", "rho"),
    "nesterov": _BOOL,
    "fused": optional(_BOOL),
}

CONSTRAINTS: Mapping[str, Mapping[str, Constraint]] = {
    "": {
        "seed": integer(0, 2**63 - 1),
        "num_clients": integer(1, 10_000_000),
        "imbalance": Constraint(minimum=1, maximum=LARGE),
        **all_of(integer(1), "clients_per_round", "rounds", "checkpoint_every", "keep_checkpoints"),
        **all_of(integer(0), "unseen_clients", "local_epochs", "adaptation_epochs"),
        **all_of(integer(0), "evaluate_every", "collapse_images", "snapshot_every"),
        "clip_norm": optional(_POSITIVE),
        "batch_size": integer(2),
        "device": _NAME,  # those that torch has: `fedssl.machine.devices.select_device`
        "precision": choice("fp32", "bf16"),
        **all_of(_BOOL, "channels_last", "compile", "keep_freed_memory", "evaluate_personalized"),
        **all_of(_BOOL, "measure_resources", "plan"),
        "cuda_graphs": optional(_BOOL),
        "gpu_augmentation": _GPU_AUGMENTATION,
        "threads": optional(integer(1, 1024)),  # more threads crash the process
        "wire_dtype": choice(*WIRE_DTYPES),
        "reply_timeout": Constraint(minimum=1, maximum=1e9),
        "pause_after": optional(integer(1)),
        **all_of(_PATH, "teacher", "output_dir", "resume"),
        "run_id": _NAME_OR_NULL,
    },
    "statistics": {"max_clients": optional(integer(1)), "measured": _MAPPING_OR_NULL},
    "client_state": {"max_bytes": optional(integer(1))},
    "sweep": {
        **all_of(optional(integer(1)), "jobs", "min_rounds"),
        **all_of(_NAME_OR_NULL, "address", "metric"),
        "retry": _BOOL,
        "gpus": Constraint(above=0, minimum=1e-3, maximum=LARGE),
        "reduction_factor": optional(integer(2)),
        "axes": _MAPPING_OR_NULL,
        "without": list_of(_NAME),
    },
    "aggregation": {
        "min_updates": integer(1),
        **all_of(integer(0), "max_retries", "over_selection"),
        "round_deadline": optional(Constraint(above=0, minimum=SMALL, maximum=1e9)),
        "buffered": _BOOL,
        "delay_sigma": Constraint(minimum=0, maximum=10),
        "max_norm_ratio": optional(Constraint(minimum=1)),
        "max_examples": optional(integer(1)),
    },
    "early_stopping": {
        "monitor": _NAME_OR_NULL,
        "patience": optional(integer(1)),
        "min_delta": Constraint(minimum=0),
        "threshold": optional(Constraint()),
    },
    "privacy": {
        "clip_norm": optional(_POSITIVE),
        "noise_multiplier": _POSITIVE,
        "delta": Constraint(above=0, below=1),
    },
    "secure_aggregation": {
        "clipping_range": optional(_POSITIVE),
        **all_of(_BELOW_ONE, "dropout_fraction", "corrupted_fraction"),
        **all_of(Constraint(minimum=1, maximum=128), "security_bits", "correctness_bits"),
        **all_of(optional(integer(2)), "neighbors", "threshold"),
        "max_weight": optional(integer(MIN_IMAGES, 2**22)),
        "mask_generator": choice("chacha20", "mt19937"),
    },
    "availability": {
        "file": _PATH,
        "fraction": _ABOVE_ZERO,
        "period": _SECONDS,
        "dropout": _FRACTION,
    },
    "Trace": {"period": optional(_SECONDS)},
    "client_speed": {
        "file": _PATH,
        **all_of(_PER_SECOND, "flops_per_second", "upload_bytes_per_second", "download_bytes_per_second"),
        **all_of(Constraint(minimum=0, maximum=10), "sigma_clients", "sigma_rounds"),
    },
    "engine": {
        "name": choice("auto", "local", "ray", "deployment"),
        "address": _NAME_OR_NULL,
        **all_of(_PATH, "root_certificates", "signing_key", "signing_certificate"),
        "client_cpus": optional(integer(1)),
        "deliver_every": optional(integer(0)),
        "client_gpus": optional(Constraint(minimum=0)),
    },
    "tracker": {
        **all_of(_NAME, "experiment", "project"),
        **all_of(_NAME_OR_NULL, "run", "uri"),
        "mode": choice("offline", "online"),
    },
    "augmentation": {
        "size": _SIZE,
        **_STATISTICS,
        "gpu_augmentation": _GPU_AUGMENTATION,
        "views": list_of(_MAPPING),
    },
    "view": {  # of augmentation.views and evaluation.view
        "count": integer(0, 1024),
        "size": _ABOVE_ZERO,
        "role": choice("global", "local"),
        "mask": _MAPPING_OR_NULL,
        "crop_scale": range_of(_ABOVE_ZERO),
        **all_of(range_of(_POSITIVE), "crop_ratio", "gamma"),
        "pad": integer(0, MAX_IMAGE_SIZE),
        **all_of(_FRACTION, "flip_prob", "jitter_prob", "gray_prob", "blur_prob", "solarize_prob"),
        **all_of(_FRACTION, "vertical_flip_prob", "transpose_prob", "gamma_prob", "noise_prob"),
        "rotation": Constraint(minimum=0, maximum=180),
        "noise_std": range_of(_FRACTION),
        **all_of(_NOT_NEGATIVE, "brightness", "contrast", "saturation"),
        "hue": Constraint(minimum=0, maximum=0.5),
        "blur_sigma": range_of(Constraint(above=0, maximum=MAX_IMAGE_SIZE)),
    },
    "mask": {  # of a view
        "kind": choice("random", "block", "multi_block"),
        "patch": optional(_SIZE),
        "ratio": Constraint(above=0, below=1),
        **all_of(range_of(_ABOVE_ZERO), "ratio_range", "target_scale", "context_scale"),
        "prob": _ABOVE_ZERO,
        "aspect_ratio": range_of(_POSITIVE),
        "num_targets": integer(1, 1024),
    },
    "calibration": {
        "dataset": _MAPPING_OR_NULL,
        "when": optional(choice("start", "end")),
        "share": _ABOVE_ZERO,
        "epochs": integer(0),
    },
    "dataset": {
        **all_of(_PATH, "path", "cache"),  # the latter may be auto
        **all_of(_NAME_OR_NULL, "hub", "image", "label", "owner", "group", "split_column", "torchvision"),
        "skip_missing": _BOOL,
        **all_of(_NAME_OR_NULL, "federated", "train", "test"),  # of dataset.splits
        "channels": integer(1, MAX_CHANNELS),
        "size": _SIZE,
        **_STATISTICS,
        **all_of(optional(integer(1)), "limit", "test_limit", "num_classes"),
        "max_pixels": integer(1, 178_956_970),  # Pillow's limit
        "video_interval": Constraint(minimum=0.001, maximum=86_400),  # seconds
        "background": integer(0, 255),
        "window": optional(list_of(Constraint(minimum=-(2**32), maximum=2**32))),
        "percentiles": optional(list_of(Constraint(minimum=0, maximum=100))),
        "pages": choice("auto", "first", "all", "channels"),
        "dtype": choice("auto", "uint8", "uint16", "float32"),
        "test_fraction": _BELOW_ONE,
        "held_out": Constraint(kind=str, optional=True, list_of=_NAME),
        "folders": choice("class", "owner", "owner/class", "domain", "domain/class", "none"),
        "split_folders": choice("auto", True, False),
        "storage": choice("decoded", "encoded", "auto"),
    },
    "feature_shift": {
        **all_of(_FRACTION, "brightness", "contrast", "color", "noise"),
        "blur": Constraint(minimum=0, maximum=10),
    },
    "partition": {
        **all_of(_PATH, "file", "encoder"),
        "alpha": _POSITIVE,
        "distribution": choice("lognormal", "power_law"),
        "spread": Constraint(minimum=0, maximum=10),
        "beta": _FRACTION,
        **all_of(integer(1), "classes_per_client", "components"),
        "clusters": optional(integer(1)),
        "min_size": integer(0),
        "self_balancing": _BOOL,
    },
    "encoder": {
        "name": _NAME,
        "weights": _NAME_OR_NULL,  # a path, or the name of a model
        "channels": integer(1),
        **all_of(_SIZE, "size", "patch"),
        **all_of(integer(1, 65_536), "width", "heads"),
        "depth": integer(1, 1000),
        "norm": choice("batch", "group"),
        "stem": choice("small", "imagenet"),
        "pool": choice("token", "mean"),
        "positions": choice("sincos", "learned"),
        "registers": integer(0, 1024),
    },
    "method": {
        "teacher_encoder": _MAPPING_OR_NULL,
        **all_of(_TEMPERATURE, "temperature", "epsilon"),
        **all_of(_TEMPERATURE, "student_temperature", "teacher_temperature", "warmup_teacher_temperature"),
        **all_of(_BOOL, "concat_views", "train_patches", "batch_norm", "last_batch_norm", "match_prototypes"),
        **all_of(_BOOL, "normalize_patches", "exchange_decoder", "exchange_predictor"),
        **all_of(_NOT_NEGATIVE, "lambd", "alignment_weight", "sim_weight", "var_weight", "cov_weight", "patch_weight"),
        **all_of(_NOT_NEGATIVE, "gamma_max", "gamma_min"),
        **all_of(_FRACTION, "ema_decay", "center_momentum", "own_share"),
        "target_init": choice("persist", "reset", "average"),
        "loss_scale": optional(_POSITIVE),
        **all_of(integer(1, 1_048_576), "hidden_dim", "out_dim", "local_clusters", "queue_size"),
        "num_layers": integer(1, 1024),
        "activation": choice("relu", "gelu"),
        "num_classes": optional(integer(1)),
        **all_of(integer(0), "sent_per_round", "freeze_prototypes_rounds", "warmup_rounds", "freeze_last_layer_rounds"),
        "dictionary_capacity": integer(1, 2**24),
        **all_of(integer(2, 1_048_576), "global_clusters", "num_prototypes"),
        "num_latents": integer(2, 65_536),
        "num_slices": integer(1, 65_536),
        **all_of(integer(1, 65_536), "decoder_width", "decoder_heads", "predictor_width", "predictor_heads"),
        "num_points": integer(2, 1024),
        "t_max": Constraint(above=0, minimum=1e-3, maximum=100),
        **all_of(integer(1), "iterations", "queue_start_round"),
        **all_of(integer(1, 1000), "decoder_depth", "predictor_depth"),
        "cache_bytes": integer(0, 2**40),
        "ema_schedule": choice("constant", "cosine"),
        **all_of(_NOT_NEGATIVE, "uniformity_weight", "separation_weight", "distillation_weight"),
        **all_of(_POSITIVE, "t", "max_square", "scale"),
        "share": _ABOVE_ZERO,
    },
    **{name: {"loss": choice("standard", "l_dawa")} for name in ("SimCLR", "BarlowTwins")},
    "Distillation": {"loss": choice("cosine", "mse", "similarity")},
    "LeJEPA": {"lambd": _FRACTION},
    "SwAV": {"queue_size": integer(0, 1_048_576)},
    "regularizer": {
        **all_of(_NOT_NEGATIVE, "weight", "alpha", "beta", "tolerance"),
        "temperature": _TEMPERATURE,
        "distance": choice("info_nce", "cosine"),
        "part": choice("projector", "encoder"),
        "variant": choice("uot", "tangent_swd"),
        "reduction": choice("sum", "mean"),
        **all_of(_POSITIVE, "cost_scale", "tau_a", "tau_b"),
        "max_iter": integer(1),
        "gpu_iter": integer(0),
    },
    "optimizer": _OPTIMIZER,
    "lr_schedule": {
        "eta_min_factor": _FRACTION,
        "per_stage": _BOOL,
        "factor": _ABOVE_ZERO,
        "milestones": list_of(Constraint(above=0, below=1)),
    },
    "schedule": {
        "rounds_per_stage": Constraint(choices=("uniform", "left_skewed", "right_skewed"), list_of=integer(1)),
        "depth_dropout": _BELOW_ONE,
        "weight_transfer": _BOOL,
    },
    "tuning": {
        **all_of(integer(1), "blocks", "bottleneck", "rank"),
        "freeze_statistics": _BOOL,
        "alpha": _POSITIVE,
        "targets": optional(list_of(Constraint(kind=str))),
        "aggregation": choice("factors", "freeze_a", "exact", "stack", "svd"),
        "ranks": optional(list_of(integer(1))),
    },
    "server_optimizer": {
        **all_of(_POSITIVE, "lr", "tau"),
        **all_of(_BELOW_ONE, "momentum", "beta_1", "beta_2"),
    },
    "model_average": {"decay": _BELOW_ONE, "rounds": integer(1, 16)},
    "strategy": {
        "reported_metrics": list_of(_NAME),
        "weighting": choice("examples", "uniform"),
        "buffers": choice("average", "scale"),
        "distance": choice("mean_conv_l2", "squared_l2"),
        "aggregate": choice("online", "target"),
        "update": choice("online", "target", "both"),
        "predictor": choice("dapu", "global", "local"),
        **all_of(Constraint(minimum=0), "predictor_threshold", "tau"),
        "beta": Constraint(above=0, below=0.5),
        "rule": choice("fedavg", "l_dawa", "eua", "loss_weighted", "m_dawa", "median"),
        "assign_by": choice("loss", "update_cosine"),
        "assign_at": choice("client", "server"),
        **all_of(integer(1), "clusters", "cluster_round", "interval", "select"),
        "num_images": integer(2),
        "file": _PATH,
        "topology": choice("ring", "grid", "star", "complete", "random_regular", "erdos_renyi", "file"),
        "degree": optional(integer(1)),
        "probability": optional(_ABOVE_ZERO),
        **all_of(integer(0), "malicious", "warmup_rounds"),
        "deviation": choice("log", "unit"),
        "step": choice("normalized", "constant"),
        "server_lr": _POSITIVE,
        "weight": _NOT_NEGATIVE,
        "normalize": _BOOL,
        "scale_at": choice("server", "client"),
    },
    "MOON": {"temperature": _TEMPERATURE},
    "FedDyn": {"alpha": Constraint(above=0, maximum=LARGE)},
    "FedExP": {"epsilon": _NOT_NEGATIVE},
    "adapter": {"blocks": optional(integer(1))},
    **{name: {"alpha": optional(_POSITIVE)} for name in ("domain", "quantity")},
    **{name: {"weighting": _LOSS_WEIGHTING} for name in ("LDAWA", "LDAWAFedU")},
    "Clustered": {"weighting": optional(_LOSS_WEIGHTING)},
    "evaluation": {
        **_OPTIMIZER,
        **all_of(_NAME, "name", "masks"),
        **all_of(_MAPPING_OR_NULL, "lr_schedule", "transform"),
        "datasets": _MAPPING,
        **all_of(integer(1), "k", "max_iterations", "draws"),
        "temperature": _TEMPERATURE,
        **all_of(_NOT_NEGATIVE, "l2", "encoder_lr", "head_lr"),
        "labels_per_class": list_of(integer(1)),
        "shares": list_of(_ABOVE_ZERO),
        **all_of(integer(0), "epochs", "batch_norm_epochs", "warmup", "T_max"),
        "batch_size": integer(2),
        "features": choice("pooled", "map"),
        "milestones": list_of(integer(0)),
        "gamma": _FRACTION,
        "num_ops": integer(1, 64),
        "magnitude": integer(0, 30),
        "include_own": _BOOL,
        "gallery": choice("test", "train"),
        "columns": optional(list_of(_NAME)),
        "file": _PATH,
        "ignore_index": optional(integer(0, 255)),
        "recall_at": list_of(integer(1)),
    },
}
