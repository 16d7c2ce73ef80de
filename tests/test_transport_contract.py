"""What both ends of a WanPort may count on, whatever is between them and whichever event loop serves it.

memory: the in-memory double. unix: two workers of one DC. tcp, tls: one worker in each of two DCs, reached over TCP and
over Unix sockets, whose coordinators meet over TCP without and with TLS, through a proxy.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from hybridep_rt.config import Limits, Timeouts
from hybridep_rt.errors import DeadlineExceeded, HybridEPError, LocalProtocolError, PeerLost, PositionMismatch
from hybridep_rt.metrics import LinkStatus
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Message, Traffic
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.runtime.status import ask
from hybridep_rt.transport.memory import MemoryWan
from hybridep_rt.transport.ports import WanPort
from tests.certificates import certified
from tests.proxy import Proxy
from tests.test_coordinator import JobUnderTest, make_topology
from topology import Link, LinkTable

AT = Position(3, 0, 1, Phase.DISPATCH)
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
WAYS = ["memory", *(f"{kind} {loop}" for kind in ("unix", "tcp", "tls") for loop in LOOPS)]
WAN_WAYS = WAYS[3:]
TIMEOUTS = Timeouts(
    rendezvous_s=10, handshake_s=5, heartbeat_s=0.2, silence_s=5, resume_s=8, operation_s=20, goodbye_s=3
)
OPERATION_S = 0.4
"""A wait of the run's own, where its end is what is tested."""
SIZES = [0, 1, 63, 70_000, 5 << 20, 5, 0, 300_000]
"""A chunk has at most 4 MiB."""


@dataclass
class Ends:
    """Two workers. `outcomes`: how their coordinators ended, once all is over."""

    here: WanPort
    there: WanPort
    dc_names: tuple[str, ...]
    proxy: Proxy | None = None
    status_path: str = ""
    outcomes: list[HybridEPError | None] = field(default_factory=list)

    def both(self, work: Callable[[WanPort, Address], Any]) -> None:
        """`work(end, the other one's address)` at both ends at once."""
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(work, self.here, self.there.address)]
            running.append(pool.submit(work, self.there, self.here.address))
            for each in running:
                each.result(60)

    def close(self) -> None:
        """Both at once: neither has to wait for the other."""
        self.both(lambda end, _: end.close())


@contextmanager
def joined(
    way: str,
    folder: Path,
    limits: Limits | None = None,
    operation_s: float = TIMEOUTS.operation_s,
    bytes_per_s: float = 0.0,
) -> Iterator[Ends]:
    """Two ends, closed with the block. Checks that no thread stays. `bytes_per_s`: the link between DCs is so slow."""
    before = threading.active_count()
    sockets = partial(_over_sockets, way, folder, limits or Limits(), bytes_per_s)
    with _in_memory() if way == "memory" else sockets() as ends:
        for end in (ends.here, ends.there):
            end.mailboxes._operation_s = operation_s  # all other times stay long, for machines that are slow
        try:
            yield ends
        finally:
            ends.close()
    assert threading.active_count() <= before, "a thread was left behind"


@contextmanager
def _in_memory() -> Iterator[Ends]:
    wan = MemoryWan((1, 1), dc_names=("a", "b"))
    try:
        yield Ends(wan.port(Address(0, 0)), wan.port(Address(1, 0)), ("a", "b"))
    finally:
        wan.close()


@contextmanager
def _over_sockets(way: str, folder: Path, limits: Limits, bytes_per_s: float) -> Iterator[Ends]:
    kind, loop = way.split()
    topology = make_topology((2,) if kind == "unix" else (1, 1))
    if bytes_per_s:
        topology = replace(topology, links=LinkTable(2, {}, Link(bytes_per_s, 0.001)), emulate=True)
    job = JobUnderTest(topology, folder, TIMEOUTS, limits)
    job.new_loop, job.status = LOOPS[loop], True
    if kind == "tls":
        job.tls = certified(folder / "certs", job.topology)
    job.open()
    target = job.listeners[0].wan_address
    assert target is not None
    with ExitStack() as stack:
        proxy = None if kind == "unix" else stack.enter_context(Proxy(target))
        job.start(0, peers={})
        if proxy is not None:
            job.start(1, peers={0: proxy.address})
        others = (Address(0, 0), Address(0, 1) if kind == "unix" else Address(1, 0))
        with ThreadPoolExecutor(2) as pool:
            links = list(pool.map(lambda address: job.connect(*address, tcp=kind == "tcp"), others))
        ends = Ends(*links, job.topology.dc_names, proxy, f"{folder}/0-status")
        yield ends
        ends.outcomes += job.join().values()


@pytest.fixture(params=WAYS)
def join(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """`joined` over each way."""
    return partial(joined, request.param, tmp_path)


@pytest.fixture(params=WAN_WAYS)
def join_over_wan(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """`joined` over each way that a proxy can disturb."""
    return partial(joined, request.param, tmp_path)


def send(end: WanPort, to: Address, channel: str, body: bytes, traffic: Traffic = Traffic.TOKENS, **more: Any) -> None:
    """In two buffers, one of which may be empty."""
    end.send(to, channel, AT, [body[:2], memoryview(body)[2:]], traffic=traffic, **more)


def test_messages_of_all_sizes_arrive_in_order_both_ways_at_once(join: Callable[..., Any]) -> None:
    def work(end: WanPort, peer: Address) -> None:
        for number, size in enumerate(SIZES):
            body = bytes([number]) * size
            for channel, traffic in (("x", Traffic.EXPERTS), ("y", list(Traffic)[number % 5])):
                send(end, peer, channel, body, traffic, counts=(number, -1), urgency=number % 3)
        for channel in ("y", "x"):
            for number, size in enumerate(SIZES):
                message = end.receive(peer, channel, AT)
                assert (message.source, message.to, message.channel) == (peer, end.address, channel)
                assert (message.position, message.counts) == (AT, (number, -1))
                assert message.payload == bytes([number]) * size
                assert not message.payload.readonly

    with join() as ends:
        ends.both(work)
        ends.close()
    assert set(ends.outcomes) <= {None}


def test_a_message_to_oneself_arrives(join: Callable[..., Any]) -> None:
    with join() as ends:
        send(ends.here, ends.here.address, "x", b"to myself")
        assert bytes(ends.here.receive(ends.here.address, "x", AT).payload) == b"to myself"


def test_tokens_pass_what_waits_and_both_ends_may_send_before_either_receives(join: Callable[..., Any]) -> None:
    def work(end: WanPort, peer: Address) -> None:
        for number in range(30):
            send(end, peer, "slow", bytes([number]) * 50_000, Traffic.GRADIENTS)
        for _ in range(3):
            send(end, peer, "quick", b"ping")
            assert bytes(end.receive(peer, "quick", AT).payload) == b"ping"
        for number in range(30):
            assert end.receive(peer, "slow", AT).payload == bytes([number]) * 50_000

    with join(limits=Limits(window_bytes=100_000, unacked_bytes=60_000)) as ends:
        ends.both(work)


def test_what_is_urgent_goes_first(join_over_wan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent in the reverse order to a link that stands still."""
    order: list[str] = []
    sizes = {"gradients": 20_000_000, "experts later": 400_000, "experts soon": 300_000, "tokens": 100_000}
    with join_over_wan() as ends:
        deliver = ends.there.mailboxes.deliver

        def note(message: Message, message_id: int) -> None:
            order.append(message.channel)
            deliver(message, message_id)

        monkeypatch.setattr(ends.there.mailboxes, "deliver", note)
        ends.proxy.freeze()
        for channel, nbytes in sizes.items():
            traffic = Traffic[channel.partition(" ")[0].upper()]
            send(ends.here, ends.there.address, channel, bytes(nbytes), traffic, urgency=int("later" in channel))
            if traffic is Traffic.GRADIENTS:
                wait_until(ends, lambda link: link.queued_bytes["gradients"] > 0)
        wait_until(
            ends, lambda link: link.queued_bytes["experts"] >= 700_000 and link.queued_bytes["tokens"] >= 100_000
        )
        ends.proxy.thaw()
        for channel, nbytes in sizes.items():
            assert len(ends.there.receive(ends.here.address, channel, AT).payload) == nbytes
    assert order == list(reversed(sizes))


def wait_until(ends: Ends, condition: Callable[[LinkStatus], bool]) -> None:
    """Look at the first DC's end of the link between the two DCs until it is so."""
    deadline = time.monotonic() + 15
    while not condition(status := ask(ends.status_path).links['coordinator of DC "b"']):
        assert time.monotonic() < deadline, status


def test_cut_connections_lose_and_double_nothing(join_over_wan: Callable[..., Any]) -> None:
    def work(end: WanPort, peer: Address) -> None:
        for number in range(6):
            if end.address.dc == 0:
                ends.proxy.cut()
            send(end, peer, "x", bytes([number]) * 300_000)
            send(end, peer, "x", bytes([number]))
            assert end.receive(peer, "x", AT).payload == bytes([number]) * 300_000
            assert end.receive(peer, "x", AT).payload == bytes([number])

    with join_over_wan() as ends:
        ends.both(work)
        assert ends.proxy.connections > 1
    assert ends.outcomes == [None, None]


def test_another_position_is_an_error_that_names_both(join: Callable[..., Any]) -> None:
    with join() as ends:
        send(ends.here, ends.there.address, "x", b"")
        with pytest.raises(PositionMismatch) as caught:
            ends.there.receive(ends.here.address, "x", AT._replace(step=4))
        assert caught.value.peer == ends.here.address.describe(ends.dc_names)
        assert caught.value.mine.startswith("step 4")
        assert caught.value.theirs.startswith("step 3")


def test_what_has_arrived_can_be_taken_without_waiting(join: Callable[..., Any]) -> None:
    with join() as ends:
        arrived = threading.Semaphore(0)
        ends.there.watch("x", arrived.release)
        assert ends.there.take(ends.here.address, "x", AT) is None
        send(ends.here, ends.there.address, "other", b"no")
        send(ends.here, ends.there.address, "x", b"yes")
        assert arrived.acquire(timeout=20)
        message = ends.there.take(ends.here.address, "x", AT)
        assert message is not None
        assert bytes(message.payload) == b"yes"
        assert ends.there.take(ends.here.address, "x", AT) is None
        assert bytes(ends.there.receive(ends.here.address, "other", AT).payload) == b"no"
        assert not arrived.acquire(blocking=False)
        send(ends.here, ends.there.address, "x", b"")
        assert arrived.acquire(timeout=20)
        with pytest.raises(PositionMismatch):
            ends.there.take(ends.here.address, "x", AT._replace(step=4))


def test_a_wait_with_its_own_time_ends_only_that_wait(join: Callable[..., Any]) -> None:
    with join() as ends:
        with pytest.raises(DeadlineExceeded):
            ends.here.receive(ends.there.address, "x", AT, timeout_s=0.02)
        ends.here.check()
        send(ends.there, ends.here.address, "x", b"late")
        assert bytes(ends.here.receive(ends.there.address, "x", AT).payload) == b"late"


def test_the_runs_deadline_names_who_what_where_and_how_long(join: Callable[..., Any]) -> None:
    with join(operation_s=OPERATION_S) as ends:
        with pytest.raises(DeadlineExceeded) as caught:
            ends.here.receive(ends.there.address, "tokens", AT)
        error = caught.value
        assert error.peer == ends.there.address.describe(ends.dc_names)
        assert error.operation.startswith("tokens at step 3")
        assert error.layer == 1
        assert OPERATION_S <= error.waited_s < 10
        assert error.bytes_outstanding is None


def test_what_is_missing_of_a_message_when_its_time_is_up_is_counted(join_over_wan: Callable[..., Any]) -> None:
    with join_over_wan(operation_s=OPERATION_S, bytes_per_s=1e6) as ends:
        send(ends.there, ends.here.address, "tokens", bytes(20_000_000))
        wait_until(ends, lambda link: link.received_bytes > 0)
        with pytest.raises(DeadlineExceeded) as caught:
            ends.here.receive(ends.there.address, "tokens", AT)
        assert 0 < caught.value.bytes_outstanding < 20_000_000
        assert caught.value.peer == ends.there.address.describe(ends.dc_names)


def test_who_departs_is_heard_to_the_end_and_then_named_with_its_last_place(join: Callable[..., Any]) -> None:
    with join() as ends:
        leaver, stayer = ends.there, ends.here
        send(leaver, stayer.address, "x", b"last words" * 100_000)
        leaver.close()
        assert len(stayer.receive(leaver.address, "x", AT).payload) == 1_000_000
        with pytest.raises(PositionMismatch, match=r"its end \(after step 3, micro-batch 0, layer 1, dispatch\)"):
            stayer.receive(leaver.address, "x", AT)
        with pytest.raises(PositionMismatch, match=r"an exchange|its end"):
            stayer.expect([leaver.address], AT)
        with pytest.raises(PeerLost, match=r"ended .* while x waits for its next message"):
            stayer.receive(leaver.address, "x", AT._replace(phase=Phase.MAILBOX))
        send(stayer, leaver.address, "x", b"too late")
        stayer.check()
    assert set(ends.outcomes) <= {None}


def test_a_failure_ends_every_wait_with_its_name_and_reason(join: Callable[..., Any]) -> None:
    with join() as ends, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ends.here.receive, ends.there.address, "x", AT)
        ends.there.fail("ValueError: loss is not finite")
        with pytest.raises(PeerLost, match="loss is not finite") as caught:
            waiting.result(10)
        assert caught.value.peer == ends.there.address.describe(ends.dc_names)
        for call in (ends.here.check, lambda: send(ends.here, ends.there.address, "x", b"")):
            with pytest.raises(PeerLost, match="loss is not finite"):
                call()


def test_nothing_is_sent_after_close_which_may_come_twice(join: Callable[..., Any]) -> None:
    with join() as ends:
        ends.here.close()
        ends.here.close()
        with pytest.raises(LocalProtocolError, match="send after close"):
            send(ends.here, ends.there.address, "x", b"")
