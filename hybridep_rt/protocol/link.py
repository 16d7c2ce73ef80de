"""One connection between two processes of a job: handshake, heartbeats, goodbye. Sans-I/O.

    dialler                         acceptor
    HELLO  who, job, nonce      ->
                                <-  CHALLENGE  who, nonce        (or REFUSE code, text)
    PROOF  standing, HMAC(token, both, standing)   ->
                                <-  WELCOME  standing, HMAC(token, both, standing)   (or REFUSE code, text)

"Both" are the bytes of HELLO and CHALLENGE, so a proof holds for this pair of identities and nonces only; the run token
itself never travels. The dialler proves first: a stranger gets nothing to work on. The standing says where the sender's
end of the session is (see `session`). After WELCOME both sides send heartbeats, which also measure the round trip; any
byte from the peer counts as a sign of life.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, TypeAlias

from hybridep_rt.config import Timeouts
from hybridep_rt.errors import ConnectionLost, HandshakeRefused, HybridEPError, PeerRestarted, RemoteProtocolError
from hybridep_rt.protocol.address import COORDINATOR, Address
from hybridep_rt.protocol.frames import Control, Kind, pack_fields

PROTOCOL_VERSION = 2
NONCE_BYTES = 32
REASON_CHARACTERS = 500
_INDEX_END = 1 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """What two processes must have in common. `digest`: of the topology; `epoch`: of the plan."""

    cluster: str
    digest: str
    epoch: int
    run_token: bytes = field(repr=False)


class Code(IntEnum):
    """Why a peer is refused."""

    VERSION = 1
    CLUSTER = 2
    TOKEN = 3
    DIGEST = 4
    EPOCH = 5
    ROLE = 6
    CONNECTED = 7
    RESTARTED = 8
    SUPERSEDED = 9


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal with its reason, for programs and for people."""

    code: Code
    text: str


class State(Enum):
    """Where a link is."""

    EXPECT_HELLO = "waits for a hello"
    EXPECT_CHALLENGE = "waits for a challenge"
    EXPECT_PROOF = "waits for a proof"
    EXPECT_WELCOME = "waits for a welcome"
    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Send:
    """Send a frame without payload."""

    kind: Kind
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Opened:
    """Both sides have proved who they are; `peer` is the other one, and `standing` says where its session is."""

    peer: Address
    standing: bytes = b""


@dataclass(frozen=True, slots=True)
class Notice:
    """The open link's peer says something that its owner has to act on."""

    kind: Kind
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Closed:
    """Send what is queued, then close. `error` is None after a goodbye."""

    error: HybridEPError | None


Command: TypeAlias = Send | Opened | Notice | Closed
Admit: TypeAlias = Callable[[Address, bytes], Refusal | None]
"""Decides about a peer that has proved its address and its standing."""


class LinkMachine:
    """Control frames, time and the end of the connection in; commands out.

    `peer` is the address a dialler wants to reach, None on the accepting side. `admit` decides about a peer that has
    proved itself; `standing` gives what to tell it. `peer_name` is for error messages. `nonce`: `NONCE_BYTES` fresh
    random bytes. `rtt_s`: the last round trip measured, None before the first.
    """

    def __init__(
        self,
        me: Address,
        job: Job,
        timeouts: Timeouts,
        nonce: bytes,
        now: float,
        *,
        peer: Address | None = None,
        peer_name: str = "a stranger",
        admit: Admit = lambda address, standing: None,
        standing: Callable[[Address], bytes] = lambda address: b"",
    ) -> None:
        self.state = State.EXPECT_HELLO if peer is None else State.EXPECT_CHALLENGE
        self.peer = peer
        self.peer_name = peer_name
        self._me = me
        self._job = job
        self._timeouts = timeouts
        self._nonce = nonce
        self._admit = admit
        self._standing = standing
        self._hello = b"" if peer is None else self._introduction()
        self._challenge = b""
        self._deadline = now + timeouts.handshake_s
        self._heard_at = self._beat_at = now
        self._last_beat: tuple[float, float] | None = None
        self.rtt_s: float | None = None
        self._goodbye = False
        self._theirs = ("", 0)

    def start(self) -> list[Command]:
        """The first commands, once the connection stands."""
        return [Send(Kind.HELLO, self._hello)] if self.state is State.EXPECT_CHALLENGE else []

    def bytes_received(self, now: float) -> None:
        """Some bytes came from the peer."""
        self._heard_at = now

    def say_goodbye(self) -> None:
        """The owner has queued its goodbye: the connection may end from now on."""
        self._goodbye = True

    def control_received(self, control: Control) -> list[Command]:
        """A frame without payload arrived. Raises RemoteProtocolError when it is not due or is malformed."""
        if self.state is State.CLOSED:
            return []
        if not isinstance(control.fields, dict):
            raise RemoteProtocolError(f"{control.kind.name}: fields must be a map")
        handler = _TRANSITIONS.get((self.state, control.kind), LinkMachine._on_notice)
        if handler is LinkMachine._on_notice and (self.state is not State.OPEN or control.kind not in _NOTICES):
            raise RemoteProtocolError(f"{control.kind.name} arrived while this side {self.state.value}")
        return handler(self, control)

    def ended(self) -> list[Command]:
        """The connection is gone."""
        if self.state is State.CLOSED:
            return []
        was, self.state = self.state, State.CLOSED
        if self._goodbye:
            return [Closed(None)]
        reason = "its connection ended without goodbye" if was is State.OPEN else "it hung up during the handshake"
        return [Closed(ConnectionLost(self.peer_name, reason))]

    def get_timer(self) -> float:
        """When `handle_timer` has to be called next."""
        if self.state is not State.OPEN:
            return self._deadline
        return min(self._beat_at + self._timeouts.heartbeat_s, self._heard_at + self._timeouts.silence_s)

    def handle_timer(self, now: float) -> list[Command]:
        """Time passed."""
        if self.state is State.CLOSED or now < self.get_timer():
            return []
        if self.state is not State.OPEN:
            return self._close(f"no handshake within {self._timeouts.handshake_s:g} s")
        if now >= self._heard_at + self._timeouts.silence_s:
            return self._close(f"silent for {self._timeouts.silence_s:g} s")
        self._beat_at = now
        their_at, heard_at = self._last_beat or (None, now)
        return [Send(Kind.HEARTBEAT, pack_fields(at=now, echo=their_at, held=now - heard_at))]

    def _close(self, reason: str) -> list[Command]:
        self.state = State.CLOSED
        return [Closed(ConnectionLost(self.peer_name, reason))]

    def _introduction(self) -> bytes:
        return pack_fields(
            version=PROTOCOL_VERSION,
            cluster=self._job.cluster,
            digest=self._job.digest,
            epoch=self._job.epoch,
            dc=self._me.dc,
            worker=self._me.worker,
            nonce=self._nonce,
        )

    def _proof(self, side: bytes, standing: bytes) -> bytes:
        return hmac.digest(self._job.run_token, side + self._hello + self._challenge + standing, hashlib.sha256)

    def _prove(self, kind: Kind, side: bytes) -> Send:
        standing = self._standing(self._known_peer())
        return Send(kind, pack_fields(proof=self._proof(side, standing), standing=standing))

    def _on_hello(self, control: Control) -> list[Command]:
        self._hello = control.raw
        self.peer = read_address(control.fields)
        refusal = self._compare_openly(control.fields)
        if refusal is not None:
            return self._refuse(refusal)
        self._challenge = self._introduction()
        self.state = State.EXPECT_PROOF
        return [Send(Kind.CHALLENGE, self._challenge)]

    def _on_challenge(self, control: Control) -> list[Command]:
        reached = read_address(control.fields)
        refusal = self._compare_openly(control.fields)
        if refusal is None and reached != self.peer:
            refusal = Refusal(Code.ROLE, f"{reached.describe()} answers at this address")
        if refusal is not None:
            return self._refuse(refusal)
        self._challenge = control.raw
        self.state = State.EXPECT_WELCOME
        return [self._prove(Kind.PROOF, b"dialler")]

    def _on_proof(self, control: Control) -> list[Command]:
        refusal = self._check_proof(control, b"dialler") or self._compare_jobs() or self._ask(control)
        if refusal is not None:
            return self._refuse(refusal)
        return [self._prove(Kind.WELCOME, b"acceptor"), *self._open(control)]

    def _on_welcome(self, control: Control) -> list[Command]:
        refusal = self._check_proof(control, b"acceptor") or self._ask(control)
        return self._open(control) if refusal is None else self._refuse(refusal)

    def _ask(self, control: Control) -> Refusal | None:
        return self._admit(self._known_peer(), _read_bytes(control.fields, "standing"))

    def _open(self, control: Control) -> list[Command]:
        self.state = State.OPEN
        self._beat_at = -math.inf  # the first heartbeat goes at once: it measures the round trip
        return [Opened(self._known_peer(), _read_bytes(control.fields, "standing"))]

    def _known_peer(self) -> Address:
        if self.peer is None:
            raise RemoteProtocolError("no hello before the proof")
        return self.peer

    def _compare_openly(self, fields: dict[str, Any]) -> Refusal | None:
        """What may be said before the peer has proved itself."""
        version = read_int(fields, "version", 0, 1 << 32)
        cluster = _read_text(fields, "cluster")
        if len(_read_bytes(fields, "nonce")) != NONCE_BYTES:
            raise RemoteProtocolError(f"nonce must have {NONCE_BYTES} bytes")
        self._theirs = (_read_text(fields, "digest"), read_int(fields, "epoch", 0, 1 << 62))
        if version != PROTOCOL_VERSION:
            return Refusal(Code.VERSION, f"protocol version differs: {version} there, {PROTOCOL_VERSION} here")
        if cluster != self._job.cluster:
            return Refusal(Code.CLUSTER, f'cluster differs: "{cluster}" there, "{self._job.cluster}" here')
        return None

    def _compare_jobs(self) -> Refusal | None:
        """What only a peer with the run token is told."""
        digest, epoch = self._theirs
        if digest != self._job.digest:
            return Refusal(Code.DIGEST, "topology differs: the two sides read different topology files")
        if epoch != self._job.epoch:
            return Refusal(Code.EPOCH, f"plan epoch differs: {epoch} there, {self._job.epoch} here")
        return None

    def _check_proof(self, control: Control, side: bytes) -> Refusal | None:
        proof, standing = _read_bytes(control.fields, "proof"), _read_bytes(control.fields, "standing", b"")
        if hmac.compare_digest(proof, self._proof(side, standing)):
            return None
        return Refusal(Code.TOKEN, "run token differs")

    def _refuse(self, refusal: Refusal) -> list[Command]:
        self.state = State.CLOSED
        refused = pack_fields(code=int(refusal.code), text=refusal.text[:REASON_CHARACTERS])
        return [Send(Kind.REFUSE, refused), Closed(self._refused(refusal.code, refusal.text))]

    def _refused(self, code: int, text: str) -> HybridEPError:
        if code == Code.RESTARTED:
            return PeerRestarted(self.peer_name, text)
        if code == Code.SUPERSEDED:
            return ConnectionLost(self.peer_name, text)
        return HandshakeRefused(self.peer_name, text)

    def _on_refuse(self, control: Control) -> list[Command]:
        self.state = State.CLOSED
        code = read_int(control.fields, "code", 0, 1 << 16)
        return [Closed(self._refused(code, read_reason(control.fields, "text")))]

    def _on_heartbeat(self, control: Control) -> list[Command]:
        """A clock's reading comes back with how long the peer kept it: the rest was on the way."""
        at, echo, held_s = (_read_seconds(control.fields, name) for name in ("at", "echo", "held"))
        if at is not None:
            self._last_beat = (at, self._heard_at)
        if echo is not None and held_s is not None:
            self.rtt_s = max(0.0, self._heard_at - echo - held_s)
        return []

    def _on_goodbye(self, control: Control) -> list[Command]:
        self._goodbye = True
        return self._on_notice(control)

    def _on_notice(self, control: Control) -> list[Command]:
        return [Notice(control.kind, control.fields)]


_NOTICES = (Kind.GOODBYE, Kind.SITE_READY, Kind.READY, Kind.DEPART, Kind.FAIL, Kind.LATE, Kind.EXCUSE)

_TRANSITIONS: dict[tuple[State, Kind], Callable[[LinkMachine, Control], list[Command]]] = {
    (State.EXPECT_HELLO, Kind.HELLO): LinkMachine._on_hello,
    (State.EXPECT_CHALLENGE, Kind.CHALLENGE): LinkMachine._on_challenge,
    (State.EXPECT_CHALLENGE, Kind.REFUSE): LinkMachine._on_refuse,
    (State.EXPECT_PROOF, Kind.PROOF): LinkMachine._on_proof,
    (State.EXPECT_PROOF, Kind.REFUSE): LinkMachine._on_refuse,
    (State.EXPECT_WELCOME, Kind.WELCOME): LinkMachine._on_welcome,
    (State.EXPECT_WELCOME, Kind.REFUSE): LinkMachine._on_refuse,
    (State.OPEN, Kind.REFUSE): LinkMachine._on_refuse,  # the dialler has the last word
    (State.OPEN, Kind.HEARTBEAT): LinkMachine._on_heartbeat,
    (State.OPEN, Kind.GOODBYE): LinkMachine._on_goodbye,
}


def pack_peer(address: Address, reason: str) -> bytes:
    """Fields of DEPART and FAIL: who, and where or why."""
    return pack_fields(dc=address.dc, worker=address.worker, reason=reason[:REASON_CHARACTERS])


def read_peer(fields: dict[str, Any]) -> tuple[Address, str]:
    """The inverse of `pack_peer`. Raises RemoteProtocolError."""
    return read_address(fields), read_reason(fields, "reason")


def read_reason(fields: dict[str, Any], name: str) -> str:
    """A peer's text as one printable line of bounded length. Raises RemoteProtocolError if it is not a text."""
    text = _read_text(fields, name)
    return "".join(character if character.isprintable() else " " for character in text)[:REASON_CHARACTERS]


def read_address(fields: dict[str, Any]) -> Address:
    """The address in `dc` and `worker`. Raises RemoteProtocolError."""
    return Address(read_int(fields, "dc", 0, _INDEX_END), read_int(fields, "worker", COORDINATOR, _INDEX_END))


def read_int(fields: dict[str, Any], name: str, start: int, end: int) -> int:
    """A whole number in [start, end). Raises RemoteProtocolError."""
    value = fields.get(name)
    if type(value) is not int or not start <= value < end:
        raise RemoteProtocolError(f"{name} must be an integer in [{start}, {end})")
    return value


def _read_text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise RemoteProtocolError(f"{name} must be a string")
    return value


def _read_seconds(fields: dict[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is not None and not (type(value) is float and math.isfinite(value)):
        raise RemoteProtocolError(f"{name} must be a number of seconds")
    return value


def _read_bytes(fields: dict[str, Any], name: str, default: bytes | None = None) -> bytes:
    value = fields.get(name, default)
    if not isinstance(value, bytes):
        raise RemoteProtocolError(f"{name} must be bytes")
    return value
