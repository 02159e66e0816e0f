"""Fuses the five launches of a transformer layer for one row into one, and layers into a stack: a
launch costs about as much as a small product. `cl/layer.h` runs a layer as phases that its
work-groups claim.

Pure functions of launches and slots, run by the executor's lowering; no device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import msgspec
from msgspec.structs import replace

from hrxmp.kernels import addresses
from hrxmp.kernels.addresses import FusedProgram
from hrxmp.kernels.definition import DeviceTraits, KernelDefinition, arguments
from hrxmp.kernels.keys import Param, Params, Variant
from hrxmp.kernels.launch import Launch

PHASES = 5
_SPLITS = 8
"""Most splits of the cache."""
LAYERS = 64
"""Most layers of a stack."""
STATE_BYTES = 4 * 16 * (1 + 2 * PHASES * LAYERS)
"""Counters of `cl/phases.h`."""
_TYPES = "WQ WK WV WO WG WU WD"
_CACHE = "HEAD_DIM HEADS KV_HEADS KV N_DIMS NEOX FACTORS"

_PARAMS = (*_TYPES.split(), "HIDDEN", "FFN", *_CACHE.split(), "DOT", "SPLITS", "PARTS_A_PHASE")
_NUMBERS = "m:int capacity:int eps:float scale:float freq_base:float freq_scale:float"
_COMMON = len(_NUMBERS.split())
"""So many arguments a layer and a stack begin with alike."""
_TABLE = (
    *("x", "attn_norm", "wq", "wk", "wv", "wo", "ffn_norm", "wg", "wu", "wd", "positions"),
    *("factors", "k_cache", "v_cache", "scratch", "y"),
)
"""The operands of a layer, as `Layer` of `cl/layer.h` has them."""

LAYER_ROW = KernelDefinition(
    name="layer_row",
    source="layer_row.cl",
    entry_point="layer_row",
    params=_PARAMS,
    args=arguments(
        f"{_NUMBERS} x_offset:int y_offset:int "
        f"{' '.join(f'{name}:buffer' for name in _TABLE)} state:buffer"
    ),
)
LAYER_STACK = KernelDefinition(
    name="layer_stack",
    source="layer_stack.cl",
    entry_point="layer_stack",
    params=_PARAMS,
    args=arguments(f"{_NUMBERS} layers:int addresses:buffer state:buffer"),
)
DEFINITIONS = (LAYER_ROW, LAYER_STACK)

_ARGS = {
    "mul_mat_vec": "m x_offset r_offset y_offset eps x norm_w w0 w1 w2 residual y",
    "flash_attn_row": "m capacity q_offset y_offset scale freq_base freq_scale q positions factors "
    "k_cache v_cache y",
}
"""Argument names of the kernels that are fused, in order."""

_OPERANDS = {
    "x": (0, "x"),
    "attn_norm": (0, "norm_w"),
    "wq": (0, "w0"),
    "wk": (0, "w1"),
    "wv": (0, "w2"),
    "wo": (2, "w0"),
    "ffn_norm": (3, "norm_w"),
    "wg": (3, "w0"),
    "wu": (3, "w1"),
    "wd": (4, "w0"),
    "positions": (1, "positions"),
    "factors": (1, "factors"),
    "k_cache": (1, "k_cache"),
    "v_cache": (1, "v_cache"),
    "y": (4, "y"),
}
"""Operands of the fused launch: which launch of the five had them, under which argument."""


class FusedLayer(msgspec.Struct, frozen=True, kw_only=True):
    """One launch for five. Its operands are those of `slots`, and two more for it alone.

    `scratch` needs no contents. `state` must be zero before the first launch, and every launch
    leaves it zero (STATE_BYTES); launches of one in-order queue may share both.
    """

    launch: Launch
    slots: dict[str, int]
    """Operand name -> the slot it had; without `scratch` and `state`."""
    scratch_bytes: int


def fuse_layer(
    traits: DeviceTraits, launches: Sequence[Launch], slots: Sequence[Mapping[str, int]]
) -> FusedLayer | None:
    """The five launches (q k v; rope and attention; output; gate and up; down) as one, or None.

    `slots` gives, for each launch, the memory slot of each of its operands; a slot holds one value
    from the launch that writes it to the last that reads it. The caller must know that nobody else
    reads what the first four write, but the caches.
    """
    if len(launches) != PHASES or traits.form != "intel-cpu":
        return None
    steps = [_Step.of(launch, held) for launch, held in zip(launches, slots, strict=True)]
    if not _kinds_fit(steps) or not _sizes_fit(steps) or not _values_flow(steps):
        return None
    qkv, attention, _, _, down = steps
    hidden, ffn, heads = int(qkv.params["K"]), int(down.params["K"]), attention.params
    operands = dict(_OPERANDS)
    if not heads["FACTORS"]:
        operands["factors"] = operands["positions"]
    parts = 2 * traits.compute_units
    return FusedLayer(
        launch=Launch(
            variant=Variant(
                definition=LAYER_ROW.name, params=_params(steps, parts), local_size=(1,)
            ),
            args=(
                *(1, attention.args["capacity"], qkv.args["eps"], attention.args["scale"]),
                *(attention.args["freq_base"], attention.args["freq_scale"]),
                *(qkv.args["x_offset"], down.args["y_offset"]),
                *(*_TABLE, "state"),
            ),
            global_size=(traits.compute_units,),
            writes=("k_cache", "v_cache", "scratch", "state", "y"),
            flops=sum(launch.flops for launch in launches),
            nbytes=sum(launch.nbytes for launch in launches),
        ),
        slots={name: steps[step].slot(argument) for name, (step, argument) in operands.items()},
        scratch_bytes=4 * _scratch_floats(heads, hidden, ffn),
    )


def stacks(launches: Sequence[Launch], slots: Sequence[Mapping[str, int]]) -> list[range]:
    """Which launches can be one: runs of layers that differ in nothing but memory."""
    kinds = [_stackable(launch, held) for launch, held in zip(launches, slots, strict=True)]
    found: list[range] = []
    for kind, alike in groupby(range(len(kinds)), key=lambda at: kinds[at]):
        first, *others = alike
        stop = first + len(others) + 1
        if kind is not None:
            found += [range(at, min(at + LAYERS, stop)) for at in range(first, stop, LAYERS)]
    # A kernel that some stack needs serves single layers as well.
    needed = {launches[run.start].variant for run in found if len(run) > 1}
    return [run for run in found if launches[run.start].variant in needed]


def _stackable(launch: Launch, held: Mapping[str, int]) -> tuple[object, ...] | None:
    """What layers of one stack have in common; None of a launch that is no layer, or whose row of
    x or y does not begin its memory."""
    offsets = launch.args[_COMMON : _COMMON + 2]
    if launch.variant.definition != LAYER_ROW.name or offsets != (0, 0):
        return None
    return launch.variant, launch.args, held["positions"], held["factors"]


def stack(launches: Sequence[Launch], slots: Sequence[Mapping[str, int]]) -> FusedProgram:
    """The launches of a run of `stacks` as one."""
    first = launches[0]
    launch = Launch(
        variant=replace(first.variant, definition=LAYER_STACK.name),
        args=(*first.args[:_COMMON], len(launches), "addresses", "state"),
        global_size=first.global_size,
        writes=("state",),
        flops=sum(launch.flops for launch in launches),
        nbytes=sum(launch.nbytes for launch in launches),
    )
    return addresses.fused(launch, [held[name] for held in slots for name in _TABLE])


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    """A launch with names: parameters, arguments, and the slots of its operands."""

    kind: str
    params: dict[str, Param]
    args: dict[str, str | int | float]
    held: dict[str, int]

    @classmethod
    def of(cls, launch: Launch, held: Mapping[str, int]) -> _Step:
        kind = launch.variant.definition
        names = _ARGS.get(kind, "").split()
        return cls(
            kind=kind,
            params=dict(launch.variant.params),
            args=dict(zip(names, launch.args, strict=True)) if names else {},
            held=dict(held),
        )

    def slot(self, argument: str) -> int:
        """The memory slot of a buffer argument."""
        return self.held[str(self.args[argument])]


def _kinds_fit(steps: list[_Step]) -> bool:
    if [step.kind for step in steps] != ["mul_mat_vec", "flash_attn_row", *["mul_mat_vec"] * 3]:
        return False
    qkv, attention, output, gate_up, down = steps
    products = (qkv, output, gate_up, down)
    return (
        [(step.params["NORM"], step.params["EPILOGUE"]) for step in products]
        == [(1, "none"), (0, "add"), (1, "swiglu"), (0, "add")]
        and attention.params["ROPE"] == 1
        and qkv.params["N2"] != 0
        and all(step.params["N1"] == 0 for step in (output, down))
        and all(step.params["LAYOUT"] == "lane16" for step in products)
        and len({step.params["DOT"] for step in products}) == 1
        and qkv.args["eps"] == gate_up.args["eps"]
    )


def _sizes_fit(steps: list[_Step]) -> bool:
    qkv, attention, output, gate_up, down = (step.params for step in steps)
    head_dim, hidden = int(attention["HEAD_DIM"]), qkv["K"]
    width, kv_width = head_dim * int(attention["HEADS"]), head_dim * int(attention["KV_HEADS"])
    return (
        head_dim % 32 == 0
        and (qkv["N0"], qkv["N1"], qkv["N2"]) == (width, kv_width, kv_width)
        and (output["K"], output["N0"], gate_up["K"], down["N0"]) == (width, *[hidden] * 3)
        and gate_up["N0"] == down["K"]
    )


def _values_flow(steps: list[_Step]) -> bool:
    """Whether each launch reads what the one before has written, from its first element on."""
    qkv, attention, output, gate_up, down = steps
    inner = [
        (qkv.args["y_offset"], attention.args["q_offset"]),
        (attention.args["y_offset"], output.args["x_offset"]),
        (output.args["y_offset"], gate_up.args["x_offset"]),
        (gate_up.args["y_offset"], down.args["x_offset"]),
        (down.args["r_offset"], 0),
    ]
    return (
        all(a == b == 0 for a, b in inner)
        and output.args["r_offset"] == qkv.args["x_offset"]
        and qkv.slot("y") == attention.slot("q")
        and attention.slot("y") == output.slot("x")
        and qkv.slot("x") == output.slot("residual")
        and output.slot("y") == gate_up.slot("x") == down.slot("residual")
        and gate_up.slot("y") == down.slot("x")
    )


def _params(steps: list[_Step], parts: int) -> Params:
    qkv, attention, output, gate_up, down = (step.params for step in steps)
    types = (
        qkv["W0"],
        qkv["W1"],
        qkv["W2"],
        output["W0"],
        gate_up["W0"],
        gate_up["W1"],
        down["W0"],
    )
    cache = (attention[name] for name in _CACHE.split())
    values = (*types, qkv["K"], down["K"], *cache, qkv["DOT"], _SPLITS, parts)
    return tuple(zip(LAYER_ROW.params, values, strict=True))


def _scratch_floats(heads: Mapping[str, Param], hidden: int, ffn: int) -> int:
    """Elements of struct Scratch in `cl/layer_row.cl`."""
    head_dim, n_heads, n_kv_heads = (int(heads[n]) for n in ("HEAD_DIM", "HEADS", "KV_HEADS"))
    rows = (n_heads + 2 * n_kv_heads) * head_dim
    return rows + n_heads * _SPLITS * (head_dim + 16) + hidden + ffn
