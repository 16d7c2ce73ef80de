"""A worker of a small training job whose parameters are compared bit by bit. Usage: cut_job.py FOLDER STEPS."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import hybridep_rt

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
runtime = hybridep_rt.init()
torch.manual_seed(0)
layers = [hybridep_rt.MoELayer(32, 64, 4, 2) for _ in range(2)]
model = torch.nn.Sequential(torch.nn.Linear(8, 32), *layers, torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
runtime.attach(model, optimizer)
generator = torch.Generator().manual_seed(runtime.rank)
for step in range(steps):
    optimizer.zero_grad()
    x = torch.randn(64, 8, generator=generator)
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    if runtime.rank == 0:
        print("step", step, flush=True)
torch.save(model.state_dict(), folder / f"{runtime.rank}.pt")
