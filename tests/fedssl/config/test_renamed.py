"""Names of earlier versions: every one is answered with the new name, wherever it is written."""

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


def settings():
    """Every setting of every choice, by dotted key; without a choice's group where it is at the top."""
    found = set()
    for file in CONF.rglob("*.yaml"):
        text, (group, *_) = file.read_text(), file.relative_to(CONF).parts
        prefix = "" if file == CONF / "config.yaml" or "@package _global_" in text else f"{group}."
        found |= {prefix + key for key in keys(OmegaConf.load(file))}
    return found


def keys(node, prefix=""):
    for key in node:
        yield f"{prefix}{key}"
        if OmegaConf.is_dict(node) and not OmegaConf.is_missing(node, key):
            value = node._get_node(key)
            if OmegaConf.is_dict(value):
                yield from keys(value, f"{prefix}{key}.")


@pytest.mark.parametrize("old", SETTINGS)
def test_every_old_setting_is_answered(old):
    value = "{}" if old in ("updates", "stop_when") else "1"
    for word in (f"{old}={value}", f"+{old}={value}", f"{old}=1,2"):
        with pytest.raises(InputError, match=f"^{old} is now {SETTINGS[old]}"):
            validate_names([word])
    (typed,) = overrides_of({"overrides": shlex.quote(f"{old}={value}")})  # as in flwr run . --run-config
    with pytest.raises(InputError, match=f"^{old} is now {SETTINGS[old]}"):
        compose([typed])


@pytest.mark.parametrize("word", [word for word in RENAMED if "=" in word])
def test_every_old_choice_and_value_is_answered_also_among_others(word):
    key, _, old = word.partition("=")
    method = {"method": "method=byol", "strategy": "strategy=clustered"}.get(
        key.split(".")[0] if "." in key else "", ""
    )
    for typed in (word, f"{key}=x,{old}", f"{key}={old},x"):
        with pytest.raises(InputError, match=f"^{word} is now "):
            validate_names([*filter(None, [method]), typed])


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


@pytest.mark.parametrize("old", [old for old in TARGETS if not old.endswith(".")])
def test_old_classes_have_new_ones(old):
    with pytest.raises(InputError, match=f"is now {TARGETS[old]}; write that"):
        locate(old)
    assert callable(locate(TARGETS[old]))


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
