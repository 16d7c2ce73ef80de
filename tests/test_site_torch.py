"""The real in-DC group, over gloo between processes."""

from __future__ import annotations

import torch
import torch.multiprocessing as mp

from hybridep_rt.errors import PositionMismatch
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Message
from hybridep_rt.protocol.position import Phase, Position
from hybridep_rt.transport.site_torch import SoloSite, open_site

HERE = Position(3, 1, 0, Phase.DISPATCH, 2)


class QueueWan:
    """The few messages by which a DC's workers find each other, over multiprocessing queues."""

    def __init__(self, worker, queues):
        self.address = Address(0, worker)
        self.queues = queues

    def send(self, to, channel, position, payload, *, traffic, counts=(), urgency=0):
        self.queues[to.worker].put(bytes(payload[0]))

    def receive(self, source, channel, position, *, timeout_s=None):
        data = self.queues[self.address.worker].get(timeout=30)
        return Message(source, self.address, channel, position, memoryview(bytearray(data)))

    def expect(self, peers, position):
        pass


def member(worker, size, queues, results):
    site = open_site(QueueWan(worker, queues), size, host="127.0.0.1", dc_name="a", timeout_s=30)
    rows = [
        (
            torch.full((peer, 3), worker + 0.5, dtype=torch.float64),
            torch.arange(worker + peer),
            torch.ones(worker, dtype=torch.uint8),
            torch.empty((0, 2), dtype=torch.bfloat16),
        )
        for peer in range(size)
    ]
    received = site.exchange(HERE, rows)
    nothing = site.exchange(HERE, [(torch.empty(0),)] * size)
    try:
        site.exchange(HERE._replace(step=HERE.step + (worker == 1)), [(torch.empty(0),)] * size)
        told = ""
    except PositionMismatch as error:
        told = str(error)
    results.put((worker, [[t.tolist() for t in parcel] for parcel in received], [len(p[0]) for p in nothing], told))
    site.close()


def test_exchange_over_gloo():
    context = mp.get_context("spawn")
    size = 3
    queues, results = [context.Queue() for _ in range(size)], context.Queue()
    processes = [context.Process(target=member, args=(worker, size, queues, results)) for worker in range(size)]
    for process in processes:
        process.start()
    answers = sorted(results.get(timeout=90) for _ in range(size))
    for process in processes:
        process.join(30)
    for worker, received, nothing, told in answers:
        for source, (rows, numbers, ones, empty) in enumerate(received):
            assert rows == [[source + 0.5] * 3] * worker
            assert numbers == list(range(source + worker))
            assert ones == [1] * source
            assert empty == []
        assert nothing == [0] * size
        assert "step 3" in told
        assert "step 4" in told


def test_a_dc_of_one_worker_keeps_everything():
    tensor = torch.ones(2)
    assert SoloSite().exchange(HERE, [(tensor,)]) == [[tensor]]
