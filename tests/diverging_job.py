"""A worker of a tiny training job in which one worker goes another way. Usage: diverging_job.py WAY WHO."""

from __future__ import annotations

import sys

import torch

import hybridep_rt

way, who = sys.argv[1], int(sys.argv[2])
runtime = hybridep_rt.init()
model = torch.nn.Sequential(hybridep_rt.MoELayer(8, 8, 4, 2), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
runtime.attach(model, optimizer)
other = runtime.rank == who
for step in range(2 if other and way == "ends" else 4):
    if other and way == "evaluates" and step == 2:
        with torch.no_grad():
            model(torch.randn(4, 8))
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    if not (other and way == "skips" and step == 2):
        optimizer.step()
