"""Index spaces of the element and row kernels: launches with their local sizes.

Pure functions. The local size is a part of the key, so it follows from traits and weight
dimensions only, never from the number of rows.
"""

from __future__ import annotations

from hrxmp.kernels.definition import DeviceTraits, KernelDefinition, arguments
from hrxmp.kernels.keys import Params, Variant
from hrxmp.kernels.launch import Launch

AXIS_LIMIT = 32768
"""Items along axis 0. PoCL compiles a kernel once more for grids of 65536 items along an axis."""

_COLUMNS_A_GROUP = 256
_ITEMS_A_ROW_CPU = 64
_ITEMS_A_ROW_GPU = 256

X_ROWS = "x_stride:int x_offset:int"
Y_ROWS = "y_stride:int y_offset:int"


def define(name: str, source: str, params: str, args: str, entry: str = "") -> KernelDefinition:
    """A definition from lines of words: `params` by name, `args` as name:kind."""
    return KernelDefinition(
        name=name,
        source=source,
        entry_point=entry or name,
        params=tuple(params.split()),
        args=arguments(args),
    )


def over_elements(
    traits: DeviceTraits,
    definition: str,
    params: Params,
    *,
    cols: int,
    rows: int,
    args: tuple[str | int | float, ...],
    cost: tuple[int, int],
    writes: str = "y",
    lanes: int = _COLUMNS_A_GROUP,
) -> Launch:
    """One item a column (axis 0, then axis 2) and row (axis 1). `cost` is flops and bytes."""
    local = (min(lanes, traits.max_work_group), 1, 1)
    width = min(-(-cols // local[0]) * local[0], AXIS_LIMIT)
    return Launch(
        variant=Variant(definition=definition, params=params, local_size=local),
        args=args,
        global_size=(width, rows, -(-cols // width)),
        writes=(writes,),
        flops=cost[0],
        nbytes=cost[1],
    )


def over_rows(
    traits: DeviceTraits,
    definition: str,
    params: Params,
    *,
    rows: int,
    args: tuple[str | int | float, ...],
    cost: tuple[int, int],
) -> Launch:
    """One work-group a row (axis 1). `cost` is flops and bytes."""
    items = _ITEMS_A_ROW_CPU if traits.is_cpu else _ITEMS_A_ROW_GPU
    return Launch(
        variant=Variant(definition=definition, params=params, local_size=(items, 1)),
        args=(rows, *args),
        global_size=(items, rows),
        writes=("y",),
        flops=cost[0],
        nbytes=cost[1],
    )


def row_stride(stride: int | None, width: int) -> int:
    """The stride of rows of `width`; None means dense."""
    return width if stride is None else stride
