"""One worker of `benchmarks.overlap`: steps whose experts are decoded as they arrive, and on demand, in turns."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from torch import nn

import hybridep_rt
from benchmarks.intervals import interleave
from hybridep_rt.moe.holdings import Holdings

WARMUP = 2


class Block(nn.Module):
    """What comes before the experts takes `pre_s` of emulated compute, whatever it is; then a MoE layer."""

    def __init__(self, runtime: hybridep_rt.Runtime, hidden: int, ffn: int, experts: int, pre_s: float) -> None:
        super().__init__()
        self.before = nn.Linear(hidden, 1)
        self.moe = hybridep_rt.MoELayer(hidden, ffn, experts, 2)
        self._runtime = runtime
        self._pre_s = pre_s

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """[T,H] -> [T,H]"""
        emulated = self._runtime.emulated
        if emulated is None:
            raise RuntimeError("run with --emulate-compute")
        h = self._runtime.kernel(self.before, h, self._pre_s * emulated.flops_per_s)
        return h + self.moe(h)


class Clocked:
    """Seconds that the training thread spends on experts that come from elsewhere: waiting, decoding, handing on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        refresh = Holdings.refresh

        def timed(holdings: Holdings) -> None:
            start = time.perf_counter()
            refresh(holdings)
            self.seconds += time.perf_counter() - start

        Holdings.refresh = timed  # type: ignore[method-assign]


def arms_of(
    runtime: hybridep_rt.Runtime, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor
) -> dict[str, Callable[[], tuple[float, float]]]:
    """Seconds of one step from the optimizer to the end of the next backward pass, and those spent on experts."""
    clocked, soon = Clocked(), runtime.background.soon

    def step(in_background: bool) -> tuple[float, float]:
        runtime.background.soon = soon if in_background else lambda job: None  # type: ignore[method-assign]
        before = clocked.seconds
        start = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        return time.perf_counter() - start, clocked.seconds - before

    return {"as they arrive": lambda: step(True), "on demand": lambda: step(False)}


@click.command()
@click.option("--layers", type=int, required=True)
@click.option("--hidden", type=int, required=True)
@click.option("--ffn", type=int, required=True)
@click.option("--experts", type=int, required=True)
@click.option("--tokens", type=int, required=True)
@click.option("--pre-s", type=float, required=True)
@click.option("--rounds", type=click.IntRange(1), required=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(layers: int, hidden: int, ffn: int, experts: int, tokens: int, pre_s: float, rounds: int, out: Path) -> None:
    """Worker 0 writes the slowest worker's steps, and the longest time that one spent on experts in each."""
    runtime = hybridep_rt.init()
    model = nn.Sequential(*(Block(runtime, hidden, ffn, experts, pre_s) for _ in range(layers)))
    optimizer = hybridep_rt.AdamW(model.parameters())
    runtime.attach(model, optimizer, tokens_per_step=tokens)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(runtime.rank))
    model(x).square().mean().backward()
    arms = arms_of(runtime, model, optimizer, x)
    before = runtime.metrics.snapshot()
    taken = interleave(arms, rounds, warmup=WARMUP)
    sent = runtime.metrics.snapshot().minus(before)
    slowest = runtime.all_reduce(torch.tensor(list(taken.values()), dtype=torch.float64), "max")
    if runtime.rank == 0:
        found = {
            name: {"step_s": s[:, 0].tolist(), "experts_s": s[:, 1].tolist()}
            for name, s in zip(taken, slowest, strict=True)
        }
        steps = (rounds + WARMUP) * len(arms)
        per_step = {f"DC {dc}, class {kind}": n / steps for (dc, kind), n in sent.sent_bytes.items()}
        out.write_text(json.dumps({"arms": found, "sent_bytes_per_step": per_step}))
    runtime.shutdown()


if __name__ == "__main__":
    main()
