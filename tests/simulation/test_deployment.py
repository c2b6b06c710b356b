"""``fedssl engine=deployment``: rejections before submission; tests/deploy has real fleets."""

import pytest

from fedssl.config.load import compose, save_run
from fedssl.errors import InputError
from simulation.cli import run
from tests.flower import free_port


def test_the_engine_sets_defaults_for_devices_which_overrides_replace():
    settings = compose(["engine=deployment"])
    assert settings.data.name == "image_folder"
    assert (
        settings.aggregation.min_updates,
        settings.aggregation.max_retries,
        settings.aggregation.max_norm_ratio,
    ) == (2, 3, 10)
    settings = compose(["engine=deployment", "aggregation.min_updates=1", "dataset=cifar10", "engine.address=one:9000"])
    assert (settings.aggregation.min_updates, settings.data.name) == (1, "uoft-cs/cifar10")
    assert (settings.engine.address, settings.engine.root_certificates) == ("one:9000", None)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["engine.address=here"], "engine.address=here is not the address of a SuperLink; set it to HOST:PORT"),
        (
            ["engine.address=fed.example.org:443"],
            "without TLS anybody in between could run code",
        ),
        (["engine.root_certificates=/not/here"], r"engine.root_certificates=/not/here cannot be used \(.*No such file"),
        (["engine.root_certificates={file}"], "cannot be used .*; set it to the file ca.crt of deploy/keys.py"),
        (["method=nothing"], "method=nothing does not exist"),
    ],
)
def test_invalid_settings_are_rejected_before_submission(overrides, sentence, tmp_path):
    (tmp_path / "file").write_text("no certificate")
    with pytest.raises(InputError, match=sentence):
        run(["engine=deployment", *(override.format(file=tmp_path / "file") for override in overrides)])


def test_an_unreachable_superlink_is_reported():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(InputError, match=f"no SuperLink answers at engine.address={address} .*; start it, or set"):
        run(["engine=deployment", f"engine.address={address}"])


@pytest.mark.parametrize("override", ["engine=deployment", "engine.root_certificates=/some/file"])
def test_a_run_folder_cannot_select_the_fleet_that_resumes_it(override, tmp_path):
    settings = compose(["engine=deployment", f"output_dir={tmp_path}"])
    save_run(settings.recording, tmp_path)
    (tmp_path / "overrides.yaml").write_text(f"- {override}\n")
    with pytest.raises(
        InputError, match=f"contains {override}, which points outside the run folder and is accepted only from your own"
    ):
        run([f"resume={tmp_path}"])
