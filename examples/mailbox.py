"""Message passing between workers of any DCs: buffers arrive once and in order, and every wait has a deadline.

python examples/mailbox.py                                                        one worker, talking to itself
hybridep run examples/topologies/two-dc.yaml --plan ep -- python examples/mailbox.py
"""

from __future__ import annotations

import asyncio

import hybridep_rt
from hybridep_rt.errors import DeadlineExceeded
from hybridep_rt.runtime.mailbox import Mailbox


def pass_around(mailbox: Mailbox, me: int, workers: int) -> str:
    """Send to the next worker of a ring, receive from the one before."""
    mailbox.send((me + 1) % workers, f"greetings from worker {me}".encode())
    return bytes(mailbox.receive((me - 1) % workers, timeout_s=20)).decode()


async def ask_everyone(mailbox: Mailbox, me: int, workers: int) -> list[int]:
    """All send their number to all at once, without blocking the event loop."""
    await asyncio.gather(*(mailbox.send_async(to, me.to_bytes(4, "big")) for to in range(workers)))
    answers = await asyncio.gather(*(mailbox.receive_async(source, timeout_s=20) for source in range(workers)))
    return [int.from_bytes(answer, "big") ** 2 for answer in answers]


def wait_in_vain(mailbox: Mailbox, me: int) -> str:
    """Nobody sends on this channel: the wait ends, and says who was waited for."""
    try:
        mailbox.receive(me, timeout_s=0.05)
    except DeadlineExceeded as error:
        return str(error)
    raise AssertionError("a message from nobody")


def main() -> None:
    """Say hello to the ring, ask everyone, wait in vain."""
    runtime = hybridep_rt.init()
    me, workers = runtime.rank, runtime.world_size
    greeting = pass_around(runtime.mailbox("ring"), me, workers)
    squares = asyncio.run(ask_everyone(runtime.mailbox("squares"), me, workers))
    late = wait_in_vain(runtime.mailbox("silence"), me)
    print(f"worker {me} (DC {runtime.dc}): {greeting}; squares {squares}; {late}")
    runtime.barrier()


if __name__ == "__main__":
    main()
