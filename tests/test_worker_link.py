"""The edges of the transport: endpoints, listeners, timers, waits, without a coordinator."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import uvloop

from hybridep_rt.config import Limits, Timeouts
from hybridep_rt.errors import ConfigError, ConnectFailed, DeadlineExceeded, PeerLost, PositionMismatch
from hybridep_rt.metrics import Metrics
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.link import Job
from hybridep_rt.protocol.messages import Message
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.transport.dial import parse_endpoint
from hybridep_rt.transport.listeners import open_listeners
from hybridep_rt.transport.mailboxes import Mailboxes
from hybridep_rt.transport.timer import Timer
from hybridep_rt.transport.worker_link import WorkerLink

HERE, THERE = Address(0, 0), Address(1, 0)
AT = Position(1, 0, -1, Phase.ATTACH)
JOB = Job("t", "d", 0, b"k" * 32)


def mailboxes(operation_s: float = 5.0) -> Mailboxes:
    return Mailboxes(HERE, ("a", "b"), operation_s, Metrics())


def message(body: bytes = b"", position: Position = AT) -> Message:
    return Message(THERE, HERE, "x", position, memoryview(bytearray(body)))


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [("unix:/a/b", "/a/b"), ("tcp:host:80", ("host", 80)), ("tcp:[::1]:80", ("::1", 80)), ("tcp:::1:80", ("::1", 80))],
)
def test_endpoints(text: str, endpoint: object) -> None:
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize("text", ["", "unix:", "tcp:host", "tcp::80", "tcp:host:x", "tcp:host:65536", "udp:host:1"])
def test_endpoints_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="an endpoint is"):
        parse_endpoint(text)


def test_listeners_tell_their_addresses_and_leave_nothing(tmp_path: Path) -> None:
    listeners = open_listeners(f"{tmp_path}/s", ("127.0.0.1", 0), None)
    assert listeners.wan_address is not None
    assert listeners.wan_address[1] > 0
    assert listeners.workers_address is None
    assert os.stat(listeners.unix_path).st_mode & 0o777 == 0o600
    listeners.close()
    listeners.close()
    assert not os.path.exists(f"{tmp_path}/s")


def test_an_address_that_cannot_be_had_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for wan, workers, purpose in (
            (("127.0.0.1", port), None, "other DCs"),
            (None, ("127.0.0.1", port), "workers"),
        ):
            with pytest.raises(ConfigError, match=rf"^can't listen for {purpose} at 127.0.0.1:{port}: Address already"):
                open_listeners(f"{tmp_path}/{purpose}", wan, workers)
    with pytest.raises(ConfigError, match=r"can't listen for other DCs at no.such.host.invalid:1"):
        open_listeners(f"{tmp_path}/n", ("no.such.host.invalid", 1), None)
    with pytest.raises(ConfigError, match="can't listen for workers at /nowhere/s: No such file"):
        open_listeners("/nowhere/s", None, None)
    with pytest.raises(ConfigError, match="can't listen for workers"):
        open_listeners(f"{tmp_path}/{'x' * 200}", None, None)


def test_nobody_answers(tmp_path: Path) -> None:
    timeouts = Timeouts(rendezvous_s=0.2, handshake_s=1)
    with pytest.raises(ConnectFailed, match=r'coordinator of DC "a": not reached at unix:.*: No such file'):
        WorkerLink.connect(f"unix:{tmp_path}/s", HERE, JOB, ("a", "b"), timeouts, Limits(), Metrics())


def test_somebody_answers_who_says_nothing(tmp_path: Path) -> None:
    timeouts = Timeouts(rendezvous_s=0.3, handshake_s=0.1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/s")
        silent.listen()
        with pytest.raises(ConnectFailed, match="no handshake within"):
            WorkerLink.connect(f"unix:{tmp_path}/s", HERE, JOB, ("a", "b"), timeouts, Limits(), Metrics())


def test_a_timer_calls_once_and_not_early() -> None:
    async def measure() -> list[float]:
        calls: list[float] = []
        done = asyncio.Event()

        def call() -> None:
            calls.append(time.monotonic())
            done.set()

        timer = Timer(call)
        due = time.monotonic() + 0.005
        timer.set(due + 60)
        timer.set(due)
        await asyncio.wait_for(done.wait(), 5)
        timer.set(time.monotonic() - 1)
        done.clear()
        await asyncio.wait_for(done.wait(), 5)
        timer.set(time.monotonic())
        timer.close()
        timer.close()
        return [calls[0] - due, float(len(calls))]

    early, calls = uvloop.run(measure())
    assert early >= 0
    assert calls == 2


def test_waits_end_with_a_message_a_failure_a_departure_or_the_deadline() -> None:
    boxes = mailboxes()
    boxes.deliver(message(b"first"))
    assert bytes(boxes.receive(THERE, "x", AT).payload) == b"first"
    with pytest.raises(DeadlineExceeded, match=r'x at step 1.*nothing from worker 0 of DC "b" for 0.0 s'):
        boxes.receive(THERE, "x", AT, 0.01)
    boxes.deliver(message(position=AT._replace(step=2)))
    with pytest.raises(PositionMismatch, match="step 2"):
        boxes.receive(THERE, "x", AT)
    boxes.depart(THERE, "step 2")
    with pytest.raises(PositionMismatch, match="its end"):
        boxes.receive(THERE, "x", AT)
    boxes.fail(PeerLost("worker", "gone"))
    with pytest.raises(PeerLost):
        boxes.receive(THERE, "x", AT)


def test_async_waits_for_many_channels_at_once_end_alike() -> None:
    boxes = mailboxes()

    async def wait_for_all() -> list[Message | BaseException]:
        waits = [asyncio.create_task(boxes.receive_async(THERE, f"c{number}", AT)) for number in range(50)]
        await asyncio.sleep(0)
        cancelled = asyncio.create_task(boxes.receive_async(THERE, "x", AT))
        await asyncio.sleep(0)
        cancelled.cancel()
        threading.Thread(target=deliver).start()
        return await asyncio.gather(*waits, boxes.receive_async(THERE, "late", AT, 0.01), return_exceptions=True)

    def deliver() -> None:
        for number in reversed(range(49)):
            boxes.deliver(Message(THERE, HERE, f"c{number}", AT, memoryview(bytearray([number]))))
        boxes.fail(PeerLost("worker", "gone"))

    *results, failed, late = uvloop.run(wait_for_all())
    assert [bytes(each.payload) for each in results if isinstance(each, Message)] == [bytes([n]) for n in range(49)]
    assert isinstance(failed, PeerLost)
    assert isinstance(late, PeerLost | DeadlineExceeded)
    assert not boxes._wakers


def test_records_are_exchanged_without_pickle() -> None:
    code = (
        "from mpi4py import MPI; from hybridep_rt.transport import mpi\n"
        "print(mpi.exchange({'dc': 0, 'at': ['h', 1]}), mpi.rank(), mpi.size())\n"
        "print(MPI.pickle.dumps([1]))\n"
        "try: mpi.exchange('x' * 70000)\n"
        "except Exception as error: print(type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["[{'dc': 0, 'at': ['h', 1]}] 0 1", "b'\\x91\\x01'", "RemoteProtocolError"]
