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
from hrxmp.executor.matrix_rules import Norm
from hrxmp.executor.places import Builder
from hrxmp.graph import Graph, Tensor
from hrxmp.kernels.definition import DeviceTraits

Rule = Callable[["Lowering", Tensor], None]


def lower(graph: Graph, traits: DeviceTraits, number: int) -> GraphProgram:
    """The program of `graph` on a device with `traits`. UnsupportedError names the node."""
    return Lowering(graph, traits).run(number)


class Lowering:
    """One pass over one graph."""

    def __init__(self, graph: Graph, traits: DeviceTraits) -> None:
        self.graph = graph
        self.traits = traits
        self.builder = Builder(graph, traits)
        self.done: set[int] = set()
        self.norms: dict[int, Norm] = {}
        self._readers = _readers(graph)
        self.outputs = {tensor.index for tensor in graph.outputs.values()}

    def run(self, number: int) -> GraphProgram:
        """Lower every node that leads to an effect."""
        for node in self.graph.nodes:
            if node.index not in self.done and node.op not in ("none", "view"):
                self._lower(node)
        return self.builder.program(number)

    def finish(self, *nodes: Tensor) -> None:
        """These nodes are complete; no rule sees them again."""
        self.done.update(node.index for node in nodes)

    def readers(self, tensor: Tensor) -> list[Tensor]:
        """The nodes that read a tensor, also through views."""
        found = []
        for reader in self._readers[tensor.index]:
            found += self.readers(reader) if reader.op == "view" else [reader]
        return found

    def only_reader(self, tensor: Tensor, op: str) -> Tensor | None:
        """The one node that reads a tensor, if it is a pending `op`, and nobody else sees it."""
        readers = self.readers(tensor)
        seen = {tensor.index, *(view.index for view in self._views(tensor))} & self.outputs
        if seen or len(readers) != 1 or readers[0].op != op or readers[0].index in self.done:
            return None
        return readers[0]

    def computed(self, tensor: Tensor) -> bool:
        """Whether a tensor's elements are there before the command that comes next."""
        root = tensor
        while root.op == "view" and root.base is not None:
            root = root.base
        return root.op == "none" or root.index in self.done

    def _views(self, tensor: Tensor) -> list[Tensor]:
        views = [reader for reader in self._readers[tensor.index] if reader.op == "view"]
        return views + [deeper for view in views for deeper in self._views(view)]

    def _lower(self, node: Tensor) -> None:
        rule = RULES.get(node.op)
        if rule is None:
            raise UnsupportedError(f"{node.describe()}: supported ops are {', '.join(RULES)}")
        try:
            rule(self, node)
        except UnsupportedError as error:
            raise UnsupportedError(f"{node.describe()}: {error.message}") from None
        self.finish(node)


def _readers(graph: Graph) -> list[list[Tensor]]:
    readers: list[list[Tensor]] = [[] for _ in graph.nodes]
    for node in graph.nodes:
        for source in dict.fromkeys(node.sources):
            readers[source.index].append(node)
    return readers


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
