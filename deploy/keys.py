"""Keys and certificates of a fleet: an authority, a certificate of the server, a key pair for every node.

    python deploy/keys.py keys --server fed.example.org 203.0.113.7 --nodes garden roof shed

writes into the folder ``keys``

=========================  ==========================================================================================
``ca.key``                 the authority's key: keep it off the server and the devices
``ca.crt``                 the authority's certificate: every device has it, and whoever submits runs
``server.key``, ``.crt``   the server's; for the names and addresses given, and for localhost
``nodes/NAME.key``         the key of a node: on that device only
``nodes/NAME.pub``         its other half, which is registered with the SuperLink
=========================  ==========================================================================================

What is there stays, and what is missing is made: move ``server.crt`` away and run the command again, and there is a new
certificate for the same key. Files of keys have the mode 600. Needs nothing but what Flower needs itself.
"""

import argparse
import datetime
import ipaddress
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_DAYS, SERVER_DAYS = 3650, 825  # of validity
LOCAL = ("localhost", "127.0.0.1")  # nginx and the operator reach the SuperLink on its own machine


def main() -> None:
    """Make what is missing, and say what there is."""
    parser = argparse.ArgumentParser(description="Keys and certificates of a fleet; what is there stays.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--server", nargs="+", default=[], metavar="NAME", help="names and addresses of the server")
    parser.add_argument("--nodes", nargs="+", default=[], metavar="NAME", help="names of devices")
    given = parser.parse_args()
    try:
        for line in make_all(given.folder, server=given.server, nodes=given.nodes):
            print(line)
    except (OSError, ValueError) as error:
        sys.exit(f"keys.py: {error}")


def make_all(folder: Path, *, server: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """Make what is missing of all files; returns a line for each that was made or kept.

    Raises
    ------
    ValueError
        A name cannot be that of a node, the server has a certificate for other names, or a key has gone.
    """
    for name in nodes:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            raise ValueError(f"node {name!r} cannot name a file; use letters, digits, _, - and .")
    nodes_folder = folder / "nodes"
    nodes_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    said: list[str] = []
    ca_key = _key(folder / "ca.key", said)
    ca = _certificate(folder / "ca.crt", said, names=["fedssl"], key=ca_key, signed_by=None)
    if server:
        key = _key(folder / "server.key", said)
        _certificate(folder / "server.crt", said, names=[*server, *LOCAL], key=key, signed_by=(ca, ca_key))
    for name in nodes:
        public = _key(nodes_folder / f"{name}.key", said, ssh=True).public_key()
        line = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" {name}\n".encode()
        _write(nodes_folder / f"{name}.pub", line, said, mode=0o644)
    return said


def _key(file: Path, said: list[str], *, ssh: bool = False) -> EllipticCurvePrivateKey:
    """The key in the file, made if there is none; Flower takes those of nodes in the form of OpenSSH."""
    form, other = (PrivateFormat.OpenSSH, ".pub") if ssh else (PrivateFormat.PKCS8, ".crt")
    if not file.exists():
        half = file.with_suffix(other)
        if half.exists():
            raise ValueError(f"{half} is there but {file} is not; bring it back, or move {half} away too")
        new = generate_private_key(SECP384R1())
        _write(file, new.private_bytes(Encoding.PEM, form, NoEncryption()), said, mode=0o600)
    else:
        said.append(f"kept {file}")
    key = (load_ssh_private_key if ssh else load_pem_private_key)(file.read_bytes(), password=None)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ValueError(f"{file} holds no elliptic-curve key; move it away")
    return key


def _certificate(
    file: Path,
    said: list[str],
    *,
    names: Sequence[str],
    key: EllipticCurvePrivateKey,
    signed_by: tuple[x509.Certificate, EllipticCurvePrivateKey] | None,
) -> x509.Certificate:
    """The certificate in the file, made if there is none; of the authority itself without a signer."""
    alternatives = x509.SubjectAlternativeName([_general_name(name) for name in dict.fromkeys(names)])
    if file.exists():
        found = x509.load_pem_x509_certificate(file.read_bytes())
        if signed_by and found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value != alternatives:
            raise ValueError(f"{file} is for other names than {', '.join(names)}; move it away to have a new one made")
        said.append(f"kept {file}, valid until {found.not_valid_after_utc:%Y-%m-%d}")
        return found
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    issuer, signer = (signed_by[0].subject, signed_by[1]) if signed_by else (own, key)
    now = datetime.datetime.now(datetime.UTC)
    lasts = datetime.timedelta(days=SERVER_DAYS if signed_by else CA_DAYS)
    may_sign = signed_by is None
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    builder = (
        x509.CertificateBuilder(issuer, own, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of devices are not always right
        .not_valid_after(now + lasts)
        .add_extension(x509.BasicConstraints(ca=may_sign, path_length=0 if may_sign else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(
            x509.KeyUsage(
                **usage,
                digital_signature=not may_sign,
                key_cert_sign=may_sign,
                crl_sign=may_sign,
                decipher_only=False,
            ),
            critical=True,
        )
    )
    if signed_by:
        builder = builder.add_extension(alternatives, critical=False).add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
    made = builder.sign(signer, hashes.SHA384())
    _write(file, made.public_bytes(Encoding.PEM), said, mode=0o644)
    return made


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(file: Path, content: bytes, said: list[str], *, mode: int) -> None:
    """Write a file that is not there yet; it is never readable by others than its mode says."""
    if file.exists():
        return
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
        stream.write(content)
    said.append(f"made {file}")


if __name__ == "__main__":
    main()
