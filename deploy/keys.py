"""Create the keys and certificates of a fleet: an authority, a certificate of the server, a key pair per node.

    python deploy/keys.py keys --server fed.example.org 203.0.113.7 --nodes garden roof shed

writes into the folder ``keys``

=========================  ==========================================================================================
``ca.key``                 key of the authority; keep it off the server and the devices
``ca.crt``                 certificate of the authority, for every device and for users who submit runs
``server.key``, ``.crt``   of the server, for the given names and addresses and for localhost
``nodes/NAME.key``         private key of a node, for that device only
``nodes/NAME.pub``         public key of a node, which is registered with the SuperLink
=========================  ==========================================================================================

Existing files are kept, and missing files are created. To renew a certificate, move ``server.crt`` away and repeat the
command. Key files have mode 600. The script needs only dependencies of Flower.
"""

import argparse
import datetime
import ipaddress
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
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

CA_DAYS, SERVER_DAYS = 3650, 825  # validity
LOOPBACK_NAMES = ("localhost", "127.0.0.1")  # for nginx and the operator on the server


def main() -> None:
    """Create missing files, and print all files."""
    parser = argparse.ArgumentParser(description="Create missing keys and certificates of a fleet.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--server", nargs="+", default=[], metavar="NAME", help="names and addresses of the server")
    parser.add_argument("--nodes", nargs="+", default=[], metavar="NAME", help="names of devices")
    options = parser.parse_args()
    try:
        for line in create_all(options.folder, server=options.server, nodes=options.nodes):
            print(line)
    except (OSError, ValueError) as error:
        sys.exit(f"keys.py: {error}")


def create_all(folder: Path, *, server: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """Create missing files, and return a line for each file; `ValueError` if names or existing files do not fit."""
    for name in nodes:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            raise ValueError(f"node {name!r} cannot name a file; use letters, digits, _, - and .")
    nodes_folder = folder / "nodes"
    nodes_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    messages: list[str] = []
    ca_key = _key(folder / "ca.key", messages)
    ca = _certificate(folder / "ca.crt", messages, names=["fedssl"], key=ca_key, signed_by=None)
    if server:
        key = _key(folder / "server.key", messages)
        _certificate(folder / "server.crt", messages, names=[*server, *LOOPBACK_NAMES], key=key, signed_by=(ca, ca_key))
    for name in nodes:
        public = _key(nodes_folder / f"{name}.key", messages, ssh=True).public_key()
        line = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" {name}\n".encode()
        _write(nodes_folder / f"{name}.pub", line, messages, mode=0o644)
    return messages


def _key(file: Path, messages: list[str], *, ssh: bool = False) -> EllipticCurvePrivateKey:
    """Return the key in the file, and create it if necessary. Flower needs node keys in OpenSSH's format."""
    key_format, suffix = (PrivateFormat.OpenSSH, ".pub") if ssh else (PrivateFormat.PKCS8, ".crt")
    if not file.exists():
        other = file.with_suffix(suffix)
        if other.exists():
            raise ValueError(f"{other} exists but {file} does not; restore it, or move {other} away")
        new = generate_private_key(SECP384R1())
        _write(file, new.private_bytes(Encoding.PEM, key_format, NoEncryption()), messages, mode=0o600)
    else:
        messages.append(f"kept {file}")
    try:
        key = (load_ssh_private_key if ssh else load_pem_private_key)(file.read_bytes(), password=None)
    except TypeError as error:
        path = shlex.quote(str(file))
        command = f"ssh-keygen -p -N '' -f {path}" if ssh else f"openssl pkey -in {path} -out NEW, and use NEW"
        raise ValueError(f"{file} has a passphrase; remove it with {command}") from error
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ValueError(f"{file} is not an elliptic-curve key; move it away")
    return key


def _certificate(
    file: Path,
    messages: list[str],
    *,
    names: Sequence[str],
    key: EllipticCurvePrivateKey,
    signed_by: tuple[x509.Certificate, EllipticCurvePrivateKey] | None,
) -> x509.Certificate:
    """Return the certificate in the file, and create it if necessary. Without a signer it is the authority's."""
    names = list(dict.fromkeys(names))
    alternatives = x509.SubjectAlternativeName(map(_general_name, names))
    if file.exists():
        existing = x509.load_pem_x509_certificate(file.read_bytes())
        if signed_by and {*_alternatives(existing)} != {*alternatives}:
            raise ValueError(f"{file} has other names than {', '.join(names)}; move it away to create a new one")
        try:
            if signed_by:
                existing.verify_directly_issued_by(signed_by[0])
            is_ours = existing.public_key() == key.public_key()
        except (ValueError, TypeError, InvalidSignature):
            is_ours = False
        if not is_ours:
            raise ValueError(f"{file} belongs to another key or authority; move it away to create a new one")
        messages.append(f"kept {file}, valid until {existing.not_valid_after_utc:%Y-%m-%d}")
        return existing
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    issuer, signer = (signed_by[0].subject, signed_by[1]) if signed_by else (subject, key)
    now = datetime.datetime.now(datetime.UTC)
    validity = datetime.timedelta(days=SERVER_DAYS if signed_by else CA_DAYS)
    is_ca = signed_by is None
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    usage = dict.fromkeys((*unused, "encipher_only", "decipher_only"), False)
    usage |= {"digital_signature": not is_ca, "key_cert_sign": is_ca, "crl_sign": is_ca}
    builder = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of devices may be slow
        .not_valid_after(now + validity)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(x509.KeyUsage(**usage), critical=True)
    )
    if signed_by:
        builder = builder.add_extension(alternatives, critical=False).add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
    certificate = builder.sign(signer, hashes.SHA384())
    _write(file, certificate.public_bytes(Encoding.PEM), messages, mode=0o644)
    return certificate


def _alternatives(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError as error:
        if name.rpartition(".")[2].isdecimal() or not re.fullmatch(r"(\*\.)?([A-Za-z0-9_-]+\.)*[A-Za-z0-9_-]+", name):
            raise ValueError(f"{name} is neither a DNS name nor an IP address; leave out scheme and port") from error
        return x509.DNSName(name)


def _write(file: Path, content: bytes, messages: list[str], *, mode: int) -> None:
    """Write a new file, with ``mode`` from the start. An existing file is kept."""
    if file.exists():
        return
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
        stream.write(content)
    messages.append(f"created {file}")


if __name__ == "__main__":
    main()
