"""Makes one launch of the launches of a decode graph program, on NVIDIA's devices.

Pure functions of launches and slots, run by the executor's lowering once slots are planned; no
device. `cl/nv_program.cl` runs the commands of its PLAN one after the other on all multiprocessors,
with a barrier between them: a quarter of what a launch costs. Numbers that may change from run to
run (positions, capacity) are arguments, never parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hrxmp.kernels import addresses, nvidia
from hrxmp.kernels.addresses import FusedProgram
from hrxmp.kernels.definition import Argument, DeviceTraits, KernelDefinition
from hrxmp.kernels.keys import Params, Variant
from hrxmp.kernels.launch import Launch
from hrxmp.kernels.layer import STATE_BYTES

INTS, FLOATS = 40, 10
"""Arguments of each kind, as in `cl/nv_arguments.h`."""
STEPS = 12
_WIDTH = 16
_LX = 512
_CHUNKS_OF_ONE_GROUP = 3
"""For tests: a group that has a head's chunks one after the other gains nothing."""
_MOST_HEADS = STATE_BYTES // 4 - 16
"""A counter each, behind STATE_OF_HEADS of `cl/nv_program.cl`."""
_ATTENTION = ("HEAD_DIM", "HEADS", "KV_HEADS", "KV", "N_DIMS", "NEOX", "FACTORS", "ROPE")
_PRODUCT = ("W0", "W1", "W2", "K", "N0", "N1", "N2", "EPILOGUE", "NORM", "PACKED", "ROWS", "SPLIT")


_ARGUMENTS = {d.name: [argument.name for argument in d.args] for d in nvidia.DEFINITIONS}
_INT_NAMES = [f"i{n:02}" for n in range(INTS)]
_FLOAT_NAMES = [f"f{n:02}" for n in range(FLOATS)]

DEFINITIONS = (
    KernelDefinition(
        name="nv_program",
        source="nv_program.cl",
        entry_point="nv_program",
        params=(
            *("FORM", *_ATTENTION, "CHUNKS", "ROW", "COMMANDS", "BUFFERS"),
            *(f"S{n}" for n in range(STEPS)),
            "PLAN",
        ),
        args=(
            *(Argument(name=name, kind="int") for name in _INT_NAMES),
            *(Argument(name=name, kind="float") for name in _FLOAT_NAMES),
            *(Argument(name=name, kind="buffer") for name in ("addresses", "state")),
        ),
    ),
)


class _Plan:
    """The arguments and steps collected so far."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self.numbers: list[int] = []
        self.ints: dict[tuple[str, int], int] = {("", 1): 0}  # i00 is m: zero in a dry launch
        self.floats: dict[float, int] = {}
        self.buffers: dict[int, int] = {}
        self.attention: Params = ()
        self.row = 16

    def add(self, launch: Launch, slots: Mapping[str, int]) -> None:
        step = _step(launch)
        numbers = [self.steps.setdefault(step, len(self.steps))]
        for name, arg in zip(_ARGUMENTS[launch.variant.definition], launch.args, strict=True):
            if isinstance(arg, str):
                numbers.append(self.buffers.setdefault(slots[arg], len(self.buffers)))
            elif isinstance(arg, int):
                # A capacity is a number of its own: that it equals another one is chance, and
                # must not make another plan.
                key = (name if name == "capacity" else "", arg)
                numbers.append(self.ints.setdefault(key, len(self.ints)))
            else:
                numbers.append(self.floats.setdefault(arg, len(self.floats)))
        self.numbers += numbers + [0] * (_WIDTH - len(numbers))
        params = dict(launch.variant.params)
        if launch.variant.definition == "nv_attend":
            self.attention = tuple((name, params[name]) for name in _ATTENTION)
        elif launch.variant.definition == "nv_mul_mat_vec":
            self.row = max(self.row, _row_words(int(params["K"]), bool(params["PACKED"])))

    @property
    def fits(self) -> bool:
        return (
            len(self.steps) <= STEPS
            and len(self.ints) <= INTS
            and len(self.floats) <= FLOATS
            and bool(self.attention)
            and int(dict(self.attention)["HEADS"]) <= _MOST_HEADS
        )


def fuse(
    traits: DeviceTraits, launches: Sequence[Launch], slots: Sequence[Mapping[str, int]]
) -> FusedProgram | None:
    """All launches as one, or None where the device or one of the launches does not allow it.

    `slots` gives, for each launch, the memory slot of each of its operands; slots may be reused.
    """
    if traits.form != "nvidia" or len(launches) < 2 or not all(map(_fits, launches)):
        return None
    attentions = {launch.variant for launch in launches if launch.variant.definition == "nv_attend"}
    if len(attentions) != 1:
        return None
    plan = _Plan()
    for launch, held in zip(launches, slots, strict=True):
        plan.add(launch, held)
    return _fused(traits, plan, launches) if plan.fits else None


def _fits(launch: Launch) -> bool:
    """Whether a launch is a step for one row, with work-groups as large as the program's."""
    name, params = launch.variant.definition, dict(launch.variant.params)
    if name == "nv_attend":
        return params["ROPE"] == 1
    if name == "nv_mul_mat_vec":
        return launch.args[0] == 1 and int(params["K"]) <= 16 * _LX
    return name == "nv_get_rows" and launch.args[0] == 1


def _step(launch: Launch) -> str:
    """A step as `cl/nv_program.cl` spells it."""
    params = dict(launch.variant.params)
    match launch.variant.definition:
        case "nv_attend":
            return "attention"
        case "nv_get_rows":
            return f"embedding({params['WTYPE']},{params['K']})"
        case _:
            return f"product({','.join(str(params[name]) for name in _PRODUCT)})"


def _fused(traits: DeviceTraits, plan: _Plan, launches: Sequence[Launch]) -> FusedProgram:
    steps = [*plan.steps, *["idle"] * (STEPS - len(plan.steps))]
    attention = dict(plan.attention)
    heads, head_dim = int(attention["HEADS"]), int(attention["HEAD_DIM"])
    groups = 1 if traits.is_cpu else traits.compute_units
    chunks = _CHUNKS_OF_ONE_GROUP if groups == 1 else max(1, groups // heads)
    params = {
        "FORM": nvidia.form(traits),
        **attention,
        "CHUNKS": chunks,
        "ROW": plan.row,
        "COMMANDS": len(launches),
        "BUFFERS": len(plan.buffers),
        **{f"S{n}": step for n, step in enumerate(steps)},
        "PLAN": ",".join(map(str, plan.numbers)),
    }
    launch = Launch(
        variant=Variant(definition="nv_program", params=tuple(params.items()), local_size=(_LX,)),
        args=(
            *_padded([value for _, value in plan.ints], INTS, 0),
            *_padded(list(plan.floats), FLOATS, 0.0),
            *("addresses", "state"),
        ),
        global_size=(groups * _LX,),
        writes=("state",),
        flops=sum(launch.flops for launch in launches),
        nbytes=sum(launch.nbytes for launch in launches),
    )
    partials = 4 * heads * chunks * (head_dim + 2)
    return addresses.fused(launch, list(plan.buffers), partials)


def _padded(values: list[Any], count: int, rest: Any) -> list[Any]:
    return values + [rest] * (count - len(values))


def _row_words(k: int, packed: bool) -> int:
    """ROW_WORDS of `cl/nv_row.h`."""
    return (k + -(-k // 64) * 16) // 2 + k // 32 + k // 16 if packed else k
