"""Experts that are decoded beside the training thread, and copies that may be one step behind."""

from __future__ import annotations

from collections import deque

import pytest
import torch

import hybridep_rt
from hybridep_rt.codecs.codec import Codecs
from hybridep_rt.errors import CodecError, ConfigError, PositionMismatch
from hybridep_rt.moe.arrivals import Arrivals
from hybridep_rt.planner.makers import domains, replicate_all
from hybridep_rt.planner.plan import Layout, Plan
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Message
from hybridep_rt.protocol.position import Phase, Position
from tests.fleet import run_fleet
from tests.oracle import Case, DenseModel, compare, loss_of, train_distributed

A, B = Address(0, 0), Address(1, 0)


class Wan:
    """Messages that are here; a `receive` of one that is not says so."""

    def __init__(self) -> None:
        self.here: dict[Address, deque[Message]] = {A: deque(), B: deque()}
        self.watchers: dict[str, object] = {}
        self.waited_for: list[tuple[Address, int, int]] = []

    def arrive(self, source: Address, version: int, expert: int) -> None:
        at = Position(version, 0, 3, Phase.EXPERTS, expert)
        self.here[source].append(Message(source, A, "experts/3", at, memoryview(b"x"), ()))
        self.watchers["experts/3"]()

    def watch(self, channel, notify) -> None:
        self.watchers[channel] = notify

    def take(self, source, channel, position):
        if not self.here[source]:
            return None
        message = self.here[source].popleft()
        if message.position != position:
            raise PositionMismatch(mine=position.describe(), peer="p", theirs=message.position.describe())
        return message

    def receive(self, source, channel, position):
        if not self.here[source]:
            self.waited_for.append((source, position.step, position.chunk))
            return Message(source, A, channel, position, memoryview(b"late"), ())
        return self.take(source, channel, position)


class Jobs:
    """A background that runs when it is told to."""

    def __init__(self) -> None:
        self.due = deque()

    def soon(self, job) -> None:
        self.due.append(job)

    def run(self) -> None:
        while self.due:
            self.due.popleft()()


def made(take_in=None):
    wan, jobs, taken = Wan(), Jobs(), []
    homes = {1: A, 4: B, 7: A}
    arrivals = Arrivals(3, wan, jobs, take_in or (lambda v, e, payload: taken.append((v, e, bytes(payload)))))
    arrivals.rebind(homes)
    return arrivals, wan, jobs, taken


def test_nothing_is_taken_before_its_version_is_opened():
    arrivals, wan, jobs, taken = made()
    wan.arrive(A, 1, 1)
    jobs.run()
    assert taken == []
    arrivals.open(1)
    jobs.run()
    assert taken == [(1, 1, b"x")]
    wan.arrive(A, 1, 7)
    wan.arrive(A, 2, 1)
    jobs.run()
    assert taken == [(1, 1, b"x"), (1, 7, b"x")]


def test_only_what_has_not_arrived_is_waited_for():
    arrivals, wan, jobs, taken = made()
    arrivals.open(1)
    wan.arrive(B, 1, 4)
    wan.arrive(A, 1, 1)
    jobs.run()
    arrivals.finish(1)
    assert wan.waited_for == [(A, 1, 7)]
    assert taken == [(1, 1, b"x"), (1, 4, b"x"), (1, 7, b"late")] or taken[-1] == (1, 7, b"late")
    arrivals.finish(1)
    assert len(taken) == 3


def test_versions_of_an_expert_come_in_their_order():
    arrivals, wan, jobs, taken = made()
    arrivals.open(2)
    for version in (1, 2):
        wan.arrive(B, version, 4)
    arrivals.finish(1)
    assert [each[:2] for each in taken] == [(1, 1), (1, 7), (1, 4)]
    jobs.run()
    assert taken[-1] == (2, 4, b"x")


def test_what_the_background_meets_is_raised_where_it_is_waited_for():
    def broken(version, expert, payload):
        raise CodecError("no such payload")

    arrivals, wan, jobs, _ = made(broken)
    arrivals.open(1)
    wan.arrive(A, 1, 1)
    jobs.run()
    with pytest.raises(CodecError, match="no such payload"):
        arrivals.finish(1)
    arrivals, wan, jobs, _ = made()
    arrivals.open(1)
    wan.arrive(A, 5, 1)
    jobs.run()
    with pytest.raises(PositionMismatch):
        arrivals.finish(1)


def test_a_spoilt_expert_ends_the_training_thread():
    layout = Layout((1, 1))
    plan = Plan(0, layout, (replicate_all(layout, 2),), "test")
    case = Case(num_experts=2, top_k=1, renormalise=False, micro_tokens=((4,), (4,)))

    def work(runtime):
        send = runtime.wan.send

        def spoil(to, channel, at, payload, **options):
            spoilt = [b"\0" * 3] if channel == "experts/0" and at.step == 2 else payload
            send(to, channel, at, spoilt, **options)

        runtime.wan.send = spoil
        return train_distributed(case, runtime)

    with pytest.raises(CodecError):
        run_fleet(plan, work)


class Stale(DenseModel):
    """One process whose workers compute copies with the weights of one step before."""

    def __init__(self, case: Case, start: dict[str, torch.Tensor]) -> None:
        super().__init__(case, start)
        self.old = {name: value.detach().clone().requires_grad_() for name, value in self.p.items()}
        self.copied: set[str] = set()

    def expert(self, prefix: str, h: torch.Tensor) -> torch.Tensor:
        new = self.p
        self.p = self.old if prefix in self.copied else new
        try:
            return super().expert(prefix, h)
        finally:
            self.p = new

    def collect(self) -> dict[str, torch.Tensor]:
        """Add the copies' gradients; what is to be the old weights after the step that follows."""
        for name, old in self.old.items():
            if old.grad is not None:
                self.p[name].grad = old.grad if self.p[name].grad is None else self.p[name].grad + old.grad
        return {name: value.detach().clone().requires_grad_() for name, value in self.p.items()}


def copied(plan: Plan, worker: int) -> set[str]:
    """Prefixes of the experts that other workers compute for this one's tokens, on copies."""
    layout, found = plan.layout, set()
    dc, local = layout.locate(worker)
    for number, layer in enumerate(plan.layers):
        for e in range(layer.num_experts):
            there = layer.route[dc][e]
            entry = worker if there == dc else layout.number(there, layout.landing(local, there))
            if layer.serve[entry][e] != layer.home[e]:
                found.add(f"layers.{number}.experts.{e}.")
    return found


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("workers", "maker"),
    [((1, 1), replicate_all), ((2, 1), replicate_all), ((2, 2), lambda layout, n: domains(layout, n, (2,)))],
)
def test_copies_one_step_behind_equal_one_process_that_has_them_so(workers, maker, own, monkeypatch):
    layout = Layout(workers)
    plan = Plan(0, layout, (maker(layout, 4),) * 2, "test")
    tokens = tuple((4 + worker, 3) for worker in range(layout.workers))
    case = Case(num_experts=4, top_k=2, layers=2, steps=4, micro_tokens=tokens)
    if own:
        monkeypatch.setattr(torch.optim, "AdamW", hybridep_rt.AdamW)
    results = run_fleet(plan, lambda runtime: train_distributed(case, runtime), staleness=1)
    monkeypatch.undo()
    start = {name: value for result in results for name, value in result.start.items()}
    model = Stale(case, start)
    optimizer = torch.optim.AdamW(model.p.values(), lr=0.05, weight_decay=0.1)
    for step in range(case.steps):
        optimizer.zero_grad()
        for worker, micro_batches in enumerate(case.batches(step)):
            model.copied = copied(plan, worker)
            for x in micro_batches:
                output, losses = model.forward(x)
                ((loss_of(output) + losses) / layout.workers).backward()
        before = model.collect()
        optimizer.step()
        model.old = before
    assert any(copied(plan, worker) for worker in range(layout.workers))
    for worker, result in enumerate(results):
        model.copied = copied(plan, worker)
        expected = model.forward(case.batches(case.steps)[worker][0])[0]
        torch.testing.assert_close(result.outputs[-1], expected.detach(), rtol=0, atol=1e-10)
        for name, parameter in result.parameters.items():
            torch.testing.assert_close(parameter, model.p[name].detach(), rtol=0, atol=1e-10, msg=name)


def test_weights_that_a_user_changed_are_fresh_in_stale_runs_too():
    layout = Layout((1, 1))
    plan = Plan(0, layout, (replicate_all(layout, 2),), "test")

    def work(runtime):
        with torch.no_grad():
            model = hybridep_rt.MoELayer(4, 5, 2, 1, runtime=runtime, renormalise=False)
            runtime.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for parameter in model.experts.parameters():
                parameter.zero_()
            runtime.publish()
            return float(model(torch.ones(3, 4)).abs().sum())

    assert run_fleet(plan, work, staleness=1) == [0.0, 0.0]


def test_a_change_of_plans_brings_all_copies_up_to_date():
    layout = Layout((2, 1))
    first, second = (Plan(epoch, layout, (replicate_all(layout, 4),), "test") for epoch in (0, 1))

    def work(runtime):
        model = hybridep_rt.MoELayer(8, 6, 4, 2, runtime=runtime)
        optimizer = hybridep_rt.AdamW(model.parameters(), lr=0.1)
        runtime.attach(model, optimizer)
        x = torch.linspace(-1, 1, 24).view(3, 8)

        def are_exact() -> bool:
            with torch.no_grad():
                coded = model(x)
                with runtime.exact_copies():
                    return torch.equal(coded, model(x))

        found = [are_exact()]
        for _ in range(2):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(are_exact())
        runtime.switch(second)
        found.append(are_exact())
        model(x).square().sum().backward()
        optimizer.step()
        return [*found, are_exact()]

    assert run_fleet(first, work, staleness=1) == [[True, False, False, True, False]] * 3


def test_staleness_is_0_or_1():
    layout = Layout((1,))
    plan = Plan(0, layout, (replicate_all(layout, 2),), "test")
    with pytest.raises(ConfigError, match="staleness is 0 or 1, not 2"):
        run_fleet(plan, lambda runtime: None, staleness=2)


@pytest.mark.parametrize("spec", ["delta-1bit:t=2", "int8"])
def test_lossless_or_not_all_copies_are_the_same_with_many_steps_in_flight(spec):
    """Steps without a forward between: versions pile up, and are taken in their order."""
    layout = Layout((2, 1))
    plan = Plan(0, layout, (replicate_all(layout, 2),), "test")

    def work(runtime):
        model = hybridep_rt.MoELayer(16, 20, 2, 2, runtime=runtime)
        optimizer = hybridep_rt.AdamW(model.parameters(), lr=0.01)
        runtime.attach(model, optimizer)
        for _ in range(3):
            model(torch.ones(2, 16)).square().sum().backward()
            for _ in range(3):
                optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(2, 16))
        leaves = model._bound._leaves
        return [[tensor.detach().clone() for tensor in leaves[e]] for e in (0, 1)]

    of_worker = run_fleet(plan, work, codecs=Codecs(weights=spec), seed=3)
    for e, home in enumerate(replicate_all(layout, 2).home):
        copies = [held[e] for worker, held in enumerate(of_worker) if worker != home]
        assert all(torch.equal(a, b) for copy in copies for a, b in zip(copy, copies[0], strict=True))


def test_a_fresh_run_still_equals_one_process():
    layout = Layout((2, 1))
    plan = Plan(0, layout, (replicate_all(layout, 4),), "test")
    case = Case(num_experts=4, top_k=2, micro_tokens=((4, 2),) * 3)
    compare(case, plan, run_fleet(plan, lambda runtime: train_distributed(case, runtime)))
