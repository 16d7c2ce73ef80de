"""One worker's plan for all: worker 0 of the first DC searches, the others take its answer as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybridep_rt.errors import RemoteProtocolError
from hybridep_rt.planner.economics import LayerShape
from hybridep_rt.planner.plan import Layout, Plan
from hybridep_rt.planner.plan_file import dump, parse_plan
from hybridep_rt.protocol.address import Address
from hybridep_rt.protocol.messages import Traffic
from hybridep_rt.protocol.position import Position
from hybridep_rt.runtime.planning import Load, PlanSource
from hybridep_rt.transport.ports import WanPort
from topology.document import FILE_BYTES_MAX

_CHANNEL = "plan"
_ROOT = Address(0, 0)


def shared_plan(
    plans: PlanSource, shapes: Sequence[LayerShape], load: Load, me: Address, layout: Layout, wan: WanPort, at: Position
) -> tuple[Plan, tuple[str, ...]]:
    """The plan, equal at all workers, and what led to it where it was made.

    A plan that follows from its name alone is made everywhere. Raises PlanError, DeadlineExceeded, PeerLost.
    """
    if not plans.is_led(load):
        made = plans.plan(shapes, load)
        return made, made.terms
    if me != _ROOT:
        payload = wan.receive(_ROOT, _CHANNEL, at).payload
        return parse_plan(_text(payload), "the plan of the first worker", layout), ()
    made = plans.plan(shapes, load)
    text = dump(made, as_json=True)
    for number in range(1, layout.workers):
        wan.send(Address(*layout.locate(number)), _CHANNEL, at, [text.encode()], traffic=Traffic.CONTROL)
    return replace(made, terms=()), made.terms


def _text(payload: memoryview) -> str:
    if payload.nbytes > FILE_BYTES_MAX:
        raise RemoteProtocolError(f"a plan of {payload.nbytes} bytes")
    try:
        return bytes(payload).decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError("a plan that is no text") from error
