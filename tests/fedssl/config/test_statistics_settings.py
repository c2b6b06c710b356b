"""The request of the clients' statistics: a word in the settings, which become numbers."""

import pytest
from omegaconf import OmegaConf

from fedssl.config.statistics_settings import StatisticsSettings, measured_keys, request_statistics, without_requests
from fedssl.errors import InputError


def config_of(*, mean, std, channels=3):
    return OmegaConf.create(
        {"dataset": {"mean": mean, "std": std, "channels": channels}, "statistics": {"measured": None}}
    )


@pytest.mark.parametrize(("mean", "std"), [("federated", [0.2]), ([0.5], "federated"), ("federated", "federated")])
def test_either_word_requests_both(mean, std):
    config = config_of(mean=mean, std=std)
    request_statistics(config, explicit=["dataset.size"])
    assert (config.dataset.mean, config.dataset.std) == ([0.0] * 3, [1.0] * 3)  # which change no pixel
    assert config.statistics.measured == {}


def test_numbers_request_nothing():
    config = config_of(mean=[0.5], std=[0.2])
    request_statistics(config, explicit=["dataset.mean", "dataset.std"])
    assert config == config_of(mean=[0.5], std=[0.2])


def test_a_word_beside_explicit_numbers_is_refused():
    message = (
        r"^dataset\.mean=federated measures mean and .*, but dataset\.std is set to \[0\.2\]; leave dataset\.std out"
    )
    with pytest.raises(InputError, match=message):
        request_statistics(config_of(mean="federated", std=[0.2]), explicit=["dataset.std"])


def test_invalid_channels_are_left_to_their_own_check():
    config = config_of(mean="federated", std=[0.2], channels="x")
    request_statistics(config, explicit=[])
    assert config.dataset.mean == [0.0]


def test_a_resumed_run_keeps_what_was_measured():
    words = ["rounds=3", "dataset.mean=federated", "dataset.std=[1]"]
    assert without_requests(words) == [words[0], words[2]]
    keys = ("dataset.mean", "dataset.std", "augmentation.mean", "augmentation.std", "statistics.measured")
    assert measured_keys({"statistics": {"measured": {"clients": 3}}}) == keys
    for saved in (None, {}, {"statistics": None}, {"statistics": {"measured": None}}, {"statistics": {"measured": {}}}):
        assert measured_keys(saved) == ()


@pytest.mark.parametrize(("measured", "missing"), [(None, False), ({}, True), ({"clients": 1}, False)])
def test_statistics_are_missing_until_they_are_measured(measured, missing):
    assert StatisticsSettings(max_clients=None, measured=measured).are_missing == missing
