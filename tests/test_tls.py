"""TLS between coordinators: who has a certificate for its name from the right authority gets in, nobody else does."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from hybridep_rt.config import Limits, Timeouts
from hybridep_rt.errors import ConfigError, ConnectFailed, HandshakeRefused
from hybridep_rt.protocol.link import Job
from hybridep_rt.runtime.sites import Sites
from hybridep_rt.transport.tls import Tls
from tests.certificates import Authority
from tests.proxy import Proxy
from tests.test_coordinator import JobUnderTest, make_topology
from tests.test_link_cuts import close, talk_both

TIMEOUTS = Timeouts(
    rendezvous_s=1.5, handshake_s=1, heartbeat_s=0.2, silence_s=3, resume_s=5, operation_s=20, goodbye_s=2
)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    new = Authority(tmp_path / "certs", "test")
    new.issue("a")
    new.issue("b")
    return new


@pytest.fixture
def job(tmp_path: Path, authority: Authority) -> JobUnderTest:
    new = JobUnderTest(make_topology((1, 1)), tmp_path, replace(TIMEOUTS, rendezvous_s=10))
    new.tls = {dc: Tls.in_folder(str(authority.folder), name) for dc, name in enumerate("ab")}
    new.open()
    return new


def test_a_certificate_for_another_dc_is_refused_by_name(job: JobUnderTest, authority: Authority) -> None:
    authority.issue("b", named="c")
    job.timeouts = TIMEOUTS
    job.start(0, 1)
    outcomes = job.join()
    assert isinstance(outcomes[1], HandshakeRefused)
    assert 'its certificate is for c.test.hybridep, not for DC "b"' in str(outcomes[1])
    assert isinstance(outcomes[0], ConnectFailed)
    assert 'its certificate is for c.test.hybridep, not for DC "b"' in str(outcomes[0])


def expired(authority: Authority, folder: Path) -> Tls:
    authority.issue("b", expired=True)
    return Tls.in_folder(str(authority.folder), "b")


def of_another_authority(authority: Authority, folder: Path) -> Tls:
    other = Authority(folder / "other", "test")
    other.issue("b")
    certificate = Tls.in_folder(str(other.folder), "b")
    return replace(certificate, authority=str(authority.folder / "ca.pem"))


@pytest.mark.parametrize("make", [expired, of_another_authority])
def test_other_certificates_do_not_get_in(
    job: JobUnderTest, authority: Authority, tmp_path: Path, make: Callable[[Authority, Path], Tls]
) -> None:
    job.timeouts = TIMEOUTS
    job.tls[1] = make(authority, tmp_path)
    job.start(0, 1)
    for outcome in job.join().values():
        assert isinstance(outcome, ConnectFailed)
        assert "did not join within 1.5 s" in str(outcome)


def test_strangers_do_not_disturb_the_job(job: JobUnderTest) -> None:
    job.timeouts = replace(TIMEOUTS, rendezvous_s=10)
    job.start(0, 1)
    links = job.connect_all()
    at = job.listeners[0].wan_address
    assert at is not None
    silent = socket.create_connection(at, timeout=5)
    plain = socket.create_connection(at, timeout=5)
    plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    anyone, old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    for context in (anyone, old):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        assert is_turned_away(at, context)
    talk_both(links)
    for stranger in (silent, plain):
        try:
            while stranger.recv(100):
                pass
        except ConnectionError:
            pass
        stranger.close()
    close(links)
    assert job.join() == {0: None, 1: None}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command")
def test_openssl_is_asked_for_a_certificate_and_turned_away(job: JobUnderTest, authority: Authority) -> None:
    job.start(0, 1)
    links = job.connect_all()
    at = job.listeners[0].wan_address
    assert at is not None
    words = ["openssl", "s_client", "-connect", f"{at[0]}:{at[1]}", "-CAfile", str(authority.folder / "ca.pem")]
    said = subprocess.run(
        [*words, "-ign_eof"], input="hello\n", capture_output=True, text=True, timeout=20, check=False
    )
    assert said.returncode != 0
    assert "TLSv1.3" in said.stdout
    assert "HyEP" not in said.stdout  # how every frame begins
    talk_both(links)
    close(links)
    assert job.join() == {0: None, 1: None}


def test_failed_tls_handshakes_leave_nothing_behind(job: JobUnderTest) -> None:
    job.limits = Limits(strangers=2)
    at = job.listeners[0].wan_address
    assert at is not None
    with Proxy(at) as proxy:
        job.start(0, peers={})
        job.start(1, peers={0: proxy.address})
        links = job.connect_all()
        for _ in range(30):
            with socket.create_connection(at, timeout=5) as stranger, suppress(ConnectionError):
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                while stranger.recv(100):
                    pass
        proxy.cut()
        talk_both(links)
        close(links)
        assert job.join() == {0: None, 1: None}


def is_turned_away(at: tuple[str, int], context: ssl.SSLContext) -> bool:
    """Without a certificate; in TLS 1.3 the client hears about that after its own handshake."""
    with socket.create_connection(at, timeout=5) as raw:
        try:
            with context.wrap_socket(raw) as stranger:
                stranger.sendall(b"hello")
                return stranger.recv(100) == b""
        except (ssl.SSLError, ConnectionError):
            return True


def test_a_key_that_others_may_read_is_refused(authority: Authority) -> None:
    os.chmod(authority.folder / "a.key", 0o640)
    with pytest.raises(ConfigError, match=r"a\.key: others than its owner may use it; run chmod 600"):
        Tls.in_folder(str(authority.folder), "a").contexts()


@pytest.mark.parametrize(
    ("name", "what"), [("a.pem", "No such file"), ("a.key", "No such file"), ("ca.pem", "No such")]
)
def test_missing_files_are_named(authority: Authority, name: str, what: str) -> None:
    (authority.folder / name).unlink()
    with pytest.raises(ConfigError, match=what) as caught:
        Tls.in_folder(str(authority.folder), "a").contexts()
    assert name in str(caught.value)


def test_a_key_of_another_certificate_is_refused(authority: Authority) -> None:
    (authority.folder / "a.pem").write_bytes((authority.folder / "b.pem").read_bytes())
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        Tls.in_folder(str(authority.folder), "a").contexts()


def sites(*, insecure: bool, tls: Tls | None = None) -> Sites:
    topology = replace(make_topology((1,)), insecure=insecure)
    return Sites(topology, 0, Job("c", "", 0, b""), TIMEOUTS, Limits(), tls, None, lambda address: None)  # type: ignore[arg-type]


def test_plaintext_needs_loopback_or_the_users_word(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    home, away = ("127.0.0.1", 1), ("198.51.100.1", 1)
    sites(insecure=False).check_security([home, ("localhost", 1), ("::1", 1)])
    for where in (away, ("0.0.0.0", 1), ("example.org", 1)):
        with pytest.raises(ConfigError, match="set HYBRIDEP_TLS_FOLDER"):
            sites(insecure=False).check_security([home, where])
    assert capsys.readouterr().err == ""
    sites(insecure=True).check_security([away])
    assert 'warning: coordinator of DC "a": insecure: true' in capsys.readouterr().err
    sites(insecure=False, tls=Tls.in_folder(str(authority.folder), "a")).check_security([away])
