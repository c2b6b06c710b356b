"""Devices receive the encoder of the run, verify its signature and digest, and keep the last two."""

import datetime
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fedssl.config.settings import EngineSettings
from fedssl.datasets import folder as image_folder
from fedssl.datasets.raster import pixel_metadata
from fedssl.encoders import conv_small
from fedssl.errors import InputError, RequestRefused
from fedssl.export import load_encoder, save_encoder
from fedssl.fleet import device_cli
from fedssl.fleet.certificates import load_signing_key, sign
from fedssl.fleet.encoders import METRICS, encoder_quality, store_encoder, stored_encoders
from fedssl.fleet.history import read_history
from fedssl.wire.delivery import EncoderDelivery
from server_app.callbacks.delivery import load_signer
from tests.devices import SMALL, Devices, context, run_server_app, write_images
from tests.fleet import DEPLOY


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    for name in ("fleet", "other"):
        command = [sys.executable, DEPLOY / "keys.py", folder / name, "--server", "127.0.0.1"]
        subprocess.run(command, check=True, capture_output=True)
    return folder


def signing(keys):
    return [f"engine.signing_key={keys}/server.key", f"engine.signing_certificate={keys}/server.crt"]


def devices(tmp_path, *configs):
    """Devices a, b and more with these node configurations."""
    return Devices(
        *(
            context(
                data_path=tmp_path / "images" / name,
                client_name=name,
                state_path=tmp_path / "states" / name,
                **config,
            )
            for name, config in zip("abcd", configs, strict=False)
        )
    )


def run(tmp_path, overrides, *configs):
    """Run devices with these node configurations, by default two; return the folders of their states."""
    configs = configs or ({}, {})
    names = "abcd"[: len(configs)]
    for seed, name in enumerate(names):
        write_images(tmp_path / "images" / name, 9, seed=seed)
    overrides = ["engine=deployment", "engine.address=10.0.0.1:1", "engine.root_certificates=x", *SMALL, *overrides]
    overrides += [f"num_clients={len(names)}", f"output_dir={tmp_path / 'run'}"]
    run_server_app(devices(tmp_path, *configs), overrides)
    return [tmp_path / "states" / name for name in names]


def test_every_device_has_the_encoder_of_the_run(tmp_path, keys, monkeypatch, capsys):
    overrides = ["rounds=5", "engine.deliver_every=2", *signing(keys / "fleet")]
    folders = run(tmp_path, overrides, {}, {"authority": keys / "fleet" / "ca.crt"})
    expected = (tmp_path / "run" / "encoder.pt").read_bytes()
    for folder in folders:
        found = stored_encoders(folder)
        assert [fields["round"] for _, fields in found] == [4, 5]  # that of round 2 is deleted
        assert found[-1][0].read_bytes() == expected
        assert [fields["signed"] for _, fields in found] == [folder.name == "b"] * 2  # a has no authority
    encoder = load_encoder(found[-1][0])
    assert encoder(torch.zeros(2, 1, 8, 8)).shape == (2, encoder.feature_dim)

    (tmp_path / "device").mkdir()
    images = tmp_path / "images" / "b"
    device = {"name": "b", "server": "x:1", "images": str(images), "states": str(folders[1]), "versions": {}}
    (tmp_path / "device" / "device.json").write_text(json.dumps(device))
    words = ["encoder", f"folder={tmp_path / 'device'}", f"output={tmp_path / 'mine.pt'}"]
    monkeypatch.setattr("sys.argv", ["fedssl-device", *words])
    assert device_cli.main() == 0
    assert "5      global  yes" in capsys.readouterr().out
    assert (tmp_path / "mine.pt").read_bytes() == expected
    monkeypatch.setattr("sys.argv", ["fedssl-device", "quality", words[1]])
    assert device_cli.main() == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[:3]] == ["round", "4", "5"]
    found[-1][0].write_bytes(b"damaged")
    assert [fields["round"] for _, fields in stored_encoders(folders[1])] == [4]


def own_encoder(**settings):
    return conv_small(**settings)


def test_commands_use_the_folders_that_the_owner_set(tmp_path, monkeypatch, capsys):
    """``node.env`` names the folders of states and of own encoders."""
    settings = {"_target_": f"{__name__}.own_encoder", "channels": 1, "size": 8, "width": 4}
    encoder, file = conv_small(channels=1, size=8, width=4), tmp_path / "encoder.pt"
    save_encoder(file, encoder, settings=settings, mean=[0.5], std=[0.2], metadata={})
    conf, states, device = tmp_path / "conf", tmp_path / "own states", tmp_path / "device"
    for folder in (conf / "encoder", device):
        folder.mkdir(parents=True)
    (conf / "encoder" / "own.yaml").write_text(f"_target_: {settings['_target_']}\n")
    delivery = EncoderDelivery(run_id="r", round=3, model="global", content=file.read_bytes())
    store_encoder(delivery, states, authority=None, folders=[conf])
    about = {"name": "b", "server": "x:1", "versions": {}, "states": str(tmp_path / "unused")}
    about["images"] = str(write_images(tmp_path / "images", 9, seed=0))
    (device / "device.json").write_text(json.dumps(about))
    config = f'state-path="{states}" config-dir="{conf}"'
    (device / "node.env").write_text(f"NODE_CONFIG='{config}'\n")
    for words, shown in ((["quality"], "r        3"), (["encoder", f"output={tmp_path / 'x.onnx'}"], "written to")):
        monkeypatch.setattr("sys.argv", ["fedssl-device", *words, f"folder={device}"])
        assert device_cli.main() == 0
        assert shown in capsys.readouterr().out


@pytest.mark.parametrize("overrides", [[], ["other"]])
def test_a_device_with_an_authority_refuses_other_signatures(tmp_path, keys, capsys, overrides):
    overrides = signing(keys / overrides[0]) if overrides else []
    folders = run(tmp_path, ["rounds=1", *overrides], {}, {"authority": keys / "fleet" / "ca.crt"})
    assert [len(stored_encoders(folder)) for folder in folders] == [1, 0]
    reason = "its signature is not from the server of this fleet" if overrides else "it is not signed"
    output = capsys.readouterr().out
    assert f"device b did not store the encoder: the encoder of round 1 is refused: {reason}" in output
    assert "1 of 2 devices received the encoder of round 1; to send it again when the run has ended: fedssl " in output


def test_the_printed_command_sends_an_encoder_again(tmp_path, keys, capsys):
    configs = [{}, {"authority": keys / "fleet" / "ca.crt"}]
    folders = run(tmp_path, ["rounds=1"], *configs)
    (printed,) = re.findall("to send it again when the run has ended: fedssl (.*)", capsys.readouterr().out)
    run_server_app(devices(tmp_path, *configs), [*shlex.split(printed), *signing(keys / "fleet")])
    assert [fields["round"] for folder in folders for _, fields in stored_encoders(folder)] == [1, 1]
    assert "2 of 2 devices received the encoder of round 1" in capsys.readouterr().out


def test_quality_is_measured_with_the_pixels_of_training(tmp_path, monkeypatch):
    settings = {"_target_": "fedssl.encoders.conv_small", "channels": 1, "size": 8, "width": 4}
    pixels = {"background": 0, "window": None, "percentiles": [5, 95], "dtype": "float32"}
    encoder, file = conv_small(channels=1, size=8, width=4), tmp_path / "encoder.pt"
    save_encoder(file, encoder, settings=settings, mean=[0.5], std=[0.2], metadata=pixel_metadata(pixels))
    read, used = image_folder.read, {}
    monkeypatch.setattr(image_folder, "read", lambda split, **given: used.update(given) or read(split, **given))
    encoder_quality(file, write_images(tmp_path / "images", 4))
    assert {key: used[key] for key in pixels} == pixels


@pytest.mark.heavy
def test_an_encoder_is_converted_to_onnx(tmp_path, monkeypatch, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    folder, target = run(tmp_path, ["rounds=1"])[0], tmp_path / "mine.onnx"
    device = {"name": "a", "server": "x:1", "images": "", "states": str(folder), "versions": {}}
    (tmp_path / "device.json").write_text(json.dumps(device))
    monkeypatch.setattr("sys.argv", ["fedssl-device", "encoder", f"folder={tmp_path}", f"output={target}"])
    assert device_cli.main() == 0
    assert f"written to {target}" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(target)
    images = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    (h,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    encoder = load_encoder(stored_encoders(folder)[-1][0])
    torch.testing.assert_close(torch.from_numpy(h), encoder(encoder.preprocess(images)).detach())


@pytest.mark.heavy
@pytest.mark.parametrize("num_sharing", [2, pytest.param(3, marks=pytest.mark.heavy)])
def test_the_operator_receives_quality_as_a_mean_only(tmp_path, num_sharing):
    (tmp_path / "limits.yaml").write_text("share_quality: true")
    sharing = {"limits": str(tmp_path / "limits.yaml")}
    run(tmp_path, ["rounds=1"], *(num_sharing * [sharing]), *((4 - num_sharing) * [{}]))
    stored = json.loads((tmp_path / "run" / "fleet.json").read_text()).get("quality")
    if num_sharing < 3:
        assert stored is None
        return
    file = tmp_path / "run" / "encoder.pt"
    expected = [encoder_quality(file, tmp_path / "images" / name) for name in "abc"]
    means = {metric: pytest.approx(sum(quality[metric] for quality in expected) / 3) for metric in METRICS}
    assert stored == {**means, "round": 1, "devices": 3}
    assert expected[0] != expected[1]
    events = [event["event"] for event in read_history(tmp_path / "states" / "a")]
    assert events == ["trained", "update sent", "encoder stored", "quality sent"]
    assert "quality sent" not in [event["event"] for event in read_history(tmp_path / "states" / "d")]


def make_delivery(tmp_path, keys):
    folders = run(tmp_path, ["rounds=1"])
    ((file, fields),) = stored_encoders(folders[0])
    unsigned = EncoderDelivery(run_id=fields["run_id"], round=1, model="global", content=file.read_bytes())
    key = load_signing_key(keys / "fleet" / "server.key")
    certificate = (keys / "fleet" / "server.crt").read_bytes()
    return replace(unsigned, signature=sign(unsigned.signed_text, key), certificate=certificate)


def test_what_is_not_exactly_what_was_signed_is_refused(tmp_path, keys):
    good, authority = make_delivery(tmp_path, keys), keys / "fleet" / "ca.crt"
    store_encoder(EncoderDelivery.from_content(good.to_content()), tmp_path / "good", authority=authority)
    assert len(stored_encoders(tmp_path / "good")) == 1
    for changes in ({"round": 2}, {"model": "1"}, {"run_id": "other"}, {"content": good.content + b"x"}):
        with pytest.raises(RequestRefused, match="its signature is not from the server of this fleet"):
            store_encoder(replace(good, **changes), tmp_path / "bad", authority=authority)
    for changes, reason in (({"run_id": "../up"}, "run_id"), ({"content": b"PK\x03\x04 no archive"}, "it is damaged")):
        with pytest.raises(RequestRefused, match=reason) as error:
            store_encoder(replace(good, **changes), tmp_path / "bad", authority=None)
        assert "/tmp" not in str(error.value)
    assert not (tmp_path / "bad").exists()
    for key, value, reason in (("digest", "0" * 64, "digest"), ("round", -1, "round -1"), ("model", 1, "int instead")):
        content = good.to_content()
        content["encoder-config"][key] = value
        with pytest.raises(ValueError, match=reason):
            EncoderDelivery.from_content(content)


def test_the_newest_encoder_is_the_last_delivered(tmp_path, keys, monkeypatch, capsys):
    """A run was set back to round 5, and the clock was ahead before."""
    good, states = make_delivery(tmp_path, keys), tmp_path / "new"
    for run_id, round in (("old", 1), ("run", 8), ("run", 9), ("run", 6)):
        file = store_encoder(replace(good, run_id=run_id, round=round), states, authority=None)
        assert file.exists(), round
        os.utime(file, (2e9 - round, 2e9 - round))
    device = {"name": "a", "server": "x:1", "images": "", "states": str(states), "versions": {}}
    (tmp_path / "device.json").write_text(json.dumps(device))
    monkeypatch.setattr("sys.argv", ["fedssl-device", "encoder", f"folder={tmp_path}"])
    capsys.readouterr()
    assert device_cli.main() == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["old", "1"],
        ["run", "9"],
        ["run", "6"],
    ]
    fields = json.loads(file.with_suffix(".json").read_text())
    del fields["delivery"]
    file.with_suffix(".json").write_text(json.dumps(fields))
    assert stored_encoders(states)[0][0] == file  # of a version without numbers


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["engine.signing_key={keys}/fleet/server.key"], "belong together"),
        (["engine.signing_key=/no", "engine.signing_certificate=/no"], "engine.signing_key=/no cannot be read"),
        (
            ["engine.signing_key={keys}/fleet/server.key", "engine.signing_certificate=/no"],
            "engine.signing_certificate=/no cannot be read",
        ),
        *(
            (
                ["engine.signing_key={keys}/fleet/server.key", f"engine.signing_certificate={{keys}}/{file}"],
                f"{file} {problem}.*; set it to the file server.crt that deploy/keys.py wrote with that key",
            )
            for file, problem in (
                ("fleet/ca.crt", "is not the certificate of engine.signing_key"),
                ("other/server.crt", "is not the certificate of engine.signing_key"),
                ("fleet/server.key", "cannot be read"),
            )
        ),
    ],
)
def test_wrong_keys_are_rejected_before_training(tmp_path, keys, overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        run(tmp_path, [override.format(keys=keys) for override in overrides])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_expired_certificate_is_refused(tmp_path, keys, monkeypatch):
    good = make_delivery(tmp_path, keys)
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=826)  # keys.py: 825 days

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return later

    monkeypatch.setattr(datetime, "datetime", Later)
    pair = {"signing_key": f"{keys}/fleet/server.key", "signing_certificate": f"{keys}/fleet/server.crt"}
    with pytest.raises(
        InputError, match=r"signing_certificate=.*server.crt is valid from .*; create a new certificate"
    ):
        load_signer(EngineSettings(name="deployment", **pair))
    with pytest.raises(RequestRefused, match="the certificate of its signature has expired"):
        store_encoder(good, tmp_path / "bad", authority=keys / "fleet" / "ca.crt")
