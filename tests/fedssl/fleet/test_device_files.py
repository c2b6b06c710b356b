"""Files of a device: keys that Flower does not accept, and a configuration that keeps the entries of its owner."""

import re
import subprocess

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flwr.common.config import parse_config_args

from fedssl.fleet.device_files import command, device_key, read_device, read_environment
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
    return lambda *more: device("setup", tmp_path / "a.kit", f"images={images}", f"folder={folder}", *more)


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
    move = text.partition("run ")[2].partition(" and repeat the command: ")[0]
    assert move.startswith("mv ")
    subprocess.run(move, shell=True, check=True)
    assert (folder / "node.key.old").read_bytes() == before
    assert device_key(kit, folder) == kit.private_key


def node_config(folder):
    """What Flower reads."""
    return parse_config_args([read_environment(folder)["NODE_CONFIG"]])


def add_entries(folder, entries):
    file = folder / "node.env"
    file.write_text(file.read_text().replace("NODE_CONFIG='", f"NODE_CONFIG='{entries} "))


def test_the_status_reads_the_limits_of_the_owner(setup, device, folder, tmp_path):
    assert "quality of encoders" not in setup()[1]
    (tmp_path / "own.yaml").write_text("share_quality: true\nmax_rounds_per_day: 3\n")
    file = folder / "node.env"
    file.write_text(file.read_text().replace(str(folder / "limits.yaml"), str(tmp_path / "own.yaml")))
    for _, text in (device("status", f"folder={folder}"), setup(), device("status", f"folder={folder}")):
        assert "and the quality of encoders (share_quality)" in text
    assert "In the last 24 hours: 0 of 3 rounds" in device("status", f"folder={folder}")[1]


def test_the_status_checks_what_the_supernode_uses(setup, device, folder, images, server, tmp_path):
    setup()
    file = folder / "node.env"
    text = file.read_text()
    file.write_text(text.replace(str(images), str(tmp_path / "unmounted")))
    status, found = device("status", f"folder={folder}")
    assert (status, f"{tmp_path / 'unmounted'} is not a folder" in found) == (1, True), found
    file.write_text(text.replace(server, "127.0.0.1:1"))
    status, found = device("status", f"folder={folder}")
    assert (status, "127.0.0.1:1" in found) == (1, True), found


def test_a_repeated_setup_keeps_what_the_owner_added(setup, folder, tmp_path):
    assert "kept" not in setup()[1]
    default = node_config(folder)
    assert "kept" not in setup()[1]
    own = {"secure-aggregation-only": True, "max-rank": 4, "config-dir": "/my conf/ä\u0022b"}
    add_entries(folder, 'secure-aggregation-only=true max-rank=4 config-dir="/my conf/ä\\u0022b"')
    status, text = setup(f"states={tmp_path / 'disk'}")
    assert status == 0
    kept = 'secure-aggregation-only=true max-rank=4 config-dir="/my conf/ä\\u0022b"\n'
    assert f"kept from {folder / 'node.env'}: {kept}" in text
    assert node_config(folder) == default | own | {"state-path": str(tmp_path / "disk")}
    assert f'kept from {folder / "node.env"}: state-path="{tmp_path / "disk"}" secure' in setup()[1]
    assert read_device(folder)["states"] == node_config(folder)["state-path"] == str(tmp_path / "disk")
    assert setup(f"states={folder / 'states'}")[0] == 0  # the command line wins
    assert node_config(folder) == default | own


def test_a_repeated_setup_keeps_other_variables_of_the_owner(setup, folder):
    setup()
    before = read_environment(folder)
    with (folder / "node.env").open("a") as file:
        file.write("OMP_NUM_THREADS=2\nTMPDIR='/my disk'\n")
    assert setup()[0] == 0
    assert read_environment(folder) == before | {"OMP_NUM_THREADS": "2", "TMPDIR": "/my disk"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("NODE_CONFIG='max-rank=4", "is damaged (No closing quotation)"),
        ("NODE_CONFIG='max-rank=4 secure'", "has a NODE_CONFIG that is not valid (Expected '='"),
        ("NODE_CONFIG=data-path=/x", "has a NODE_CONFIG that is not valid (Invalid value"),
        ("NODE_CONFIG='max-rank=[4]'", "(a value is neither text nor a number, true or false)"),
    ],
)
def test_the_stated_command_replaces_a_damaged_configuration(setup, folder, content, reason):
    (folder / "node.env").write_text(content)
    status, text = setup()
    assert (status, reason in text) == (2, True), text
    assert (folder / "node.env").read_text() == content
    move = text.partition("correct it, or run ")[2].partition(", then run fedssl-device setup again")[0]
    subprocess.run(move, shell=True, check=True)
    assert setup()[0] == 0


def test_the_command_has_quotes_around_ipv6_addresses(setup, folder):
    setup()
    file = folder / "node.env"
    file.write_text(re.sub("SUPERLINK=.*", "SUPERLINK='[2001:db8::1]:443'", file.read_text()))
    assert "--superlink '[2001:db8::1]:443' --root-" in command(folder)  # a pattern in zsh


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
