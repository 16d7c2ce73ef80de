"""A sum in one fixed order, as vector instructions: numba has no words for them, and its own order is one by one."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np import arrayobj

from hybridep_rt.codecs.levels import LANES


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def lane_sum(typing_context: Any, values: Any, row: Any) -> Any:
    """Sum of a row of a contiguous float32 array [rows, a multiple of 16].

    Element i is added to lane i % 16 from first to last; then lanes 8-15 are added to 0-7, 4-7 to 0-3 and so on.
    """
    return types.float32(values, types.intp), _emit


def _emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    array = arrayobj.make_array(signature.args[0])(context, builder, arguments[0])
    vector = ir.VectorType(ir.FloatType(), LANES)
    length = builder.extract_value(array.shape, 1)
    start = builder.gep(array.data, [builder.mul(arguments[1], length)])
    parts = builder.bitcast(start, vector.as_pointer())
    total = cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * LANES))
    with cgutils.for_range(builder, builder.udiv(length, ir.Constant(length.type, LANES))) as loop:
        part = builder.load(builder.gep(parts, [loop.index]), align=4)
        builder.store(builder.fadd(builder.load(total), part), total)
    return _folded(builder, builder.load(total))


def _folded(builder: Any, lanes: Any) -> Any:
    width = LANES
    while width > 1:
        width //= 2
        low, high = (_part(builder, lanes, first, width) for first in (0, width))
        lanes = builder.fadd(low, high)
    return builder.extract_element(lanes, ir.Constant(ir.IntType(32), 0))


def _part(builder: Any, lanes: Any, first: int, width: int) -> Any:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(first, first + width)))
    return builder.shuffle_vector(lanes, lanes, mask)
