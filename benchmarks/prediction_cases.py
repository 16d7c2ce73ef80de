"""The jobs whose steps are predicted and measured: sites, links, experts, tokens, routing, compute. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hybridep_rt.planner.economics import LayerShape

MATRICES = 2


@dataclass(frozen=True, slots=True)
class Case:
    """`links`: one rate for all DCs' uplinks, or a rate for each directed link, in the order of (source, target).

    `tokens` are of one worker and step, `micro_batches` together. `compute`: emulated rate of a worker; "" is real.
    """

    name: str
    workers: tuple[int, ...]
    links: str | tuple[str, ...]
    rtt_ms: int
    hidden: int
    ffn: int
    experts: int
    tokens: int
    top_k: int = 2
    layers: int = 2
    micro_batches: int = 1
    routing: str = "uniform"
    compute: str = "20 GFLOP/s"
    chunks: int = 1

    @property
    def shape(self) -> LayerShape:
        """Of every layer."""
        return LayerShape(self.hidden, self.ffn, self.experts, self.top_k, MATRICES * self.hidden * self.ffn)

    @property
    def is_even(self) -> bool:
        """Whether all DCs and links are alike."""
        return isinstance(self.links, str)

    def topology(self, cluster: str) -> str:
        """Its YAML."""
        head = f"cluster: {cluster}\nemulate: true\n" + (f"emulate_compute: {self.compute}\n" if self.compute else "")
        if isinstance(self.links, str):
            level = f"{{name: dc, count: {len(self.workers)}, bandwidth: {self.links}, latency: {self.rtt_ms} ms}}"
            inside = f"{{name: worker, count: {self.workers[0]}, bandwidth: 2 GB/s}}"
            return f"{head}levels:\n  - {level}\n  - {inside}\n"
        names = "abcdefgh"[: len(self.workers)]
        sites = "".join(f"  {name}: {{workers: {count}}}\n" for name, count in zip(names, self.workers, strict=True))
        pairs = [(a, b) for a in names for b in names if a != b]
        links = "".join(
            f"  {a} -> {b}: {{bandwidth: {rate}, rtt: {self.rtt_ms} ms}}\n"
            for (a, b), rate in zip(pairs, self.links, strict=True)
        )
        return f"{head}datacenters:\n{sites}links:\n{links}"


_SMALL, _LARGE = (256, 128), (256, 1024)

CASES = (
    Case("2 even, small experts, many tokens", (1, 1), "100 Mbit/s", 20, *_SMALL, experts=8, tokens=1024),
    Case("2 even, large experts, few tokens", (1, 1), "100 Mbit/s", 20, *_LARGE, experts=8, tokens=256),
    Case("2 even, large experts, 2 micro-batches", (1, 1), "100 Mbit/s", 20, *_LARGE, 8, 2048, micro_batches=2),
    Case("2 even, 25 Mbit/s", (1, 1), "25 Mbit/s", 40, *_SMALL, experts=8, tokens=512),
    Case("2 even, 1 Gbit/s", (1, 1), "1 Gbit/s", 20, *_SMALL, experts=8, tokens=4096),
    Case("2 even, 2 workers each", (2, 2), "100 Mbit/s", 20, *_SMALL, experts=8, tokens=512),
    Case("2 uneven, directed links", (2, 1), ("100 Mbit/s", "40 Mbit/s"), 30, *_SMALL, experts=6, tokens=512),
    Case("2 even, zipf", (1, 1), "100 Mbit/s", 20, *_SMALL, 16, 1024, routing="zipf:1.2"),
    Case("2 even, 4 chunks, slow compute", (1, 1), "100 Mbit/s", 20, *_SMALL, 8, 1024, compute="1 GFLOP/s", chunks=4),
    Case("3 even", (1, 1, 1), "100 Mbit/s", 20, *_SMALL, experts=6, tokens=768),
    Case(
        "3 uneven",
        (1, 1, 1),
        ("200 Mbit/s", "50 Mbit/s", "200 Mbit/s", "50 Mbit/s", "50 Mbit/s", "50 Mbit/s"),
        20,
        *_SMALL,
        experts=6,
        tokens=512,
    ),
    Case("3 even, zipf, few tokens", (1, 1, 1), "100 Mbit/s", 40, *_LARGE, 12, 128, routing="zipf:1.2"),
    Case("4 even, small experts", (1, 1, 1, 1), "100 Mbit/s", 20, *_SMALL, experts=8, tokens=512),
    Case("4 even, large experts, 1 Gbit/s", (1, 1, 1, 1), "1 Gbit/s", 20, *_LARGE, experts=8, tokens=512),
    Case("2 even, real compute", (1, 1), "100 Mbit/s", 20, *_SMALL, experts=8, tokens=1024, compute=""),
    Case("2 even, real compute, large experts", (1, 1), "200 Mbit/s", 20, *_LARGE, 8, 512, compute=""),
)
