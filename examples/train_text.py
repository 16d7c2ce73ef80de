"""Train a byte-level MoE language model, alone or over several datacenters.

    python examples/train_text.py --shape demo --steps 20                             one worker, to try it
    hybridep run examples/topologies/two-dc.yaml -- python examples/train_text.py --shape demo --json run.json

Each worker trains on its own shard of the text: by default the documentation and the sources that come with Python. The
data depends on seed and worker, never on the plan: with exact codecs every plan gives the same losses.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script, too

import hybridep_rt
from examples import text_report
from examples.text_data import Text, held_out_batches, load_text, training_batch
from examples.text_model import TextModel
from examples.text_shapes import SHAPES

HELD_OUT_BATCHES = 4
SAY_EVERY_S = 1.0
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass
class Trainer:
    """One worker's model, data and measurements."""

    options: argparse.Namespace
    runtime: hybridep_rt.Runtime
    text: Text
    report: text_report.WorkerReport = field(default_factory=text_report.WorkerReport)
    held_out: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = self.options
        model = TextModel(SHAPES[options.shape], options.sequence, options.seed)
        self.model = model.to(DTYPES[options.dtype])
        self.optimizer = hybridep_rt.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01)
        tokens = options.batch * options.sequence * options.accumulate
        self.plan = self.runtime.attach(
            self.model, self.optimizer, tokens_per_step=tokens, micro_batches=options.accumulate
        )
        evaluation = held_out_batches(
            self.text,
            options.batch,
            options.sequence,
            count=HELD_OUT_BATCHES,
            worker=self.runtime.rank,
            workers=self.runtime.world_size,
        )
        self.evaluation = evaluation

    def train(self) -> Iterator[int]:
        """Yields the number of each step that is done, from 1."""
        options = self.options
        for step in range(1, options.steps + 1):
            before, started = self.runtime.metrics.snapshot(), time.monotonic()
            loss = self.step(step)
            seconds = time.monotonic() - started
            self.report.add(loss, seconds, self.runtime.metrics.snapshot().minus(before))
            if step == options.steps or (options.eval_every and step % options.eval_every == 0):
                self.held_out.append({"step": step, "loss": self.evaluate()})
            yield step

    def step(self, step: int) -> float:
        """One optimizer step; this worker's mean loss in nats per byte."""
        options, total = self.options, 0.0
        self.optimizer.zero_grad()
        for micro_batch in range(options.accumulate):
            last = micro_batch == options.accumulate - 1
            window = self.batch(step, micro_batch)
            with nullcontext() if last else self.runtime.no_sync():
                loss = self.model.loss(window)
                ((loss + hybridep_rt.aux_loss(self.model)) / options.accumulate).backward()
            total += loss.item() / options.accumulate
        if options.clip is not None:
            self.runtime.clip_grad_norm_(options.clip)
        self.optimizer.step()
        return total

    def batch(self, step: int, micro_batch: int) -> torch.Tensor:
        """This worker's data of one micro-batch."""
        options, runtime = self.options, self.runtime
        return training_batch(
            self.text,
            options.batch,
            options.sequence,
            seed=options.seed,
            step=step,
            micro_batch=micro_batch,
            worker=runtime.rank,
            workers=runtime.world_size,
        )

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the held-out batches of all workers."""
        mine = torch.stack([self.model.loss(window) for window in self.evaluation]).mean()
        return self.runtime.all_reduce(mine, "mean").item()

    def result(self, reports: list[text_report.WorkerReport]) -> text_report.Json:
        """The content of the JSON file."""
        return {
            "shape": {"name": self.options.shape, **asdict(SHAPES[self.options.shape])},
            "options": vars(self.options),
            "text": {"source": self.text.source, "digest": self.text.digest},
            "workers_per_dc": dict(zip(self.runtime.dc_names, self.runtime.layout.workers_per_dc, strict=True)),
            "codecs": asdict(self.runtime.rung),
            "codec_figures": {layer: asdict(each) for layer, each in self.runtime.codec_figures().items()},
            "emulated_compute_flops_per_s": self.runtime.emulated and self.runtime.emulated.flops_per_s,
            "plan": {"reason": self.plan.reason},
            "held_out": self.held_out,
            **text_report.summary(self.runtime, reports),
            **text_report.machine(),
        }


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Options, with the shape's defaults filled in."""
    parser = argparse.ArgumentParser("train_text", description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--steps", type=_positive, default=20)
    parser.add_argument("--batch", type=_positive, help="sequences of one worker's micro-batch")
    parser.add_argument("--sequence", type=_positive, help="bytes of one sequence")
    parser.add_argument("--accumulate", type=_positive, default=1, metavar="M", help="micro-batches per step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, metavar="NORM", help="largest norm of all gradients together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--eval-every", type=_positive, metavar="STEPS", help="held-out loss; always at the end")
    parser.add_argument("--json", metavar="FILE", help="write what was measured")
    parser.add_argument("--text", metavar="FILE", help="train on this file")
    options = parser.parse_args(words)
    options.batch = options.batch or SHAPES[options.shape].batch
    options.sequence = options.sequence or SHAPES[options.shape].sequence
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"a whole number from 1 is needed, not {text}")
    return int(text)


def show(trainer: Trainer) -> None:
    """Train, and say how far it is: with a bar if alone on a terminal, else in a line every second or so."""
    if trainer.runtime.rank != 0:
        for _ in trainer.train():
            pass
    elif sys.stdout.isatty() and trainer.runtime.world_size == 1:  # Open MPI shows its ranks a terminal that is none
        _show_bar(trainer)
    else:
        _show_lines(trainer)


def _show_bar(trainer: Trainer) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("starting", total=trainer.options.steps)
        for _ in trainer.train():
            bar.update(task, advance=1, description=_latest(trainer))


def _show_lines(trainer: Trainer) -> None:
    steps, said = trainer.options.steps, time.monotonic()
    for step in trainer.train():
        if step in (1, steps) or time.monotonic() - said >= SAY_EVERY_S:
            said = time.monotonic()
            print(f"step {step}/{steps}: {_latest(trainer)}", flush=True)


def _latest(trainer: Trainer) -> str:
    return f"loss {trainer.report.loss[-1]:.3f} at worker 0, {trainer.report.step_s[-1]:.2f} s per step"


def main(words: Sequence[str] | None = None) -> None:
    """Raises ConfigError for options or a text that make no sense, and whatever the runtime raises."""
    options = parse(words)
    if options.json is not None:
        text_report.check_destination(options.json)
    text = load_text(options.text)
    runtime = hybridep_rt.init()
    trainer = Trainer(options, runtime, text)
    if runtime.rank == 0:
        print(
            f"{options.shape} on {text.source}, {runtime.world_size} worker(s)\nplan: {trainer.plan.reason}", flush=True
        )
    show(trainer)
    reports = text_report.gather(runtime, trainer.report)
    if runtime.rank == 0:
        print(f"held-out loss {trainer.held_out[-1]['loss']:.4f} nats per byte", flush=True)
        if options.json is not None:
            text_report.write(options.json, trainer.result(reports))
    runtime.barrier()


if __name__ == "__main__":
    main()
