"""Certificates of a fleet's authority, by which devices and operators recognize its server, and its signatures.

A signature is ECDSA with the key of the server's TLS certificate, which the authority signed.
"""

import datetime
import shlex
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from fedssl.errors import InputError
from fedssl.safe_io import read_bytes

_MAX_BYTES = 2**20  # bytes of a file
_ALGORITHM = ECDSA(SHA384())


def root_certificates(content: bytes) -> bytes:
    """Return the certificates of a PEM text without other text; raises `ValueError` unless one is an authority's.

    OpenSSL accepts a server by an authority that signed itself only, not by an intermediate one.
    """
    if b"PRIVATE KEY" in content:
        raise ValueError("it contains a private key")
    try:
        found = x509.load_pem_x509_certificates(content)
        roots = [certificate for certificate in found if certificate.issuer == certificate.subject]
    except ValueError as error:
        raise ValueError("it contains no certificate in PEM format") from error
    if not roots:
        issuer = found[0].issuer.rfc4514_string()
        raise ValueError(f"it is not the certificate of an authority, but one that {issuer} signed")
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in found)


def read_authority(name: str, file: Path) -> bytes:
    """Return the certificates of an authority in PEM format; raises `InputError`, which calls the file ``name``."""
    content = b""
    try:
        content = read_bytes(file, max_bytes=_MAX_BYTES)
        return root_certificates(content)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = "give the file ca.crt of deploy/keys.py"
        if content.startswith(b"\x30\x82"):  # ASN.1
            remedy = f"convert it with openssl x509 -inform der -in {shlex.quote(str(file))} -out ca.crt"
        raise InputError(f"{name}={file} cannot be used ({reason}); {remedy}") from error


def check_validity(name: str, file: Path, certificates: bytes) -> None:
    """Raise `InputError` if all certificates of a PEM text have expired or are not valid yet."""
    now, found = datetime.datetime.now(datetime.UTC), x509.load_pem_x509_certificates(certificates)
    periods = [(certificate.not_valid_before_utc, certificate.not_valid_after_utc) for certificate in found]
    if not any(start <= now <= end for start, end in periods):
        start, end = periods[0]
        raise InputError(
            f"{name}={file} is valid from {start:%Y-%m-%d} to {end:%Y-%m-%d}, and the clock here shows "
            f"{now:%Y-%m-%d}; create a new certificate with deploy/keys.py, or correct the clock"
        )


def verification_problem(error: Exception) -> str:
    """Return why a server's certificate was rejected; empty if the error has another cause."""
    if "CERTIFICATE_VERIFY_FAILED" not in str(error):
        return ""
    reason = str(error).partition("certificate verify failed: ")[2].partition(" (_ssl")[0]
    if "expired" in reason or "not yet valid" in reason:
        reason += f"; the clock here shows {datetime.datetime.now().astimezone():%Y-%m-%d %H:%M}"
    return reason


def load_signing_key(file: Path) -> EllipticCurvePrivateKey:
    """Return the private key in a file; raises `InputError`."""
    try:
        key = load_pem_private_key(read_bytes(file, max_bytes=_MAX_BYTES), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"engine.signing_key={file} cannot be read ({error}); set it to the file server.key of deploy/keys.py"
        ) from error
    if not isinstance(key, EllipticCurvePrivateKey):
        raise InputError(f"engine.signing_key={file} is not an elliptic-curve key; use deploy/keys.py")
    return key


def load_signing_certificate(file: Path, key: EllipticCurvePrivateKey) -> bytes:
    """Return the certificate in a file; raises `InputError` unless it is valid now and of this key."""
    name, remedy = "engine.signing_certificate", "set it to the file server.crt that deploy/keys.py wrote with that key"
    try:
        content = read_bytes(file, max_bytes=_MAX_BYTES)
        certificate = x509.load_pem_x509_certificate(content)
    except (OSError, ValueError) as error:
        raise InputError(f"{name}={file} cannot be read ({error}); {remedy}") from error
    if certificate.public_key() != key.public_key():
        raise InputError(f"{name}={file} is not the certificate of engine.signing_key; {remedy}")
    check_validity(name, file, certificate.public_bytes(Encoding.PEM))  # devices check the first certificate only
    return content


def sign(text: bytes, key: EllipticCurvePrivateKey) -> bytes:
    """Return the signature of a text."""
    return key.sign(text, _ALGORITHM)


def verify(text: bytes, signature: bytes, *, certificate: bytes, authority: bytes) -> None:
    """Raise `ValueError` unless the certificate's key signed the text, and the authority the certificate.

    ``authority`` may have several certificates, as while a fleet changes to another authority.
    """
    if not signature:
        raise ValueError("it is not signed")
    try:
        server = x509.load_pem_x509_certificate(certificate)
        key, signers = server.public_key(), x509.load_pem_x509_certificates(authority)
        if not (isinstance(key, EllipticCurvePublicKey) and any(_is_issued(server, signer) for signer in signers)):
            raise InvalidSignature
        key.verify(signature, text, _ALGORITHM)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError) as error:
        raise ValueError("its signature is not from the server of this fleet") from error
    if not server.not_valid_before_utc <= datetime.datetime.now(datetime.UTC) <= server.not_valid_after_utc:
        raise ValueError("the certificate of its signature has expired")


def issuer_beyond(certificate: bytes, authority: bytes) -> str | None:
    """Return who issued the first certificate of a PEM text if the authority did not, as devices require; else None."""
    server, signers = x509.load_pem_x509_certificates(certificate)[0], x509.load_pem_x509_certificates(authority)
    return None if any(_is_issued(server, signer) for signer in signers) else server.issuer.rfc4514_string()


def _is_issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True
