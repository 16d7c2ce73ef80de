"""How fast codecs encode and decode, on one thread, against a copy of the same tensor in the same run.

    python -m benchmarks.codecs --json benchmarks/results/codecs.json [--quick]

A ratio of 1 is the time of `memcpy`. Weights move a little between steps, so that a delta codec always has something to
say. `restore + add` decodes a payload onto a copy in one pass, against decoding it to a tensor that is then added.
`step + encode` is the runtime's AdamW, which encodes while it updates, against an update and an encoding done apart:
with torch's AdamW as it is by default, with torch's fused one, and with the runtime's own kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from rich.console import Console
from rich.table import Table

import hybridep_rt
from benchmarks.intervals import Interval, interleave, median_interval, ratio_interval
from benchmarks.report import report, write_report
from hybridep_rt.codecs.codec import Codec, make_codec
from hybridep_rt.codecs.update import update_and_encode
from hybridep_rt.codecs.warm_up import warm_up

MILLION = 2**20
SIZES = (MILLION, 8 * MILLION, 32 * MILLION)
SPECS = (
    *("bf16", "int8", "delta-1bit:t=2", "delta-1bit", "delta-1bit:predict=0.5", "delta-2bit"),
    *("delta-ternary:dead=1:predict=0.5:zstd=1", "delta-ternary:t=2:dead=1:predict=0.25:zstd=1"),
    *("delta-topk:keep=0.01", "1bit", "1bit:vs=16", "1bit:adapt=1", "2bit", "2bit:adapt=1"),
    *("ternary", "ternary:sent=0.2", "4bit", "topk:keep=0.01"),
)
LIMITS = {"delta-1bit:t=2": (2.5, 1.0), "delta-topk:keep=0.01": (2.5, 1.0), "int8": (1.5, None)}
"""What encoding and decoding may take at most, in copies."""

Clock = Callable[[], float]


class Pass(NamedTuple):
    """Seconds of one payload's two ends."""

    encode_s: float
    decode_s: float


class Row(NamedTuple):
    """One codec at one size: GB of float32 per second, and times as a multiple of a copy's."""

    elements: int
    spec: str
    encode_gb_per_s: float
    decode_gb_per_s: float
    encode: Interval
    decode: Interval


def one_pass(spec: str, steps: tuple[torch.Tensor, torch.Tensor], clock: Clock) -> Callable[[], Pass]:
    """Sends one of two states of a tensor in turn, through a stream that is past its key frame."""
    sender, receiver = make_codec(spec), make_codec(spec)
    copy = torch.empty_like(steps[0])
    receiver.decode(sender.encode(steps[0]), copy)
    count = 0

    def run() -> Pass:
        nonlocal count
        count += 1
        start = clock()
        payload = sender.encode(steps[count % 2])
        middle = clock()
        receiver.decode(payload, copy)
        return Pass(middle - start, clock() - middle)

    return run


def one_copy(values: torch.Tensor, clock: Clock) -> Callable[[], Pass]:
    """memcpy, once for each end, so that each has its own neighbour in time."""
    into = torch.empty_like(values)

    def copy() -> float:
        start = clock()
        into.copy_(values)
        return clock() - start

    return lambda: Pass(copy(), copy())


def measure(elements: int, rounds: int, clock: Clock) -> list[Row]:
    """All codecs at one size, in turns."""
    values = torch.randn(elements, generator=torch.Generator().manual_seed(0)) * 0.02
    moved = values + 1e-3 * torch.randn(elements, generator=torch.Generator().manual_seed(1))
    arms = {spec: one_pass(spec, (values, moved), clock) for spec in SPECS}
    taken = interleave({"copy": one_copy(values, clock), **arms}, rounds, warmup=2)
    return [_row(elements, spec, taken) for spec in SPECS]


def _row(elements: int, spec: str, taken: Mapping[str, list[Pass]]) -> Row:
    gigabytes = elements * 4 / 1e9
    (encode_s, decode_s), (copy_s, copy_again_s) = (zip(*taken[name], strict=True) for name in (spec, "copy"))
    return Row(
        elements,
        spec,
        gigabytes / median_interval(encode_s).value,
        gigabytes / median_interval(decode_s).value,
        ratio_interval(copy_s, encode_s),
        ratio_interval(copy_again_s, decode_s),
    )


class Restored(NamedTuple):
    """Restoring and adding a payload of one codec, in one pass as a part of the time of the two done apart."""

    elements: int
    spec: str
    one_pass: Interval


def measure_restore(elements: int, rounds: int, clock: Clock) -> list[Restored]:
    """A delta codec's payload onto a copy, against its gradient codec's into a tensor that is then added."""
    found = []
    for delta, apart in (("delta-1bit", "1bit"), ("delta-topk:keep=0.01", "topk:keep=0.01")):
        values = torch.randn(elements, generator=torch.Generator().manual_seed(0))
        arms = {"one": _restore_and_add(delta, values, clock), "two": _restore_then_add(apart, values, clock)}
        taken = interleave(arms, rounds, warmup=2)
        found.append(Restored(elements, delta, ratio_interval(taken["two"], taken["one"])))
    return found


def _restore_and_add(spec: str, values: torch.Tensor, clock: Clock) -> Callable[[], float]:
    step = one_pass(spec, (values, values * 1.01), clock)
    return lambda: step().decode_s


def _restore_then_add(spec: str, values: torch.Tensor, clock: Clock) -> Callable[[], float]:
    codec: Codec = make_codec(spec)
    payload = codec.encode(values)
    change, copy = torch.empty_like(values), torch.zeros_like(values)

    def run() -> float:
        start = clock()
        codec.decode(payload, change)
        copy.add_(change)
        return clock() - start

    return run


class Stepped(NamedTuple):
    """An AdamW step and an encoding in one pass, as a part of the time of the two done apart with `apart`'s AdamW."""

    elements: int
    spec: str
    apart: str
    one_pass: Interval


STEPPED = ("delta-1bit:t=2", "delta-1bit", "int8", "bf16")


def measure_step(elements: int, rounds: int, clock: Clock) -> list[Stepped]:
    """All ways to make a step and encode what it leaves, in turns."""
    found = []
    for spec in STEPPED:
        arms = {
            "fused": _step_and_encode(hybridep_rt.AdamW, spec, elements, clock, fused=True),
            "torch": _step_and_encode(torch.optim.AdamW, spec, elements, clock),
            "torch fused": _step_and_encode(partial(torch.optim.AdamW, fused=True), spec, elements, clock),
            "own": _step_and_encode(hybridep_rt.AdamW, spec, elements, clock),
        }
        taken = interleave(arms, rounds, warmup=2)
        found += [
            Stepped(elements, spec, apart, ratio_interval(taken[apart], taken["fused"]))
            for apart in arms
            if apart != "fused"
        ]
    return found


def _step_and_encode(
    optimizer_of: Callable[..., Any], spec: str, elements: int, clock: Clock, *, fused: bool = False
) -> Callable[[], float]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(elements, generator=generator) * 0.02)
    weights.grad = torch.randn(elements, generator=generator)
    optimizer, codec = optimizer_of([weights]), make_codec(spec)
    codec.encode(weights)
    if fused:
        optimizer.publish_with(lambda step: update_and_encode(codec, weights, step(weights, None)))

    def run() -> float:
        start = clock()
        optimizer.step()
        if not fused:
            codec.encode(weights)
        return clock() - start

    return run


def table(rows: list[Row]) -> Table:
    """Speeds, ratios, and whether the limits hold."""
    found = Table(title="Codecs on one thread", caption="times in copies of the same tensor: median [95 % interval]")
    for column in ("values", "codec", "encode GB/s", "decode GB/s", "encode / copy", "decode / copy", "limits"):
        found.add_column(column, justify="left" if column in ("codec", "limits") else "right")
    for row in rows:
        found.add_row(
            f"{row.elements // MILLION} Mi",
            row.spec,
            f"{row.encode_gb_per_s:.1f}",
            f"{row.decode_gb_per_s:.1f}",
            _shown(row.encode),
            _shown(row.decode),
            _limits(row),
        )
    return found


def _shown(ratio: Interval) -> str:
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _limits(row: Row) -> str:
    if row.spec not in LIMITS:
        return ""
    pairs = zip((row.encode.value, row.decode.value), LIMITS[row.spec], strict=True)
    return ", ".join(
        "none" if limit is None else f"{limit} {'kept' if ratio <= limit else 'MISSED'}" for ratio, limit in pairs
    )


def _intervals(row: Row | Restored | Stepped) -> dict[str, object]:
    parts = row._asdict()
    return {
        name: {"value": part.value, "low": part.low, "high": part.high} if isinstance(part, Interval) else part
        for name, part in parts.items()
    }


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
@click.option("--quick", is_flag=True, help="One size and fewer rounds: to see that it works.")
@click.option("--clock", type=click.Choice(["wall", "cpu"]), default="wall", help="cpu: on a machine that is shared.")
def main(json_path: Path | None, quick: bool, clock: str) -> None:
    """Encode and decode with every codec, in turns with a copy of the same tensor."""
    torch.set_num_threads(1)
    warm_up(SPECS)
    now = time.perf_counter if clock == "wall" else time.thread_time
    sizes, rounds = (SIZES[:1], 7) if quick else (SIZES, 25)
    rows = [row for elements in sizes for row in measure(elements, rounds, now)]
    restored = measure_restore(sizes[-1], rounds, now)
    console = Console(width=150)
    console.print(table(rows))
    for each in restored:
        console.print(f"restore + add of {each.spec} in one pass: {_shown(each.one_pass)} of the two done apart")
    stepped = measure_step(sizes[-1], rounds, now)
    for each in stepped:
        apart = f"of the two apart with AdamW of {each.apart}"
        console.print(f"step + encode of {each.spec} in one pass: {_shown(each.one_pass)} {apart}")
    if json_path is not None:
        results = [_intervals(row) for row in (*rows, *restored, *stepped)]
        write_report(json_path, report("codecs", {"quick": quick, "clock": clock, "rounds": rounds}, results))


if __name__ == "__main__":
    main()
