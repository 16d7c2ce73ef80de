"""The relay process: packets from each DC's TUN device through the shaping machine to the others'. A thin shell.

    python -m launcher.testbed.relay PARENT < WIRING       (JSON; writes "ready" once the devices exist)

It dies with the process that started it; its devices die with it.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from math import inf
from pathlib import Path
from time import monotonic

from launcher.processes import die_with_parent
from launcher.testbed import control
from launcher.testbed.packets import PACKET_BYTES_MAX, parse
from launcher.testbed.priority import keep_time
from launcher.testbed.shaping import Network
from launcher.testbed.tun import open_tun, set_super_packets
from topology.errors import ConfigError

# One device may not keep the others waiting for longer than this many packets take.
_READS_AT_ONCE = 64
# An idle virtual machine wakes up late by up to this after a long sleep, by a few microseconds after a short one.
_OVERSLEEP_S = 0.0005
# Up to this rate single packets cost little, and a super-packet would fill the line for milliseconds.
_SUPER_PACKETS_ABOVE_BYTES_PER_S = 50e6 / 8


class Relay:
    """Descriptors around a Network."""

    def __init__(self, wiring: control.Wiring) -> None:
        self._names = [site.name for site in wiring.sites]
        self._targets = {socket.inet_aton(site.address): index for index, site in enumerate(wiring.sites)}
        self._rates = [site.access.uplink_bytes_per_s for site in wiring.sites]
        self._network = Network([site.access for site in wiring.sites], wiring.shapes, wiring.seed)
        self._devices = [open_tun(Path(site.namespace)) for site in wiring.sites]
        self._sources = {device: index for index, device in enumerate(self._devices)}
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._control.bind(wiring.control)
        self._control.setblocking(False)
        for index in range(len(self._devices)):
            self._choose_offloads(index)

    def run(self) -> None:
        """Relay for ever."""
        network = self._network
        wanted = [*self._devices, self._control.fileno()]
        while True:
            for target, packet in network.due(monotonic()):
                # A device that is down or out of memory loses the packet, as a network would.
                with suppress(OSError):
                    os.write(self._devices[target], packet)
            ready = select.select(wanted, (), (), _sleep_s(network.next_due_s - monotonic()))[0]
            for descriptor in ready:
                source = self._sources.get(descriptor)
                if source is None:
                    self._obey()
                else:
                    self._take_in(descriptor, source)

    def _take_in(self, device: int, source: int) -> None:
        for _ in range(_READS_AT_ONCE):
            try:
                data = os.read(device, PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            packet = parse(data)
            target = None if packet is None else self._targets.get(packet.target)
            if packet is not None and target is not None and target != source:
                self._network.send(monotonic(), (source, target), packet.size_bytes, data, packet.segments)

    def _obey(self) -> None:
        """One datagram: change a link; answer nothing, or what is wrong with it."""
        data, sender = self._control.recvfrom(control.MESSAGE_BYTES_MAX + 1)
        try:
            self._apply(control.unpack_change(data))
            answer = b""
        except ConfigError as error:
            answer = str(error).encode()[: control.MESSAGE_BYTES_MAX]
        if sender:
            with suppress(OSError):
                self._control.sendto(answer, sender)

    def _apply(self, change: control.Change) -> None:
        for name in (change.source, change.target):
            if name not in self._names:
                raise ConfigError(f"no DC {name!r:.70}, there are: {', '.join(self._names)}")
        pair = (self._names.index(change.source), self._names.index(change.target))
        if pair not in self._network.lines:
            raise ConfigError(f"no link {change.source} -> {change.target}")
        now = monotonic()
        if change.shape:
            self._network.reshape(now, pair, control.changed(self._network.lines[pair].shape, change))
            self._choose_offloads(pair[0])
        if change.cut_s is not None:
            self._network.cut(now, pair, change.cut_s)
        if change.stall_s is not None:
            self._network.stall(now, pair, change.stall_s)

    def _choose_offloads(self, index: int) -> None:
        """Super-packets only where all links of the DC are fast."""
        shapes = [line.shape for (source, _), line in self._network.lines.items() if source == index]
        slowest = min([self._rates[index], *(shape.rate_bytes_per_s for shape in shapes)])
        set_super_packets(self._devices[index], slowest > _SUPER_PACKETS_ABOVE_BYTES_PER_S)


def _sleep_s(wait_s: float) -> float | None:
    """How long to sleep when something is due in `wait_s`: first the long part of it, then the short rest."""
    if wait_s == inf:
        return None
    return max(wait_s if wait_s < 2 * _OVERSLEEP_S else wait_s - _OVERSLEEP_S, 0.0)


def main() -> None:
    """Read the wiring, open the devices, say so, relay."""
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        relay = Relay(control.unpack_wiring(sys.stdin.buffer.read(control.NETWORK_BYTES_MAX + 1)))
    except (ConfigError, OSError) as error:
        raise SystemExit(f"testbed relay: {error}") from None
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    keep_time()
    # Nothing here makes reference cycles, and a collection would hold up packets.
    gc.disable()
    relay.run()


if __name__ == "__main__":
    main()
