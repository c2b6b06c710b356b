"""Files of a device: keys that Flower does not accept, and paths that its configuration must quote."""

import subprocess

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fedssl.fleet.device_files import device_key
from fedssl.fleet.kit import make_kit, new_private_key, write_kit

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


def test_a_folder_keeps_the_device_that_it_has(setup, kit, keys, device, images, folder, tmp_path):
    setup()
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    write_kit(make_kit("roof", kit.server, certificate=keys / "ca.crt"), tmp_path / "roof.kit")
    arguments = ("setup", tmp_path / "roof.kit", f"images={images}", f"folder={folder}")
    status, text = device(*arguments)
    assert (status, f"{folder} is of the device garden; give another folder= for roof, or, if" in text) == (2, True)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    (folder / "garden.pub").unlink()
    assert device(*arguments)[0] == 0


@pytest.mark.parametrize(
    ("file", "content"), [("ca.crt", b"damaged"), ("ca.crt", None), ("device.json", b"{}"), ("node.env", b"X='")]
)
def test_a_damaged_file_is_one_sentence_of_status(setup, device, folder, file, content):
    setup()
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    status, text = device("status", f"folder={folder}")
    assert (status, "run fedssl-device setup again" in text) == (2, True), text
