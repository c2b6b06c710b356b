"""Files of a device: keys that Flower does not accept, and paths that its configuration must quote."""

import subprocess

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flwr.common.config import parse_config_args

from fedssl.fleet.device_files import device_key, read_environment, write_files
from fedssl.fleet.keys import new_private_key
from fedssl.fleet.kit import make_kit, write_kit

RSA = rsa.generate_private_key(65537, 1024)
WITH_PASSPHRASE = b"""-----BEGIN OPENSSH PRIVATE KEY-----
b3BlbnNzaC1rZXktdjEAAAAACmFlczI1Ni1jdHIAAAAGYmNyeXB0AAAAGAAAABCI
Ph4UM0E582GmhWM6QxecAAAAEAAAAAEAAABoAAAAE2VjZHNhLXNoYTItbmlzdHAy
NTYAAAAIbmlzdHAyNTYAAABBBCbzMIsEJjWCUiT3ngsiukp+LWjTd7xuHe41OoVk
3oARgyTcvEw2eWlFZ2vVA8AEftZUG/Kozu3B893kptIf5SkAAACgbKuKTRmqf6aK
biVwsEYnMRorLznUQf2aqh4gXt1SV4kZI2s9BIRU6ttOB0YaciTPIkQp2M807VLb
tr7znnNllzkuOUM/w2MEiKsJ7h3/w5L5d+fbe/O1O3z8zXhPRSTpG3ouffGn/Gyx
HEndbcXTCXwYmEKPUSC1dpyIp8235PKrohve98NZTywURcMVlNFvXs9hoIU1Wa12
IrM5ntbJLQ==
-----END OPENSSH PRIVATE KEY-----
"""


def ssh(key):
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


@pytest.fixture
def kit(keys, server):
    return make_kit("garden", server, certificate=keys / "ca.crt", private_key=new_private_key())


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "my device"
    folder.mkdir()
    return folder


@pytest.fixture
def setup(kit, device, images, folder, tmp_path):
    write_kit(kit, tmp_path / "a.kit")
    return lambda: device("setup", tmp_path / "a.kit", f"images={images}", f"folder={folder}")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: b"damaged", "no private key in OpenSSH's format, or a damaged one"),
        (lambda: new_private_key()[:100], "or a damaged one"),
        (lambda: b"", "or a damaged one"),
        (lambda: ssh(RSA), "its key is not an ECDSA key on a NIST curve, which Flower requires"),
        (lambda: ssh(ed25519.Ed25519PrivateKey.generate()), "its key is not an ECDSA key on a NIST curve"),
        (lambda: WITH_PASSPHRASE, "its key has a passphrase"),
        (lambda: new_private_key(), "is another key than that of the kit"),
    ],
)
def test_the_stated_command_replaces_an_unusable_key(setup, kit, folder, make, reason):
    (folder / "node.key").write_bytes(make())
    before = (folder / "node.key").read_bytes()
    status, text = setup()
    assert (status, reason in text) == (2, True), text
    assert [file.name for file in folder.iterdir()] == ["node.key"]  # nothing was written
    command = text.partition("run ")[2].partition(" and repeat the command: ")[0]
    assert command.startswith("mv ")
    subprocess.run(command, shell=True, check=True)
    assert (folder / "node.key.old").read_bytes() == before
    assert device_key(kit, folder) == kit.private_key


@pytest.mark.parametrize(
    "name",
    [
        'say "cheese"',
        "it's",
        "back\\slash\\u0041",
        "a b",
        "Gärten 写真 😀",
        "new\nline",
        "a=b $HOME `x` %h;#",
        "x.toml",
    ],
)
def test_every_path_survives_the_configuration(kit, tmp_path, name):
    """Through the shell (or systemd) and the parser of Flower."""
    folder = tmp_path / name
    write_files(kit, folder, key=kit.private_key, images=folder / "images", states=folder / "states")
    shell = subprocess.run(
        ["bash", "-c", '. "$1"; printf "%s" "$NODE_CONFIG"', "bash", folder / "node.env"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert shell.stdout == read_environment(folder)["NODE_CONFIG"]
    assert "'" not in shell.stdout  # systemd: the text within single quotes
    assert parse_config_args([shell.stdout]) == {
        "data-path": str(folder / "images"),
        "client-name": "garden",
        "state-path": str(folder / "states"),
        "limits": str(folder / "limits.yaml"),
        "authority": str(folder / "ca.crt"),
    }


@pytest.mark.parametrize(
    ("file", "content"),
    [("ca.crt", b"damaged"), ("ca.crt", None), ("device.json", b"{}"), ("node.env", b"X='")],
)
def test_a_damaged_file_is_one_sentence_of_status(setup, device, folder, file, content):
    setup()
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    status, text = device("status", f"folder={folder}")
    assert (status, "run fedssl-device setup again" in text) == (2, True), text
