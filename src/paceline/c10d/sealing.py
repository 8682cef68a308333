"""A secret for members that share nothing but a store which others may read.

Each member leaves a public key in the store; the first one draws the secret and leaves it there sealed for each of the
others. Who only reads the store learns nothing. Who can write to it before a member does could take that member's
place: against that helps only a store that checks who comes to it, as that of `paceline run` does.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from paceline.errors import HandshakeRefused

_NONCE = bytes(12)  # a key is used once: both sides draw new ones for every group


class Seal:
    """One member's key for one group."""

    def __init__(self) -> None:
        self._key = X25519PrivateKey.generate()
        self.public = self._key.public_key().public_bytes_raw()

    def close(self, secret: bytes, theirs: bytes) -> bytes:
        """The secret, readable for the owner of the other key alone."""
        return self._cipher(theirs, self.public + theirs).encrypt(_NONCE, secret, None)

    def open(self, sealed: bytes, theirs: bytes) -> bytes:
        try:
            return self._cipher(theirs, theirs + self.public).decrypt(_NONCE, sealed, None)
        except InvalidTag as error:
            raise HandshakeRefused("the secret in the store was not sealed for this member") from error

    def _cipher(self, theirs: bytes, both: bytes) -> ChaCha20Poly1305:
        try:
            shared = self._key.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError as error:
            raise HandshakeRefused("a key in the store is not one of a member") from error
        derive = HKDF(hashes.SHA256(), length=32, salt=None, info=b"paceline c10d group secret" + both)
        return ChaCha20Poly1305(derive.derive(shared))
