"""The only user of mpi4py: who is in the job and where, once at the start, and the job's abort."""

from __future__ import annotations

from typing import Any

import msgpack
from mpi4py import MPI

from hybridep_rt.errors import RemoteProtocolError

RECORD_BYTES = 1 << 16


def exchange(record: Any) -> list[Any]:
    """Every rank's record, in rank order. Collective over all ranks; plain values only (tuples come back as lists).

    Raises RemoteProtocolError if a record is larger than `RECORD_BYTES` or does not decode.
    """
    MPI.pickle.__init__(_dump, _load)  # type: ignore[misc]
    records: list[Any] = MPI.COMM_WORLD.allgather(record)
    return records


def rank() -> int:
    """This process's number among all ranks."""
    number: int = MPI.COMM_WORLD.Get_rank()
    return number


def size() -> int:
    """Number of ranks of this mpirun."""
    number: int = MPI.COMM_WORLD.Get_size()
    return number


def abort(code: int) -> None:
    """End every rank of this mpirun; does not return."""
    MPI.COMM_WORLD.Abort(code)


def _dump(record: Any, protocol: int | None = None) -> bytes:
    packed: bytes = msgpack.packb(record)
    if len(packed) > RECORD_BYTES:
        raise RemoteProtocolError(f"a rank's record has {len(packed)} bytes, the limit is {RECORD_BYTES}")
    return packed


def _load(packed: Any) -> Any:
    if len(packed) > RECORD_BYTES:
        raise RemoteProtocolError(f"a rank's record has {len(packed)} bytes, the limit is {RECORD_BYTES}")
    try:
        return msgpack.unpackb(packed)
    except Exception as error:  # the unpacker documents no closed set of errors for broken input
        raise RemoteProtocolError(f"a rank's record is not msgpack: {type(error).__name__}") from None
