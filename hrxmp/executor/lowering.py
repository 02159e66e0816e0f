"""Lowering: a graph becomes the commands of a graph program, fused where it pays.

Pure: it sees the graph and the device's traits, never a device. Nodes are visited in order; a
rule may complete later nodes together with its own: a norm with its weight, the matrices that
share an input, a residual, a gate with its up projection, rope with the rows of the caches. What
no rule supports is refused with the node and what is supported.
"""

from __future__ import annotations

from collections.abc import Callable

from hrxmp.errors import UnsupportedError
from hrxmp.executor import attention_rules, element_rules, matrix_rules
from hrxmp.executor.graph_program import GraphProgram
from hrxmp.executor.node_pass import NodePass
from hrxmp.graph import Graph, Tensor
from hrxmp.kernels.definition import DeviceTraits

Rule = Callable[[NodePass, Tensor], None]


def lower(graph: Graph, traits: DeviceTraits, number: int) -> GraphProgram:
    """The program of `graph` on a device with `traits`. UnsupportedError names the node."""
    low = NodePass(graph, traits)
    for node in graph.nodes:
        if node.index not in low.done and node.op not in ("none", "view"):
            _apply(low, node)
            low.finish(node)
    return low.builder.program(number)


def _apply(low: NodePass, node: Tensor) -> None:
    rule = RULES.get(node.op)
    if rule is None:
        raise UnsupportedError(f"{node.describe()}: supported ops are {', '.join(RULES)}")
    try:
        rule(low, node)
    except UnsupportedError as error:
        raise UnsupportedError(f"{node.describe()}: {error.message}") from None


RULES: dict[str, Rule] = {
    "add": element_rules.binary,
    "mul": element_rules.binary,
    "scale": element_rules.unary,
    "silu": element_rules.unary,
    "swiglu": element_rules.swiglu,
    "rms_norm": matrix_rules.rms_norm,
    "soft_max": element_rules.soft_max,
    "argmax": element_rules.argmax,
    "get_rows": element_rules.get_rows,
    "set_rows": element_rules.set_rows,
    "cpy": element_rules.cpy,
    "cont": element_rules.cont,
    "mul_mat": matrix_rules.mul_mat,
    "rope": attention_rules.rope,
    "flash_attn": attention_rules.flash_attn,
}
