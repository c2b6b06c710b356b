"""Keys and certificates, and the consistency of units, containers and nginx."""

import re
import shlex
import ssl
import stat
import subprocess
import sys

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from tests.fleet import DEPLOY


def keys(folder, *arguments):
    ran = subprocess.run([sys.executable, DEPLOY / "keys.py", folder, *arguments], capture_output=True, text=True)
    return ran.returncode, ran.stdout + ran.stderr


def contents(folder):
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture
def made(tmp_path):
    folder = tmp_path / "keys"
    assert keys(folder, "--server", "fed.example.org", "203.0.113.7", "--nodes", "garden")[0] == 0
    return folder


def test_keys_are_private_and_certificates_hold(made):
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in contents(made)}
    assert modes == dict.fromkeys(("ca.key", "server.key", "garden.key"), 0o600) | dict.fromkeys(
        ("ca.crt", "server.crt", "garden.pub"), 0o644
    )
    ca, server = (x509.load_pem_x509_certificate((made / f"{name}.crt").read_bytes()) for name in ("ca", "server"))
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["203.0.113.7", "127.0.0.1"]
    key = load_ssh_private_key((made / "nodes" / "garden.key").read_bytes(), password=None)
    public = (made / "nodes" / "garden.pub").read_bytes()
    assert load_ssh_public_key(public) == key.public_key()
    assert public.endswith(b" garden\n")


def test_python_itself_trusts_the_certificate_strictly(made):
    # Required by Python 3.13 by default: the extensions of RFC 5280.
    purposes = ssl.Purpose.SERVER_AUTH, ssl.Purpose.CLIENT_AUTH
    client, server = map(ssl.create_default_context, purposes)
    client.load_verify_locations(made / "ca.crt")
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    server.load_cert_chain(made / "server.crt", made / "server.key")
    one, other = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(one, other, server_hostname="fed.example.org")]
    ends += [server.wrap_bio(other, one, server_side=True)]
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert ends[0].getpeercert()["subject"] == ((("commonName", "fed.example.org"),),)


@pytest.mark.parametrize(
    ("gone", "arguments", "sentence"),
    [
        (None, ["--server", "other.org"], "server.crt has other names than other.org, localhost, 127.0.0.1"),
        (
            None,
            ["--server", "https://fed.example.org"],
            "https://fed.example.org is neither a DNS name nor an IP address",
        ),
        (
            None,
            ["--server", "fed.example.org:443"],
            "fed.example.org:443 is neither a DNS name nor an IP address; leave",
        ),
        (None, ["--server", "203.0.113"], "203.0.113 is neither a DNS name nor an IP address"),
        (None, ["--nodes", "../x"], "node '../x' cannot name a file; use letters, digits"),
        ("ca.key", ["--nodes", "roof"], "ca.crt exists but"),
        ("nodes/garden.key", ["--nodes", "garden"], "garden.pub exists but"),
    ],
)
def test_no_file_is_replaced_silently(made, gone, arguments, sentence):
    if gone:
        (made / gone).unlink()
    before = contents(made)
    status, output = keys(made, *arguments)
    assert status == 1
    assert sentence in output
    assert contents(made) == before


@pytest.mark.parametrize("changed", [("ca.key", "ca.crt"), ("server.key",)])
def test_certificates_of_other_keys_are_not_kept(made, tmp_path, changed):
    other = tmp_path / "other"
    assert keys(other, "--server", "fed.example.org", "203.0.113.7")[0] == 0
    for name in changed:
        (other / name).replace(made / name)
    status, output = keys(made, "--server", "fed.example.org", "203.0.113.7")
    assert status == 1
    assert "server.crt belongs to another key or authority; move it away" in output
    (made / "server.crt").unlink()
    assert keys(made, "--server", "fed.example.org", "203.0.113.7")[0] == 0


def test_units_and_containers_start_the_same_superlink():
    unit = (DEPLOY / "systemd" / "fedssl-superlink.service").read_text().replace("\\\n", " ")
    [line] = re.findall(r"^ExecStart=\S+/(.*)$", unit, flags=re.MULTILINE)
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert shlex.split(line) == shlex.split(services["superlink"]["command"])
    assert "--host 127.0.0.1" in line
    assert services["nginx"]["network_mode"] == "service:superlink"
    assert services["superlink"]["ports"] == ["443:443"]  # nginx's
    unit = (DEPLOY / "systemd" / "fedssl-supernode.service").read_text().replace("\\\n", " ")
    [line] = re.findall(r"^ExecStart=\S+/(.*)$", unit, flags=re.MULTILINE)
    command = " ".join(argument.replace("=", " ", 1) for argument in services["node"]["command"])
    assert sorted(line.split()) == sorted(re.sub(r":-\}", "}", command).split())


def test_nginx_exposes_only_the_fleet_api():
    text = (DEPLOY / "nginx.conf").read_text()
    blocks = dict(re.findall(r"location (\S+) \{(.*?)\n    \}", text, flags=re.DOTALL))
    assert list(blocks) == ["/v1/fleet/", "/"]
    assert blocks["/"].split() == ["return", "403;"]
    assert text.count("proxy_pass") == 1
    assert re.findall(r"listen (\S+) ssl;", text) == ["443", "[::]:443"]


def test_names_may_have_another_order_and_keys_no_passphrase(made):
    assert keys(made, "--server", "203.0.113.7", "fed.example.org")[0] == 0
    status, text = keys(made, "--server", "fed.example.org", "other.org")
    assert (status, "has other names than fed.example.org, other.org, localhost, 127.0.0.1;" in text) == (1, True)
    locked = ["openssl", "pkey", "-in", made / "ca.key", "-aes128", "-passout", "pass:abcd", "-out", made / "new"]
    subprocess.run(locked, check=True)
    (made / "new").rename(made / "ca.key")
    status, text = keys(made, "--server", "fed.example.org", "203.0.113.7")
    assert (status, f"ca.key has a passphrase; remove it with openssl pkey -in {made}/ca.key" in text) == (1, True)
