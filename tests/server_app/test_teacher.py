"""The teacher's file: read into the method, or refused in one sentence before any work."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from fedssl.config.load import compose
from fedssl.datasets.raster import pixel_metadata
from fedssl.errors import InputError
from fedssl.export import read_content, save_encoder
from fedssl.methods.base import build_method
from fedssl.rules import check_rules
from server_app.build import make_lr_schedule
from server_app.initial_weights import RUN_RULES, SETTINGS_RULES, load_teacher
from tests.federation import Federation

WORDS = ["method=fedca", "encoder.width=4", "method.alignment_weight=0.1"]


def save(folder, *overrides):
    settings = compose(["encoder.width=4", "seed=3", *overrides])
    file, encoder, data = folder / "encoder.pt", build_method(settings.model).encoder, settings.data
    save_encoder(file, encoder, settings=settings.model.encoder.values, mean=data.mean, std=data.std, metadata={})
    return file, encoder


def give(*overrides):
    settings = compose([*WORDS, *overrides])
    check_rules(SETTINGS_RULES, settings)
    method = build_method(settings.model)
    make_lr_schedule(settings, method)
    check_rules(RUN_RULES, SimpleNamespace(method=method, settings=settings))
    load_teacher(method, settings)
    return method


def test_the_weights_of_the_file_become_the_teachers(tmp_path, caplog):
    file, encoder = save(tmp_path)
    with caplog.at_level(logging.WARNING):
        method = give(f"teacher={file}")
    for name, value in encoder.state_dict().items():
        assert torch.equal(method.named_tensors[f"teacher.{name}"], value), name
    assert not torch.equal(method.encoder.state_dict()[name], value) or not value.is_floating_point()
    assert not caplog.records


def test_a_path_is_that_of_where_the_command_was_given(tmp_path, monkeypatch):
    file, _ = save(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert compose([*WORDS, "teacher=encoder.pt"]).teacher == file
    assert "encoder.pt" not in compose([*WORDS, "teacher=encoder.pt"]).client_yaml


def test_other_images_are_told(tmp_path, caplog):
    file, _ = save(tmp_path, "dataset.mean=[0.25]")
    with caplog.at_level(logging.WARNING):
        give(f"teacher={file}", "dataset.mean=[0.5]")
    assert "trained with other preprocessing: dataset.mean=[0.5] (there [0.25])" in caplog.text


@pytest.mark.parametrize("words", [WORDS, ["method=distillation", "encoder.width=4"]], ids=["fedca", "distillation"])
def test_other_pixels_are_told(words, tmp_path, caplog):
    file, encoder = save(tmp_path)
    content = read_content(file)
    about = pixel_metadata({"window": [0, 4095]})
    save_encoder(file, encoder, settings=content["encoder"], mean=[0.25], std=[0.25], metadata=about)
    data = ["dataset=folder", "dataset.path=none", "dataset.channels=1", "dataset.size=8"]
    settings = compose([*words, *data, f"teacher={file}"])
    with caplog.at_level(logging.WARNING):
        load_teacher(build_method(settings.model), settings)
    assert "dataset.window=None (there [0, 4095])" in caplog.text


def test_other_attention_heads_are_refused(tmp_path):
    """No tensor depends on their number, but the outputs do."""
    vit = ["encoder=vit_tiny", "encoder.patch=4", "encoder.depth=1", "encoder.width=24"]
    settings = compose([*vit, "encoder.heads=3"])
    file, encoder = tmp_path / "vit.pt", build_method(settings.model).encoder
    save_encoder(file, encoder, settings=settings.model.encoder.values, mean=[0.5], std=[0.5], metadata={})
    words = ["method=fedca", "method.alignment_weight=0.1", *vit]
    for heads, error in (
        (3, nullcontext()),
        (6, pytest.raises(InputError, match=r"encoder\.heads=6 \(there 3\); give")),
    ):
        settings = compose([*words, f"encoder.heads={heads}", f"teacher={file}"])
        with error:
            load_teacher(build_method(settings.model), settings)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([], "teacher=null but FedCA needs a teacher; give teacher=FILE"),
        (["teacher=/nowhere/encoder.pt"], "/nowhere/encoder.pt does not exist"),
        (["teacher=5"], "5 does not exist"),
        (["teacher={file}", "method.alignment_weight=0"], "FedCA uses no teacher; set method=fedca method"),
        (["teacher={file}", "method.alignment_weight=0", "encoder.width=8"], "FedCA uses no teacher"),
        (["teacher={file}", "encoder.width=8"], "holds another encoder than this run's"),
        (
            ["teacher={file}", "schedule=layer_wise", "rounds=5"],
            "the schedule or the tuning trains parts of the encoder but the teacher",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, overrides, sentence):
    file, _ = save(tmp_path)
    with pytest.raises(InputError, match=sentence):
        give(*(word.format(file=file) for word in overrides))


def test_what_hides_updates_refuses_a_dictionary_and_takes_a_teacher(tmp_path):
    overrides = ["method=fedca", "strategy=fedavg", "strategy.weighting=uniform"]
    overrides += ["secure_aggregation=secagg_plus", "secure_aggregation.dropout_fraction=0"]
    with pytest.raises(InputError, match="does not cover the parts that FedCA uploads"):
        Federation(tmp_path, *overrides)
    file, _ = save(tmp_path)
    overrides += ["method.sent_per_round=0", "method.alignment_weight=0.1", f"teacher={file}"]
    Federation(tmp_path, *overrides)


def test_a_missing_teacher_is_refused_before_images_are_loaded(tmp_path, monkeypatch):
    def load(*args, **options):
        pytest.fail("images were loaded")

    for name in ("server_app.build.load_federated", "fedssl.evaluation.protocol.load_split"):
        monkeypatch.setattr(name, load)
    with pytest.raises(InputError, match="/nowhere/encoder.pt does not exist"):
        Federation(tmp_path, *WORDS, "teacher=/nowhere/encoder.pt")
