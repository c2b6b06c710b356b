"""Flower's run config as words of the command line: flat keys for what is set most often, and ``overrides`` for all."""

import shlex
from collections.abc import Mapping

from fedssl.config.overrides import quote

# Flower takes only keys that pyproject.toml has with a default; an empty one leaves the setting as it is.
RUN_CONFIG_KEYS = {
    "experiment": "experiment",
    "strategy": "strategy",
    "method": "method",
    "regularizer": "regularizer",
    "schedule": "schedule",
    "encoder": "encoder",
    "dataset": "dataset",
    "dataset-path": "dataset.path",
    "partition": "partition",
    "partition-alpha": "partition.alpha",
    "num-clients": "num_clients",
    "clients-per-round": "clients_per_round",
    "num-server-rounds": "rounds",
    "local-epochs": "local_epochs",
    "batch-size": "batch_size",
    "optimizer-lr": "optimizer.lr",
    "precision": "precision",
    "device": "device",
    "seed": "seed",
    "output-dir": "output_dir",
    "resume": "resume",
}


def overrides_of(run_config: Mapping[str, bool | float | int | str]) -> list[str]:
    """The words that a run config stands for; those of ``overrides`` come last, so that they win."""
    flat = [
        f"{RUN_CONFIG_KEYS[key]}={quote(value) if isinstance(value, str) else value}"
        for key, value in run_config.items()
        if key in RUN_CONFIG_KEYS and value != ""
    ]
    return [*flat, *shlex.split(str(run_config.get("overrides", "")))]
