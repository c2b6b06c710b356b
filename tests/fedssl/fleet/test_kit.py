"""Startup kits of others: used, or rejected in one sentence; nothing blocks, and nothing invalid is stored."""

import io
import json
import zipfile

import pytest

from fedssl.errors import InputError
from fedssl.fleet.kit import make_kit, new_private_key, read_kit, write_kit


@pytest.fixture
def kit(keys):
    return make_kit("garden", "fed.example.org:443", certificate=keys / "ca.crt", private_key=new_private_key())


def archive(file, kit, *, fields=None, **contents):
    """Write a kit with other fields of ``kit.json`` or contents, with _ for . in names; None is left out."""
    write_kit(kit, file.with_suffix(".valid"))
    with zipfile.ZipFile(file.with_suffix(".valid")) as valid:
        found = {name: valid.read(name) for name in valid.namelist()}
    found["kit.json"] = json.dumps(json.loads(found["kit.json"]) | (fields or {})).encode()
    found |= {name.replace("_", "."): content for name, content in contents.items()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as changed:
        for name, content in found.items():
            if content is not None:
                changed.writestr(name, content)
    return file


def test_what_other_programs_add_is_accepted(kit, tmp_path):
    """Windows line ends, a byte order mark, and new keys and files, which are not read."""
    text = json.dumps(
        {"name": kit.name, "server": kit.server, "versions": dict(kit.versions), "comment": [1]}, indent=1
    )
    changed = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
    certificate = b"\xef\xbb\xbf" + kit.certificate.replace(b"\n", b"\r\n")
    file = archive(tmp_path / "a.kit", kit, kit_json=changed, ca_crt=certificate, zeros=bytes(2**21))
    assert read_kit(file) == kit


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fields": {"server": "fed example.org:443"}}, "its host is neither a DNS name nor an IP address"),
        ({"fields": {"server": "fed.example.org:443\nLD_PRELOAD=/x"}}, "its port is not a number from 1 to 65535"),
        ({"fields": {"server": None}}, "it has no port"),
        ({"fields": {"name": "../x"}}, "is not a valid client name"),
        ({"fields": {"versions": 3}}, "TypeError"),
        ({"kit_json": b"{"}, "JSONDecodeError"),
        ({"kit_json": b"[]"}, "TypeError"),
        ({"kit_json": b"[" * 100_000}, "RecursionError"),
        ({"kit_json": None}, "it has no kit.json"),
        ({"ca_crt": None}, "it has no ca.crt"),
        ({"ca_crt": b"no certificate"}, "it contains no certificate in PEM format"),
        ({"ca_crt": bytes(2**21)}, "its ca.crt is too large"),
        ({"node_key": b"damaged"}, "it has no private key in OpenSSH's format, or a damaged one"),
    ],
)
def test_invalid_contents(kit, tmp_path, change, reason):
    file = archive(tmp_path / "a.kit", kit, **change)
    with pytest.raises(InputError) as refused:
        read_kit(file)
    assert str(refused.value).startswith(f"{file} is not a startup kit (")
    assert reason in str(refused.value)
    assert str(refused.value).endswith("); ask the operator for another one")


def test_a_truncated_kit(kit, tmp_path):
    write_kit(kit, tmp_path / "a.kit")
    content = (tmp_path / "a.kit").read_bytes()
    for damaged in (content[:200], content.replace(b"server", b"servus", 1), io.BytesIO().getvalue()):
        (tmp_path / "a.kit").write_bytes(damaged)
        with pytest.raises(InputError, match="is not a startup kit"):
            read_kit(tmp_path / "a.kit")
