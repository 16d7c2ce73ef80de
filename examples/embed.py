"""The smallest program that trains with the runtime: an ordinary loop, and three lines that are ours.

python examples/embed.py                                                          one worker, to try it
hybridep run examples/topologies/two-dc.yaml -- python examples/embed.py          four workers in two DCs
"""

from __future__ import annotations

import torch
from torch import nn

import hybridep_rt

TOKENS, HIDDEN = 512, 32


def main() -> None:
    """Learn to reverse the entries of random vectors."""
    runtime = hybridep_rt.init()  # ours, line 1
    model = nn.Sequential(
        nn.Linear(HIDDEN, HIDDEN),
        hybridep_rt.MoELayer(HIDDEN, ffn=64, num_experts=8, top_k=2),  # ours, line 2
        nn.Linear(HIDDEN, HIDDEN),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plan = runtime.attach(model, optimizer, tokens_per_step=TOKENS)  # ours, line 3
    if runtime.rank == 0:
        print(f"{runtime.world_size} workers. {plan.reason}")

    torch.manual_seed(runtime.rank)  # each worker has data of its own
    for step in range(1, 31):
        x = torch.randn(TOKENS, HIDDEN)
        loss = nn.functional.mse_loss(model(x), x.flip(-1))
        optimizer.zero_grad()
        (loss + hybridep_rt.aux_loss(model)).backward()
        optimizer.step()
        if runtime.rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
