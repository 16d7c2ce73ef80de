"""YAML -> Topology.

A file has one of two forms. The short one is symmetric, with levels from the outside in:

    cluster: demo
    levels:
      - {name: dc,   count: 2, bandwidth: 100 Mbit/s, latency: 40 ms}     # datacenters "a" and "b"
      - {name: node, count: 2, bandwidth: 10 GB/s,    latency: 20 us}
      - {name: gpu,  count: 4, bandwidth: 300 GB/s}

The first level's bandwidth is that of a DC's uplink, and of its downlink, which its links to all others share.
`latency` is the round-trip time, at every level; it must be given at the first, where `jitter`, `loss` and `queue` may
be given too. Everything runs on this machine unless `hosts` ({a: ADDRESS or [ADDRESS, ...]}) says otherwise. `wan` and
`listen` ({a: "host:port"}) are as below.

The explicit form names its datacenters, which may be uneven, and the link of every ordered pair:

    cluster: demo
    datacenters:
      lyon: {workers: 4, wan: "lyon.example.org:7000", listen: "10.0.0.5:7000", uplink: 1 Gbit/s, downlink: 2 Gbit/s}
      bonn: {hosts: [{address: 10.1.0.1, workers: 4}, {address: 10.1.0.2, workers: 2}], wan: "bonn.example.org:7000"}
    links:
      lyon -> bonn: {bandwidth: 200 Mbit/s, rtt: 40 ms, jitter: 2 ms, loss: 0.1 %, queue: 64 KiB}
      bonn -> lyon: {bandwidth: 100 Mbit/s, rtt: 40 ms}
      # or both at once: lyon <-> bonn: {bandwidth: {up: 200 Mbit/s, down: 100 Mbit/s}, rtt: 40 ms}
      # or as a list:    - {from: lyon, to: bonn, bandwidth: 200 Mbit/s, rtt: 40 ms}
    defaults:
      link: {bandwidth: 100 Mbit/s, rtt: 40 ms}              # for pairs, and for keys, that `links` leave out
      datacenter: {node_bandwidth: 10 GB/s, worker_bandwidth: 300 GB/s}   # between hosts, and inside a host

`wan` is where peers reach a DC's coordinator; `listen` where it binds, if that differs (NAT). `uplink` and `downlink`
bound a DC's sum over all peers. `reachable: false` says that nobody can open connections to a DC: it only dials.

Both forms know `emulate: true` (coordinators emulate each link's rate and delay), `emulate_compute: 50 TFLOP/s`
(kernels are replaced by waits), `tls: {folder: certs}` (certificates and keys of the links between DCs), `congestion:
bbr` (TCP congestion control between DCs), `codec: default` (how compressed things cross the WAN: a rung of the ladder,
what differs from it, as in `default,gradients=2bit`), `staleness: 1` (copies of experts are one optimizer step behind),
`replan: 500` (look for a better plan after every so many optimizer steps)
and `insecure: true` (no TLS between coordinators). If all DCs and hosts are alike, the explicit form is symmetric too.
Every quantity has a unit. Unknown keys are errors.
"""

from __future__ import annotations

from dataclasses import replace

from topology import read_levels, read_sites
from topology.document import Item, read
from topology.model import Topology
from topology.read_fields import REPLAN_MAX, codec, flops


def parse(text: str, source: str = "<text>") -> Topology:
    """Read a topology from text; `source` names it in errors.

    Raises TopologyError: one line with source, line, key path, what was found and what is allowed.
    """
    document = read(text, source)
    names = {str(key.node.value) for key, _ in document.entries("a mapping that starts with 'cluster: NAME'")}
    if not {"levels", "datacenters"} & names:
        document.fields({*read_levels.KEYS, *read_sites.KEYS})
    if ("levels" in names) == ("datacenters" in names):
        raise document.error("needs either 'levels' (symmetric) or 'datacenters' (explicit), and not both")
    form = read_levels if "levels" in names else read_sites
    fields = document.fields(form.KEYS, ("cluster",))
    reader = read_levels.read_levels if "levels" in names else read_sites.read_sites
    return replace(
        reader(fields, cluster=fields["cluster"].name(), source=source),
        emulate="emulate" in fields and fields["emulate"].flag(),
        insecure="insecure" in fields and fields["insecure"].flag(),
        tls_folder=_folder(fields["tls"]) if "tls" in fields else None,
        congestion=fields["congestion"].name() if "congestion" in fields else "",
        codec=codec(fields["codec"]) if "codec" in fields else "",
        staleness=fields["staleness"].whole(0, 1) if "staleness" in fields else None,
        replan=fields["replan"].whole(0, REPLAN_MAX) if "replan" in fields else None,
        emulate_compute_flops_per_s=flops(fields["emulate_compute"]) if "emulate_compute" in fields else None,
    )


def _folder(item: Item) -> str:
    return item.fields(("folder",), ("folder",))["folder"].text("the path of a folder")
