"""Who a member is towards its peers: an id, and a key made for the run whose certificate is pinned by its
fingerprint.

There is no authority: a certificate proves nothing by itself, its fingerprint in the roster does. Keys live in
memory; the one moment that OpenSSL's interface needs them as files is spent in a directory that only this user can
read and that is gone at once.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import secrets
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from paceline.errors import HandshakeRefused

_CURVE = ec.SECP256R1()
_VALID_FOR = datetime.timedelta(days=365)


def new_member_id() -> str:
    """Random, never reused, short enough to be read out."""
    return secrets.token_hex(8)


class Identity:
    """This member's key, certificate and TLS contexts. With `pem`, from `to_pem`, those of an earlier process that
    must be known again."""

    def __init__(self, member: str | None = None, *, pem: bytes | None = None) -> None:
        self.member = member or new_member_id()
        if pem is None:
            self._key = ec.generate_private_key(_CURVE)
            certificate = _self_signed(self._key, self.member)
        else:
            self._key, certificate = _read_pem(pem)
        self.certificate = certificate.public_bytes(serialization.Encoding.DER)
        self.fingerprint = fingerprint_of(self.certificate)
        self._pem = certificate.public_bytes(serialization.Encoding.PEM) + self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def to_pem(self) -> bytes:
        """Certificate and private key: as secret as the run's secret."""
        return self._pem

    @functools.cached_property
    def server_context(self) -> ssl.SSLContext:
        context = _context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # nobody resumes, and a ticket would be bytes that no frame expects
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            path = Path(folder, "key.pem")
            path.touch(mode=0o600)
            path.write_bytes(self._pem)
            context.load_cert_chain(path)
        return context

    @functools.cached_property
    def client_context(self) -> ssl.SSLContext:
        return _context(ssl.PROTOCOL_TLS_CLIENT)

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message, ec.ECDSA(hashes.SHA256()))


def fingerprint_of(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


def verify(certificate: bytes, signature: bytes, message: bytes) -> None:
    """Raise unless the holder of the certificate's key signed the message."""
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise HandshakeRefused("a certificate with a key of another kind")
        key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise HandshakeRefused("the certificate's key did not sign this handshake") from error


def _read_pem(pem: bytes) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
        certificate = x509.load_pem_x509_certificate(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"this is not the PEM of an identity ({error}); give what to_pem returned") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or certificate.public_key() != key.public_key():
        raise ValueError("the key and the certificate in this PEM do not belong together; give what to_pem returned")
    return key, certificate


def _self_signed(key: ec.EllipticCurvePrivateKey, member: str) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"paceline {member}")])
    # Clocks of ordinary machines differ; the pin, not the date, decides.
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + _VALID_FOR)
        .sign(key, hashes.SHA256())
    )


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # not trust: the handshake compares the fingerprint
    return context
