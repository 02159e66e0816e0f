"""What lowering rules share while they go over a graph: readers, completed nodes, places.

Pure state of one pass; the rules decide, `lowering` drives them.
"""

from __future__ import annotations

import msgspec

from hrxmp.dtypes import DType
from hrxmp.executor.places import Builder
from hrxmp.graph import Graph, Tensor
from hrxmp.kernels.definition import DeviceTraits


class Norm(msgspec.Struct, frozen=True, kw_only=True):
    """A weighted norm that is left to the matrices that read it."""

    x: Tensor
    weight: Tensor | None
    eps: float


class NodePass:
    """One pass over the nodes of one graph: who reads what, and what is complete."""

    def __init__(self, graph: Graph, traits: DeviceTraits) -> None:
        self.graph = graph
        self.traits = traits
        self.builder = Builder(graph, traits)
        self.done: set[int] = set()
        self.norms: dict[int, Norm] = {}
        self._readers = _readers(graph)
        self._many = {_weight_kind(n) for n in graph.nodes if n.op == "mul_mat" and n.shape[0] > 1}
        self.outputs = {tensor.index for tensor in graph.outputs.values()}

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

    def goes_with_many(self, product: Tensor) -> bool:
        """Whether a product of one row takes the kernel of a product of many, with weights of the
        same kind, that the graph has as well: one kernel less to compile before the first token."""
        return self.traits.is_cpu and product.shape[0] == 1 and _weight_kind(product) in self._many

    def computed(self, tensor: Tensor) -> bool:
        """Whether a tensor's elements are there before the command that comes next."""
        root = tensor
        while root.op == "view" and root.base is not None:
            root = root.base
        return root.op == "none" or root.index in self.done

    def _views(self, tensor: Tensor) -> list[Tensor]:
        views = [reader for reader in self._readers[tensor.index] if reader.op == "view"]
        return views + [deeper for view in views for deeper in self._views(view)]


def _weight_kind(product: Tensor) -> tuple[DType, tuple[int, ...]]:
    weight = product.sources[0]
    return weight.dtype, weight.shape


def _readers(graph: Graph) -> list[list[Tensor]]:
    readers: list[list[Tensor]] = [[] for _ in graph.nodes]
    for node in graph.nodes:
        for source in dict.fromkeys(node.sources):
            readers[source.index].append(node)
    return readers
