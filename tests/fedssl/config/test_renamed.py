"""Names of earlier versions: every one is answered with the new name, wherever it is written."""

import functools
import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from fedssl.config.compose import validate_names
from fedssl.config.load import compose
from fedssl.config.overrides import CONF, config_groups
from fedssl.config.renamed import CHOICES, RENAMED, SETTINGS, TARGETS, VALUES, VIEW, check_renamed, current_key, update
from fedssl.config.saved_run import update_override
from fedssl.config.targets import locate
from fedssl.errors import InputError
from server_app.app import overrides_of


@functools.cache
def settings():
    """Every setting of every choice, by dotted key; without a choice's group where it is at the top."""
    names = set()
    for file in CONF.rglob("*.yaml"):
        text, (group, *_) = file.read_text(), file.relative_to(CONF).parts
        prefix = "" if file == CONF / "config.yaml" or "@package _global_" in text else f"{group}."
        names |= {prefix + key for key in keys(OmegaConf.load(file))}
    return names


def keys(node, prefix=""):
    for key in node:
        yield f"{prefix}{key}"
        if OmegaConf.is_dict(node) and not OmegaConf.is_missing(node, key):
            value = node._get_node(key)
            if OmegaConf.is_dict(value):
                yield from keys(value, f"{prefix}{key}.")


# Every setting and class of conf/ that was renamed since the first release.
OLD_SETTINGS = [
    "adapt_epochs",
    "allocator",
    "client_timeout",
    "evaluate_clients",
    "gpu_views",
    "health_pictures",
    "keep_models",
    "newcomers",
    "transport",
    "augmentation.gpu_views",
    "calibration.at",
    "lr_schedule.least",
    "secure",
    "secure.clipping_range",
    "secure.threshold",
    "stop_when",
    "stop_when.least",
    "stop_when.metric",
    "stop_when.patience",
    "stop_when.reach",
    "updates",
    "updates.buffered",
    "updates.deadline",
    "updates.extra_clients",
    "updates.max_examples",
    "updates.min_updates",
    "updates.norm_factor",
    "updates.repeats",
    "strategy.after",
    "strategy.choose_by",
    "strategy.metrics",
    "strategy.pictures",
    "method.dictionary_size",
    "method.entries",
    "method.memory_size",
    "method.one_forward",
    "method.target",
    "method.predictor.hidden",
    "method.predictor.last_norm",
    "method.predictor.layers",
    "method.predictor.norm",
    "method.predictor.out",
    "method.projector.hidden",
    "method.projector.last_norm",
    "method.projector.layers",
    "method.projector.norm",
    "method.projector.out",
    "augmentation.views.*.blur",
    "augmentation.views.*.flip",
    "augmentation.views.*.gray",
    "augmentation.views.*.jitter",
    "augmentation.views.*.solarize",
    "evaluation.view.flip",
    "evaluation.view.gray",
    "evaluation.view.jitter",
]
OLD_TARGETS = [
    "fedssl.evaluation.linear.Linear",
    "fedssl.evaluation.probes.Probes",
    "fedssl.evaluation.trained_linear.TrainedLinear",
    "fedssl.heads.MLP",
    "fedssl.lr_schedules.cosine",
    "fedssl.partition.classes",
    "fedssl.partition.listed",
    "fedssl.schedules.end_to_end",
    "server_app.trackers.base.Nothing",
    "strategies.loss.Loss",
    "strategies.orchestra.Orchestra",
    "strategies.robust.Krum",
    "strategies.server_optimizer.Assign",
]


@pytest.mark.parametrize("old", OLD_SETTINGS)
def test_an_old_setting_is_answered_with_a_current_one(old):
    with pytest.raises(InputError, match=rf"^{re.escape(old)} is now [\w.*]+($|, and its value )") as caught:
        check_renamed(old)
    new = str(caught.value).split()[3].rstrip(",")
    assert new in settings() | {f"augmentation.views.*.{name}" for name in VIEW.values()} | {"secure_aggregation"}


@pytest.mark.parametrize("old", OLD_TARGETS)
def test_an_old_class_is_answered_with_a_current_one(old):
    with pytest.raises(InputError, match=f"^_target_={old} is now .*; write that$") as caught:
        locate(old)
    assert callable(locate(str(caught.value).split()[3].rstrip(";")))


@pytest.mark.parametrize("old", SETTINGS)
def test_every_old_setting_is_answered(old):
    value = "{}" if old in ("updates", "stop_when") else "1"
    for override in (f"{old}={value}", f"+{old}={value}", f"{old}=1,2"):
        with pytest.raises(InputError, match=f"^{old} is now {SETTINGS[old]}"):
            validate_names([override])
    (given_override,) = overrides_of({"overrides": shlex.quote(f"{old}={value}")})  # as in flwr run . --run-config
    with pytest.raises(InputError, match=f"^{old} is now {SETTINGS[old]}"):
        compose([given_override])


@pytest.mark.parametrize("override", [override for override in RENAMED if "=" in override])
def test_every_old_choice_and_value_is_answered_also_among_others(override):
    key, _, old = override.partition("=")
    method = {"method": "method=byol", "strategy": "strategy=clustered"}.get(
        key.split(".")[0] if "." in key else "", ""
    )
    for given_override in (override, f"{key}=x,{old}", f"{key}={old},x"):
        with pytest.raises(InputError, match=f"^{override} is now "):
            validate_names([*filter(None, [method]), given_override])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["updates.min_updates=2"], "updates.min_updates is now aggregation.min_updates"),
        (["stop_when.patience=2"], "stop_when.patience is now early_stopping.patience"),
        (["secure.threshold=0.6"], "secure.threshold is now secure_aggregation.threshold"),
        (["secure=secagg_plus"], "secure is now secure_aggregation"),
        (["aggregation={repeats:3}"], "aggregation.repeats is now aggregation.max_retries"),
        (["method.projector={hidden:3}"], "method.projector.hidden is now method.projector.hidden_dim"),
        (["strategy=fedavg,clustered", "strategy.after=2"], "strategy.after is now strategy.cluster_round"),
        (
            ["method=byol", "method.target=keep"],
            "method.target_init, and its value keep is now persist, copy is now res",
        ),
    ],
)
def test_what_belongs_to_them_is_answered_too(overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        compose(overrides)


@pytest.mark.parametrize("old", VIEW)
def test_every_old_setting_of_a_view_is_answered(old):
    with pytest.raises(
        InputError, match=rf"augmentation\.views\.[*]\.{old} is now augmentation\.views\.[*]\.{VIEW[old]}"
    ):
        compose([f"augmentation.views=[{{{old}:0.5}},{{}}]"]).training.augmentation.instantiate()
    with pytest.raises(InputError, match=rf"view\.{old} is now [\w.]*view\.{VIEW[old]}"):
        compose(["evaluation=fine_tune", f"evaluation.view={{{old}:0.5}}"]).evaluation.protocol.instantiate()


def test_files_of_the_users_own_are_answered(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "strategy").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text("# @package _global_\nupdates:\n  min_updates: 2\n")
    (tmp_path / "strategy/mine.yaml").write_text("_target_: strategies.median.Median\nmetrics: []\n")
    folder = f"hydra.searchpath=['file://{tmp_path}']"
    with pytest.raises(InputError, match="^updates is now aggregation$"):
        compose([folder, "experiment=mine"])
    with pytest.raises(InputError, match=r"^strategy\.metrics is now strategy\.reported_metrics$"):
        compose([folder, "strategy=mine"])


def test_new_names_exist_and_old_ones_do_not():
    known, choices = settings(), {f"{group}={name}" for group, names in config_groups().items() for name in names}
    assert set(SETTINGS.values()) - {"secure_aggregation"} <= known
    assert not known & set(SETTINGS)
    assert "secure" not in config_groups()
    assert "secure_aggregation" in config_groups()
    assert {f"{group}={new}" for group, names in CHOICES.items() for new in names.values()} <= choices
    assert choices.isdisjoint(RENAMED)
    assert set(VALUES) <= known
    for new in known:
        check_renamed(new)
        assert current_key(new) == new


def test_every_old_class_is_in_the_list():
    assert all(any(old.startswith(name) for old in OLD_TARGETS) for name in TARGETS)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rounds=3", "rounds=3"),
        ("updates.repeats=3", "aggregation.max_retries=3"),
        ("updates={min_updates:2,norm_factor:1.5}", "aggregation={min_updates:2,max_norm_ratio:1.5}"),
        ("+stop_when.metric=knn", "+early_stopping.monitor=knn"),
        ("secure=secagg_plus", "secure_aggregation=secagg_plus"),
        ("strategy=loss", "strategy=loss_weighted"),
        ("strategy.rule=loss", "strategy.rule=loss_weighted"),
        ("method.target=copy", "method.target_init=reset"),
        ("experiment=fedu2", "experiment=fedu2/base"),
        ("method.projector.out=8", "method.projector.out_dim=8"),
        (
            "augmentation.views=[{crop_scale:[0.4,1.0],blur:0.5},{}]",
            "augmentation.views=[{crop_scale:[0.4,1.0],blur_prob:0.5},{}]",
        ),
        ("evaluation.view={flip:0.5,pad:null}", "evaluation.view={flip_prob:0.5,pad:null}"),
        ("~evaluation", "~evaluation"),
        ("dataset.path='/a={b'", "dataset.path='/a={b'"),
        ("strategy", "strategy"),
        ("", ""),
    ],
)
def test_saved_overrides_have_the_new_names(old, new):
    assert update_override(old) == new
    assert update_override(new) == new


def test_saved_settings_have_the_new_names():
    old = {
        "stop_when": {"metric": "knn", "patience": 3},
        "method": {"target": "keep", "projector": {"hidden": 2, "_target_": "fedssl.heads.MLP"}},
        "strategy": {"_target_": "strategies.loss.Loss", "metrics": ["seconds"]},
        "augmentation": {"views": [{"flip": 0.5}, {}]},
        "final_evaluation": {"protocols": {"fine_tune": {"view": {"flip": 0.5}}}},
    }
    assert update(old) == {
        "early_stopping": {"monitor": "knn", "patience": 3},
        "method": {"target_init": "persist", "projector": {"hidden_dim": 2, "_target_": "fedssl.methods.heads.MLP"}},
        "strategy": {"_target_": "strategies.loss.LossWeighted", "reported_metrics": ["seconds"]},
        "augmentation": {"views": [{"flip_prob": 0.5}, {}]},
        "final_evaluation": {"protocols": {"fine_tune": {"view": {"flip_prob": 0.5}}}},
    }


@given(st.text())
def test_any_saved_override_can_be_converted(text):
    assert isinstance(update_override(text), str)
