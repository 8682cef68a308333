"""The opening of every connection: both sides prove that they know the run's secret, bound to this very connection.

    dialer   -> listener   Hello      version, member, role, nonce, fingerprint
    listener -> dialer     Challenge  the same of its own, and its proof
    dialer   -> listener   Answer     its proof, its certificate and a signature by the certificate's key, and what it
    came for listener -> dialer     Welcome

A proof is an HMAC under the secret over both Hellos (nonces, roles, members, fingerprints, whether there is TLS), the
purpose and the side that makes it, so it serves neither another connection nor the other direction. The dialer
compares the fingerprint in the Challenge with the certificate that TLS showed it and with the one it expects (the
pin). The listener sees no certificate in TLS, because without an authority there is nothing OpenSSL could check it
against; instead the dialer signs both Hellos with its key.

Failure: whoever sees a wrong proof closes without a word. Frames of a handshake are limited to 4 KiB, no tensors.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TypeVar

import msgspec

from paceline.errors import ConnectionLost, HandshakeRefused, ProtocolError
from paceline.wire import identity
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.frame import HANDSHAKE_LIMITS

VERSION = 1

Body = TypeVar("Body")


class Hello(msgspec.Struct, frozen=True):
    version: int
    member: str
    role: str
    nonce: bytes
    fingerprint: bytes
    tls: bool


class Challenge(msgspec.Struct, frozen=True):
    hello: Hello
    proof: bytes


class HandshakeAnswer(msgspec.Struct, frozen=True):
    proof: bytes
    certificate: bytes
    signature: bytes
    purpose: str


class Welcome(msgspec.Struct, frozen=True):
    pass


class Credentials(msgspec.Struct, frozen=True):
    """What this process brings to a handshake."""

    identity: identity.Identity
    secret: bytes
    role: str

    def hello(self, connection: Connection) -> Hello:
        nonce = secrets.token_bytes(32)
        return Hello(
            VERSION,
            self.identity.member,
            self.role,
            nonce,
            self.identity.fingerprint,
            connection.shown_certificate is not None,
        )


class Visitor(msgspec.Struct, frozen=True):
    """Whom a listener let in, and what for."""

    member: str
    role: str
    fingerprint: bytes
    purpose: str


def dial(
    connection: Connection,
    mine: Credentials,
    purpose: str,
    *,
    pin: bytes | None,
    deadline: Deadline,
) -> Hello:
    """The dialer's side. `pin` is the fingerprint to insist on."""
    hello = mine.hello(connection)
    connection.send("hello", hello, deadline=deadline)
    challenge = _receive(connection, "challenge", Challenge, deadline)
    theirs = challenge.hello
    _check_version(connection, theirs)
    shown = connection.shown_certificate
    if shown is not None and identity.fingerprint_of(shown) != theirs.fingerprint:
        raise HandshakeRefused(f"{connection.peer} names a certificate that is not the one of its TLS connection")
    if pin is not None and not hmac.compare_digest(pin, theirs.fingerprint):
        raise HandshakeRefused(
            f"{connection.peer} has another certificate than the roster says; is this address still the same member?"
        )
    transcript = _transcript(hello, theirs, purpose="")
    _check_proof(connection, mine.secret, b"listener", transcript, challenge.proof)
    _check_tls(connection, hello, theirs)
    transcript = _transcript(hello, theirs, purpose)
    answer = HandshakeAnswer(
        proof=_proof(mine.secret, b"dialer", transcript),
        certificate=mine.identity.certificate,
        signature=mine.identity.sign(transcript),
        purpose=purpose,
    )
    connection.send("answer", answer, deadline=deadline)
    _receive(connection, "welcome", Welcome, deadline)
    return theirs


def receive_visitor(connection: Connection, mine: Credentials, *, deadline: Deadline) -> Visitor:
    """The listener's side."""
    theirs = _receive(connection, "hello", Hello, deadline)
    _check_version(connection, theirs)
    hello = mine.hello(connection)
    transcript = _transcript(theirs, hello, purpose="")
    connection.send("challenge", Challenge(hello, _proof(mine.secret, b"listener", transcript)), deadline=deadline)
    answer = _receive(connection, "answer", HandshakeAnswer, deadline)
    transcript = _transcript(theirs, hello, answer.purpose)
    _check_proof(connection, mine.secret, b"dialer", transcript, answer.proof)
    if identity.fingerprint_of(answer.certificate) != theirs.fingerprint:
        raise HandshakeRefused(f"{connection.peer} sent another certificate than it announced")
    identity.verify(answer.certificate, answer.signature, transcript)
    _check_tls(connection, hello, theirs)
    connection.send("welcome", Welcome(), deadline=deadline)
    return Visitor(theirs.member, theirs.role, theirs.fingerprint, answer.purpose)


def _receive(connection: Connection, kind: str, body_type: type[Body], deadline: Deadline) -> Body:
    try:
        header, _ = connection.receive(deadline=deadline, limits=HANDSHAKE_LIMITS)
        if header.kind != kind:
            raise HandshakeRefused(f"{connection.peer} sent {header.kind!r} where a handshake has {kind!r}")
        return header.read_body(body_type)
    except ProtocolError as error:
        raise HandshakeRefused(f"no handshake: {error}") from error
    except ConnectionLost as error:
        raise HandshakeRefused(f"{error} in the handshake: does it have the same secret and TLS setting?") from error


def _check_version(connection: Connection, theirs: Hello) -> None:
    if theirs.version != VERSION:
        raise HandshakeRefused(
            f"{connection.peer} speaks version {theirs.version} of the wire, this process version {VERSION}; "
            "install the same Paceline on both"
        )


def _check_proof(connection: Connection, secret: bytes, side: bytes, transcript: bytes, proof: bytes) -> None:
    if not hmac.compare_digest(_proof(secret, side, transcript), proof):
        raise HandshakeRefused(f"{connection.peer} does not have the secret of this run")


def _check_tls(connection: Connection, mine: Hello, theirs: Hello) -> None:
    """Both sides must see TLS, or both not: else somebody in between takes it off."""
    if mine.tls != theirs.tls:
        seen = "with TLS" if theirs.tls else "without TLS"
        raise HandshakeRefused(
            f"{connection.peer} sees this connection {seen}, this process does not: is there a relay?"
        )


def _transcript(dialer: Hello, listener: Hello, purpose: str) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode((dialer, listener, purpose))).digest()


def _proof(secret: bytes, side: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, b"paceline " + side + b"\0" + transcript, "sha256")
