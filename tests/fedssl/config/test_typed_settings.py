"""Settings reach what is built from them."""

from unittest.mock import patch

import pytest
import torch

from fedssl.availability import Workload
from fedssl.config.load import compose
from fedssl.config.settings import FeatureShift
from fedssl.datasets import folder
from fedssl.datasets.base import load_split
from fedssl.errors import InputError
from fedssl.partition import dirichlet
from server_app.build import make_context
from server_app.exchanges.virtual_time import make_virtual_time
from strategies.mods.model_average import ModelAverage
from tests.fedssl.partition.made import partition_input
from tests.methods import overrides_of

LABELED = partition_input(torch.arange(60) % 3, num_clients=4)


def context_of(settings):
    return make_context(settings, torch.device("cpu"), client_config=None)


def method_of(settings):
    return context_of(settings).method


def heads_of(settings):
    return method_of(settings).predictor.transformer[0]._heads


def delay_of(settings):
    work = Workload(client=1, round=2, flops=0.0, bytes_down=0, bytes_up=0)
    return make_virtual_time(context_of(settings)).client_time(work)


def mask_of(settings):
    return settings.training.augmentation.instantiate().recipes[0].mask


def hub_of(settings):
    with patch.object(folder, "index_hub", side_effect=InputError) as index, pytest.raises(InputError):
        load_split(settings.data, "train")
    return index.call_args.args[0]


SELF_BALANCING = [part.tolist() for part in dirichlet(LABELED, alpha=0.5, min_size=2, self_balancing=True)]
IJEPA = " ".join(overrides_of("ijepa"))
STAGES = "schedule=layer_wise rounds=8"  # two rounds for each of the four stages


@pytest.mark.parametrize(
    ("choices", "key", "value", "built", "expected"),
    [
        ("aggregation.buffered=true", "aggregation.delay_sigma", 0, delay_of, 1),
        (IJEPA, "augmentation.views.0.mask.context_scale", [0.5, 0.75], lambda s: mask_of(s).context_scale, None),
        (IJEPA, "augmentation.views.0.mask.target_scale", [0.125, 0.25], lambda s: mask_of(s).target_scale, None),
        (IJEPA, "method.predictor_depth", 2, lambda s: len(method_of(s).predictor.transformer) - 1, None),
        (IJEPA, "method.predictor_heads", 2, heads_of, None),
        ("method=fed_align_uniform", "method.uniformity_weight", 0.3, lambda s: method_of(s).uniformity_weight, None),
        ("method=ssd", "method.uniformity_weight", 0.3, lambda s: method_of(s).uniformity_weight, None),
        ("method=ssd", "method.separation_weight", 0.3, lambda s: method_of(s).separation_weight, None),
        ("method=ssd", "method.distillation_weight", 0.3, lambda s: method_of(s).distillation_weight, None),
        ("method=fedsc", "method.max_square", 3.5, lambda s: method_of(s).max_square, None),
        (
            "evaluation=fine_tune",
            "evaluation.head_lr",
            0.25,
            lambda s: s.evaluation.protocol.instantiate().group_settings[1]["lr"],
            None,
        ),
        ("", "feature_shift.contrast", 0.5, lambda s: s.partition.feature_shift, FeatureShift(contrast=0.5)),
        ("", "feature_shift.blur", 0.5, lambda s: s.partition.feature_shift, FeatureShift(blur=0.5)),
        (
            "partition=dirichlet",
            "partition.self_balancing",
            "true",
            lambda s: [part.tolist() for part in s.partition.rule.instantiate(LABELED)],
            SELF_BALANCING,
        ),
        (STAGES, "schedule.weight_transfer", "false", lambda s: context_of(s).phases[1].weight_transfer, False),
        (f"{STAGES} lr_schedule=cosine", "lr_schedule.per_stage", "true", lambda s: context_of(s).lr_factor(3), 1),
        ("model_average=ema", "model_average.decay", 0.3, lambda s: ModelAverage.make(context_of(s)).decay, None),
        ("dataset=cifar10", "dataset.hub", "lab/mine", hub_of, None),
    ],
    ids=lambda case: case if isinstance(case, str) and "." in case else "",
)
def test_a_setting_reaches_what_is_built(choices, key, value, built, expected):
    """``expected`` None: the value itself."""
    expected = value if expected is None else expected
    assert built(compose(choices.split())) != expected
    assert built(compose([*choices.split(), f"{key}={value}"])) == expected
