"""Messages and settings that go beyond the limits of a device."""

from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import Array, ArrayRecord, RecordDict

from client_app import limit_checks
from fedssl.config.compose import resolve_config
from fedssl.config.typed_settings import client_settings
from fedssl.errors import RequestRefused
from fedssl.fleet.limits import Limits
from fedssl.wire.messages import TrainPlan
from fedssl.wire.wire_format import WEIGHTS


def test_quantized_weights_count_as_they_are_decoded(monkeypatch):
    """600 weights of one byte are decoded to 2,400 bytes; 600 other bytes stay 600."""
    content = RecordDict({"weights": ArrayRecord({WEIGHTS: Array("int8", (600,), "raw", bytes(600))})})
    monkeypatch.setattr(Limits, "memory_bytes", lambda limits: 2400)
    limit_checks.check_message(content, Limits())
    content["scales"] = ArrayRecord({"scales": Array("uint8", (600,), "raw", bytes(600))})
    with pytest.raises(RequestRefused, match="the message brings 0.0 MB of memory but this device allows 0.0 MB"):
        limit_checks.check_message(content, Limits())
    monkeypatch.setattr(Limits, "memory_bytes", lambda limits: 3000)
    limit_checks.check_message(content, Limits())


STEM = "encoder.stem=imagenet and batch_size"


@pytest.mark.parametrize(
    ("overrides", "allowed", "remedy"),
    [
        ([], 250, f"a training step takes about 2.7 GB of memory but this device allows 250 MB; set {STEM}=16"),
        ([], 900, f"this device allows 900 MB; set batch_size=16, or {STEM}=64"),
        (["encoder.stem=imagenet"], 250, "415 MB of memory but this device allows 250 MB; set batch_size=16"),
        ([], 100, "this device allows 100 MB; no batch_size fits; set a smaller encoder or dataset.size"),
    ],
)
def test_a_step_beyond_memory_is_refused_with_fitting_settings(overrides, allowed, remedy, monkeypatch):
    """ResNet-18 with its gradients, moments and a copy takes 185 MB, and an image at 64x64 about 40 MB, or 4 with
    ImageNet's stem."""
    words = ["dataset=folder", "dataset.path=none", "dataset.size=64", "encoder=resnet18", *overrides]
    settings = client_settings(resolve_config(words)[0], states=Path(), partition=None)
    monkeypatch.setattr(Limits, "memory_bytes", lambda limits: allowed * 10**6)
    with pytest.raises(RequestRefused) as refused:
        limit_checks.check_settings(settings, Limits(), num_images=100)
    assert str(refused.value).endswith(remedy)
    for part in remedy.partition("set ")[2].split(", or "):  # what is proposed is accepted
        if "=" in part:
            settings = client_settings(resolve_config([*words, *part.split(" and ")])[0], states=Path(), partition=None)
            limit_checks.check_settings(settings, Limits(), num_images=100)


@pytest.mark.parametrize("round", [-1, 3, 9])
def test_a_used_update_is_of_an_earlier_round(round):
    plan = TrainPlan(
        round=3,
        layers={},
        settings="",
        metrics=(),
        oldest_resumable_round=0,
        code_fingerprint="",
        last_used_round=round,
    )
    with pytest.raises(RequestRefused, match=rf"last-used-round={round} of the plan is not from 0 to 2"):
        limit_checks.check_plan(plan)
    limit_checks.check_plan(replace(plan, last_used_round=2))
