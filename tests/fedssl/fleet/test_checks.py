"""Checks of a device: of the disk with the states, and of a server without a SuperLink."""

from types import SimpleNamespace

import pytest

from fedssl.fleet import checks
from fedssl.fleet.kit import make_kit, write_kit
from tests.devices import write_images
from tests.fedssl.fleet.conftest import Answer


@pytest.fixture
def setup(device, keys, images, server, environment, tmp_path):
    write_kit(make_kit("garden", server, certificate=keys / "ca.crt"), tmp_path / "a.kit")
    return lambda *more: device("setup", tmp_path / "a.kit", f"images={images}", f"folder={tmp_path / 'device'}", *more)


def test_the_disk_of_the_states_is_checked(setup, device, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    free = {tmp_path: 10**10, tmp_path / "disk": 10**8, tmp_path / "device": 10**10}
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder]))
    states = tmp_path / "disk" / "states"
    status, text = setup(f"states={states}")
    assert (status, f"disk        FAILED  100 MB free in {states}" in text) == (1, True), text
    free[tmp_path / "disk"] = 10**10
    assert setup(f"states={states}")[0] == 0
    free[tmp_path / "disk"] = 10**8
    status, text = device("status", f"folder={tmp_path / 'device'}")
    assert (status, f"FAILED  100 MB free in {states}" in text) == (1, True), text


def test_a_sample_of_many_images_is_checked(tmp_path):
    assert checks._check_images(write_images(tmp_path / "few", 39)).result == f"39 in {tmp_path / 'few'}"
    text = f"45 in {tmp_path / 'many'}, of which 23 were checked"
    assert checks._check_images(write_images(tmp_path / "many", 45)).result == text


@pytest.mark.parametrize(("answer", "passed"), [(404, True), (500, False), (502, False)])
def test_a_server_without_a_superlink_fails(setup, monkeypatch, answer, passed):
    monkeypatch.setattr(Answer, "status", answer)
    status, text = setup()
    sentence = f"answers with status {answer}: its SuperLink does not run; ask the operator to start it"
    assert (status == 0, sentence not in text) == (passed, passed), text
