"""The certificate of an authority: no private key, no leaf, no other file is handed to devices."""

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding

from fedssl.errors import InputError
from fedssl.fleet.certificates import check_validity, load_signing_key, root_certificates, sign, verify
from fedssl.fleet.kit import make_kit

NOW = datetime.datetime.now(datetime.UTC)


def self_signed(start, end):
    """A certificate that is valid between two days from now on."""
    key, name = generate_private_key(SECP384R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fleet")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(NOW + datetime.timedelta(days=start))
    builder = builder.not_valid_after(NOW + datetime.timedelta(days=end))
    return builder.sign(key, hashes.SHA384()).public_bytes(Encoding.PEM)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda keys: (keys / "ca.key").read_bytes(), "it contains a private key"),
        (lambda keys: (keys / "ca.crt").read_bytes() + (keys / "ca.key").read_bytes(), "it contains a private key"),
        (lambda keys: (keys / "nodes" / "garden.key").read_bytes(), "it contains a private key"),
        (lambda keys: (keys / "nodes" / "garden.pub").read_bytes(), "it contains no certificate in PEM format"),
        (lambda keys: (keys / "server.crt").read_bytes(), "the certificate of an authority, but one that CN=fedssl"),
        (lambda keys: (keys / "ca.crt").read_bytes()[:300], "it contains no certificate in PEM format"),
        (lambda keys: b"", "it contains no certificate in PEM format"),
        (lambda keys: b"x" * 2**21, "it has 2,097,152 bytes but the maximum is 1,048,576"),
    ],
)
def test_what_is_not_handed_to_devices(keys, tmp_path, make, reason):
    (tmp_path / "file").write_bytes(make(keys))
    sentence = rf"^--certificates={tmp_path}/file cannot be used \(.*{reason}.*\); give the file ca.crt"
    with pytest.raises(InputError, match=sentence):
        make_kit("garden", "127.0.0.1:443", certificate=tmp_path / "file")


@pytest.mark.parametrize("change", [
    lambda text: text.replace(b"\n", b"\r\n"),
    lambda text: b"\xef\xbb\xbf" + text,
    lambda text: "Zertifikat für den Garten\n".encode() + text + b"\n\n",
])  # fmt: skip
def test_a_kit_contains_the_certificate_without_other_text(keys, change):
    certificate = (keys / "ca.crt").read_bytes()
    assert root_certificates(change(certificate)) == certificate


@pytest.mark.parametrize(("start", "end"), [(-20, -10), (1, 10)])
def test_certificates_that_are_not_valid_now(tmp_path, start, end):
    with pytest.raises(InputError, match=r"is valid from .* to .*, and the clock here shows \d{4}-\d\d-\d\d; create"):
        check_validity("--certificates", tmp_path / "ca.crt", self_signed(start, end))
    check_validity("--certificates", tmp_path / "ca.crt", self_signed(start, end) + self_signed(-1, 1))  # a renewed one


def test_a_signature_is_valid_by_any_certificate_of_the_authority(keys):
    own, other = (keys / "ca.crt").read_bytes(), self_signed(-1, 1)
    signature = sign(b"text", load_signing_key(keys / "server.key"))
    for authority in (own, own + other, other + own):
        verify(b"text", signature, certificate=(keys / "server.crt").read_bytes(), authority=authority)
    for authority in (other, other + other):
        with pytest.raises(ValueError, match="its signature is not from the server of this fleet"):
            verify(b"text", signature, certificate=(keys / "server.crt").read_bytes(), authority=authority)
