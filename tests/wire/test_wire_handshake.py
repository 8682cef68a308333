"""Nobody gets past the handshake without the secret, without the right certificate and without its key."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from paceline.errors import HandshakeRefused
from paceline.testing.eventually import eventually
from paceline.wire import handshake
from paceline.wire.connection import Connection
from paceline.wire.dialing import connect, dial, wrap_tls
from paceline.wire.endpoint import Endpoint
from paceline.wire.frame import HANDSHAKE_LIMITS
from paceline.wire.handshake import VERSION, Challenge, Credentials, HandshakeAnswer, Hello
from paceline.wire.identity import Identity, fingerprint_of, verify
from paceline.wire.waiting import PLAIN
from tests.wire.helpers import SECRET, WAIT_S, assert_serves, credentials, in_background, soon, visit

WAYS = ["plain", "tls", "unix"]
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    with Endpoint(credentials(role="server"), tls=request.param) as endpoint:
        yield endpoint


@contextlib.contextmanager
def listening(way: str, mine: Credentials | None = None) -> Iterator[Endpoint]:
    with Endpoint(mine or credentials(role="server"), tls=way == "tls") as endpoint:
        yield endpoint


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("refused")]


def assert_refused(caplog: pytest.LogCaptureFixture, why: str) -> None:
    eventually(lambda: bool(refusals(caplog)), "a refusal in the log")
    assert why in refusals(caplog)[0]


@every_way
def test_who_has_the_secret_and_the_pin_gets_in_and_knows_whom_it_reached(way: str) -> None:
    with listening(way) as endpoint:
        assert_serves(endpoint, local=way == "unix")
        connection = visit(endpoint, "room/x", local=way == "unix")
        assert connection.peer == f"server {endpoint.credentials.identity.member}"
        assert isinstance(connection.socket, ssl.SSLSocket) == (way == "tls")
        connection.close()


@every_way
def test_a_dialer_with_another_secret_learns_nothing_and_is_refused(way: str, caplog: pytest.LogCaptureFixture) -> None:
    with listening(way) as endpoint:
        with pytest.raises(HandshakeRefused, match="does not have the secret of this run"):
            visit(endpoint, "room/x", mine=credentials(secret=b"another"), local=way == "unix")
        assert_serves(endpoint, local=way == "unix")


@every_way
def test_a_dialer_that_ignores_the_listeners_proof_is_refused_for_its_own(
    way: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attacker goes on although it cannot check the listener; the listener must not let it in."""
    honest = handshake._check_proof

    def check(connection: Connection, secret: bytes, side: bytes, *rest: Any) -> None:
        if side == b"dialer":
            honest(connection, secret, side, *rest)

    monkeypatch.setattr(handshake, "_check_proof", check)
    with listening(way) as endpoint:
        with pytest.raises(HandshakeRefused, match="the same secret"):
            visit(endpoint, "room/x", mine=credentials(secret=b"another"), local=way == "unix")
        assert_refused(caplog, "does not have the secret of this run")
        assert not endpoint._parked


def test_the_listeners_proof_does_not_serve_as_the_dialers(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with reached(endpoint) as connection:
        mine = Identity()
        connection.send("hello", hello_of(mine), deadline=soon())
        challenge = receive(connection, Challenge)
        answer = HandshakeAnswer(challenge.proof, mine.certificate, b"", "room/x")
        connection.send("answer", answer, deadline=soon())
        assert_refused(caplog, "does not have the secret of this run")


def test_an_answer_of_another_handshake_is_refused(endpoint: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    """An attacker replays what it overheard, word for word."""
    mine = credentials()
    overheard: list[tuple[str, Any]] = []
    with reached(endpoint) as connection:
        send = connection.send

        def listen_in(kind: str, body: Any, **options: Any) -> None:
            overheard.append((kind, body))
            send(kind, body, **options)

        connection.send = listen_in  # type: ignore[method-assign, assignment]
        handshake.dial(connection, mine, "room/x", pin=None, deadline=soon())
    with reached(endpoint) as connection:
        connection.send(*overheard[0], deadline=soon())
        receive(connection, Challenge)
        connection.send(*overheard[1], deadline=soon())
        assert_refused(caplog, "does not have the secret of this run")
    endpoint.close_room("room")


@every_way
def test_another_certificate_than_the_pinned_one_is_refused(way: str) -> None:
    with listening(way) as endpoint:
        with pytest.raises(HandshakeRefused, match="another certificate than the roster says"):
            visit(endpoint, "room/x", local=way == "unix", pin=Identity().fingerprint)
        assert_serves(endpoint, local=way == "unix")


# -- in the middle ---------------------------------------------------------------------------------------------------


def hello_of(identity: Identity, version: int = VERSION, *, tls: bool = False) -> Hello:
    return Hello(version, identity.member, "worker", secrets.token_bytes(32), identity.fingerprint, tls)


def receive(connection: Connection, body_type: type[Any]) -> Any:
    return connection.receive(deadline=soon(), limits=HANDSHAKE_LIMITS)[0].read_body(body_type)


@contextlib.contextmanager
def reached(endpoint: Endpoint) -> Iterator[Connection]:
    """A connection to the endpoint, inside TLS if it wants so, before any handshake of ours."""
    connection = connect(endpoint.address, soon(), PLAIN)
    try:
        if endpoint.tls:
            connection = wrap_tls(connection, Identity().client_context, soon(), server=False)
        yield connection
    finally:
        connection.close()


@contextlib.contextmanager
def impostor(serve: Callable[[Connection], object], identity: Identity | None) -> Iterator[tuple[str, int]]:
    """Listens as somebody else would, with its own certificate (None: without TLS)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)

        def run() -> None:
            connection = Connection(listener.accept()[0], peer="the victim")
            try:
                if identity is not None:
                    connection = wrap_tls(connection, identity.server_context, soon(), server=True)
                serve(connection)
            finally:
                connection.close()

        serving = in_background(run)
        yield listener.getsockname()
        eventually(serving.done, "the impostor ends")


def answer_with(fingerprint: bytes, secret: bytes, version: int = VERSION) -> Callable[[Connection], None]:
    def serve(connection: Connection) -> None:
        theirs = receive(connection, Hello)
        mine = Hello(version, "m", "server", secrets.token_bytes(32), fingerprint, theirs.tls)
        proof = handshake._proof(secret, b"listener", handshake._transcript(theirs, mine, ""))
        connection.send("challenge", Challenge(mine, proof), deadline=soon())
        with contextlib.suppress(Exception):
            connection.receive(deadline=soon())

    return serve


def dial_address(address: tuple[str, int], *, tls: bool, pin: bytes | None = None) -> None:
    dial(credentials(), address, "room/x", deadline=soon("dial"), tls=tls, pin=pin).close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_listener_without_the_secret_is_refused(tls: bool) -> None:
    own = Identity()
    with (
        impostor(answer_with(own.fingerprint, b"a guess"), own if tls else None) as address,
        pytest.raises(HandshakeRefused, match="does not have the secret"),
    ):
        dial_address(address, tls=tls)


def test_a_listener_that_names_the_pinned_certificate_but_shows_its_own_is_refused_even_with_the_secret() -> None:
    pinned = Identity()
    with (
        impostor(answer_with(pinned.fingerprint, SECRET), Identity()) as address,
        pytest.raises(HandshakeRefused, match="not the one of its TLS connection"),
    ):
        dial_address(address, tls=True, pin=pinned.fingerprint)


def relay_to(
    endpoint: Endpoint, change: Callable[[str, Any], Any], welcomed: list[str]
) -> Callable[[Connection], None]:
    """Passes the handshake's messages on between two connections, each inside TLS of its own."""

    def pass_on(source: Connection, target: Connection, kind: str, body_type: type[Any]) -> None:
        body = receive(source, body_type)
        target.send(kind, change(kind, body), deadline=soon())

    def serve(victim: Connection) -> None:
        with contextlib.suppress(Exception), reached(endpoint) as real:
            pass_on(victim, real, "hello", Hello)
            pass_on(real, victim, "challenge", Challenge)
            pass_on(victim, real, "answer", HandshakeAnswer)
            pass_on(real, victim, "welcome", handshake.Welcome)
            welcomed.append("the relay")

    return serve


def unchanged(_: str, body: Any) -> Any:
    return body


def naming(identity: Identity) -> Callable[[str, Any], Any]:
    """Rewrites the listener's fingerprint to that of the one in the middle."""

    def change(kind: str, body: Any) -> Any:
        if kind == "challenge":
            return Challenge(msgspec.structs.replace(body.hello, fingerprint=identity.fingerprint), body.proof)
        return body

    return change


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("rewrites", [False, True])
def test_a_relay_between_two_tls_sessions_is_refused(pinned: bool, rewrites: bool) -> None:
    middle = Identity()
    welcomed: list[str] = []
    with Endpoint(credentials(role="server"), tls=True) as endpoint:
        relay = relay_to(endpoint, naming(middle) if rewrites else unchanged, welcomed)
        with impostor(relay, middle) as address:
            pin = endpoint.credentials.identity.fingerprint if pinned else None
            with pytest.raises(HandshakeRefused):
                dial_address(address, tls=True, pin=pin)
        assert not welcomed
        assert_serves(endpoint)
        assert not endpoint._parked


def test_the_relay_of_these_tests_works_where_nothing_stops_it() -> None:
    """Without TLS a relay is just a wire; this shows that the refusals above are not the relay's own failure."""
    welcomed: list[str] = []
    with (
        Endpoint(credentials(role="server")) as endpoint,
        impostor(relay_to(endpoint, unchanged, welcomed), None) as address,
    ):
        dial_address(address, tls=False)
    assert welcomed


def test_a_relay_that_takes_the_tls_off_is_refused() -> None:
    """The dialer was told that there is no TLS, the listener sees one: each learns what the other sees, under the
    proof."""
    welcomed: list[str] = []
    with Endpoint(credentials(role="server"), tls=True) as endpoint:
        with (
            impostor(relay_to(endpoint, unchanged, welcomed), None) as address,
            pytest.raises(HandshakeRefused, match="with TLS"),
        ):
            dial_address(address, tls=False)
        assert not welcomed
        assert not endpoint._parked


def test_a_relay_that_changes_what_the_dialer_came_for_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    welcomed: list[str] = []

    def elsewhere(kind: str, body: Any) -> Any:
        return msgspec.structs.replace(body, purpose="another/room") if kind == "answer" else body

    with Endpoint(credentials(role="server")) as endpoint:
        with impostor(relay_to(endpoint, elsewhere, welcomed), None) as address, pytest.raises(HandshakeRefused):
            dial_address(address, tls=False)
        assert_refused(caplog, "does not have the secret")
        assert not endpoint._parked


# -- somebody else's certificate -------------------------------------------------------------------------------------


class Impostor(Identity):
    """Has the secret and the certificate of another member, but not its key."""

    def __init__(self, victim: Identity, *, certificate: bytes | None = None) -> None:
        super().__init__(victim.member)
        self.fingerprint = victim.fingerprint
        self.certificate = victim.certificate if certificate is None else certificate


@every_way
def test_a_dialer_with_the_certificate_of_another_but_not_its_key_is_refused(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    forged = credentials(identity=Impostor(Identity()))
    with listening(way) as endpoint:
        with pytest.raises(HandshakeRefused):
            visit(endpoint, "room/x", mine=forged, local=way == "unix")
        assert_refused(caplog, "key did not sign this handshake")
        assert_serves(endpoint, local=way == "unix")


@every_way
def test_a_dialer_that_announces_anothers_fingerprint_with_its_own_certificate_is_refused(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    forged = credentials(identity=Impostor(Identity(), certificate=Identity().certificate))
    with listening(way) as endpoint:
        with pytest.raises(HandshakeRefused):
            visit(endpoint, "room/x", mine=forged, local=way == "unix")
        assert_refused(caplog, "another certificate than it announced")


def rsa_certificate() -> bytes:
    key = rsa.generate_private_key(65537, 2048)
    good = x509.load_der_x509_certificate(Identity("other kind").certificate)
    builder = x509.CertificateBuilder().subject_name(good.subject).issuer_name(good.issuer)
    builder = builder.public_key(key.public_key()).serial_number(1)
    builder = builder.not_valid_before(good.not_valid_before_utc).not_valid_after(good.not_valid_after_utc)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def with_replaced(old: bytes, new: bytes) -> bytes:
    certificate = Identity().certificate
    assert certificate.count(old) == 1
    return certificate.replace(old, new)


ODD_CERTIFICATES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "garbage": lambda: b"\x30\x82\xff\xff" + bytes(100),
    "of RSA": rsa_certificate,
    "of version 6": lambda: with_replaced(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x05"),
    "of an unknown curve": lambda: with_replaced(
        b"\x2a\x86\x48\xce\x3d\x03\x01\x07", b"\x2a\x86\x48\xce\x3d\x03\x01\x3f"
    ),
    "cut": lambda: Identity().certificate[:-7],
}


@pytest.mark.parametrize("odd", ODD_CERTIFICATES)
def test_odd_certificates_are_refused_and_nothing_else_happens(odd: str, caplog: pytest.LogCaptureFixture) -> None:
    certificate = ODD_CERTIFICATES[odd]()
    with pytest.raises(HandshakeRefused):
        verify(certificate, b"no signature", b"message")
    forged = Identity()
    forged.certificate, forged.fingerprint = certificate, fingerprint_of(certificate)
    with listening("plain") as endpoint:
        with pytest.raises(HandshakeRefused):
            visit(endpoint, "room/x", mine=credentials(identity=forged))
        assert_refused(caplog, "certificate")
        assert_serves(endpoint)


def test_a_signature_serves_its_own_key_and_message_only() -> None:
    mine, other = Identity(), Identity()
    verify(mine.certificate, mine.sign(b"message"), b"message")
    for certificate, signature in [
        (mine.certificate, mine.sign(b"another message")),
        (other.certificate, mine.sign(b"message")),
        (mine.certificate, b""),
    ]:
        with pytest.raises(HandshakeRefused):
            verify(certificate, signature, b"message")


# -- another version -------------------------------------------------------------------------------------------------


def test_a_dialer_of_another_version_is_refused_with_both_versions_and_the_remedy(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), reached(endpoint) as connection:
        connection.send("hello", hello_of(Identity(), version=99), deadline=soon())
        assert_refused(caplog, f"speaks version 99 of the wire, this process version {VERSION}; install the same")


def test_a_listener_of_another_version_is_refused_with_both_versions_and_the_remedy() -> None:
    with (
        impostor(answer_with(bytes(32), SECRET, version=99), None) as address,
        pytest.raises(HandshakeRefused, match=f"version 99 .* version {VERSION}; install the same Paceline on both"),
    ):
        dial_address(address, tls=False)
