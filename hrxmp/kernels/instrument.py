"""Kernel source with every access to memory checked: what `HRXMP_SANITIZER` builds.

Pure text work on preprocessed tokens. Each subscript, `->`, `*p`, vector load and store goes
through `cl/sanitize.h`, where the compiler picks by the pointer's address space whether there is
something to check; so nothing has to be known here about what a name is. Functions get the
bindings' ranges as a hidden first argument; the kernel gets them from arguments of its own at the
end. What could read memory past this (inline assembler, unknown builtins) is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hrxmp.errors import CompileSetupError
from hrxmp.kernels import catalog
from hrxmp.kernels.preprocess import is_identifier, preprocess
from hrxmp.kernels.rewrite import Body, Names, closing

ZONE_BYTES = 65536
MAX_BINDINGS = 32
FINDING_INTS = 4
COMMAND_INTS = MAX_BINDINGS * 2 * FINDING_INTS
"""Ints of one command's findings: for each binding, of accesses and of values."""


def instrument(
    source: str, defines: dict[str, str], entry_point: str, checks: Sequence[str]
) -> str:
    """The text of a kernel that checks itself. CompileSetupError for what cannot be checked.

    The kernel takes, after its own arguments: a buffer for findings (ZONE_BYTES that nobody reads,
    then COMMAND_INTS ints a command), the command's number (int), and the size in bytes of each of
    its buffers (ulong), in order.
    """
    program = _Program(preprocess(source, defines), access="access" in checks)
    text = program.text(entry_point)
    flags = [
        f"#define SANITIZE_{name.upper()} {int(name in checks)}" for name in ("access", "value")
    ]
    flags.append(f"#define SAN_BINDINGS {program.bindings}")
    return "\n".join([*flags, catalog.header_text("sanitize.h"), text])


@cache
def revision() -> str:
    """Eight hex digits that change with what a sanitizer does to a kernel."""
    modules = ("instrument.py", "preprocess.py", "rewrite.py")
    texts = [Path(__file__).with_name(name).read_text(encoding="utf-8") for name in modules]
    text = "\n".join([*texts, catalog.header_text("sanitize.h")])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


class _Program:
    """One translation unit."""

    def __init__(self, tokens: list[str], *, access: bool) -> None:
        self.tokens = tokens
        self.names = Names(access=access)
        self.bindings = 0

    def text(self, entry_point: str) -> str:
        """All top-level declarations; function bodies rewritten."""
        units = self._units()
        for head, body in units:
            self._learn(head, body)
        parts = [self._unit(head, body, entry_point) for head, body in units]
        if not self.bindings:
            raise CompileSetupError(f"the sanitizer finds no kernel {entry_point!r} with buffers")
        return "\n".join(parts)

    def _units(self) -> list[tuple[list[str], list[str] | None]]:
        """(head, body) of functions; (tokens, None) of everything else at the top level."""
        units: list[tuple[list[str], list[str] | None]] = []
        head: list[str] = []
        at = 0
        while at < len(self.tokens):
            token = self.tokens[at]
            if token == "{" and _is_function(head):
                end = closing(self.tokens, at)
                units.append((head, self.tokens[at + 1 : end]))
                head, at = [], end + 1
                continue
            if token == "{":
                end = closing(self.tokens, at)
                head += self.tokens[at:end]
                at = end
                token = "}"
            head.append(token)
            if token == ";" or token.startswith("\n"):
                units.append((head, None))
                head = []
            at += 1
        return units

    def _learn(self, head: list[str], body: list[str] | None) -> None:
        if head[:1] == ["typedef"]:
            self.names.types.add(next(t for t in reversed(_plain(head)) if is_identifier(t)))
        elif body is not None and not _is_kernel(head):
            self.names.functions.add(head[_name_at(head)])

    def _unit(self, head: list[str], body: list[str] | None, entry_point: str) -> str:
        if body is None:
            return " ".join(head)
        name = _name_at(head)
        if not _is_kernel(head):
            params = head[name + 2 :]
            hidden = ["private", "const", "San", "*", "san"]
            if params[:1] == ["void"]:
                params = params[1:]
            head = [*head[: name + 2], *hidden, *([","] if params != [")"] else []), *params]
            return " ".join([*head, "{", *Body(self.names, body).text(), "}"])
        return self._kernel(head, name, body, entry_point)

    def _kernel(self, head: list[str], name: int, body: list[str], entry_point: str) -> str:
        if head[name] != entry_point:
            return ""
        buffers = [part[-1] for part in _split(head[name + 2 : -1]) if "*" in part]
        self.bindings = len(buffers)
        if len(buffers) > MAX_BINDINGS:
            raise CompileSetupError(
                f"the sanitizer checks {MAX_BINDINGS} buffers, not {len(buffers)}"
            )
        extra = "global char *san_memory, int san_command"
        extra += "".join(f", ulong san_size_{b}" for b in range(len(buffers)))
        begin = (
            f"San san_table; private San *san = &san_table; san->zone = san_memory; "
            f"san->findings = (global int *)(san_memory + SAN_ZONE) + san_command * {COMMAND_INTS};"
        )
        for b, buffer in enumerate(buffers):
            begin += f" san->base[{b}] = (ulong){buffer};"
            begin += f" san->end[{b}] = (ulong){buffer} + san_size_{b};"
        return " ".join([*head[:-1], ",", extra, ") {", begin, *Body(self.names, body).text(), "}"])


def _plain(head: list[str]) -> list[str]:
    """A declaration without its attributes."""
    if "__attribute__" not in head:
        return head
    at = head.index("__attribute__")
    return _plain(head[:at] + head[closing(head, at + 1) + 1 :])


def _split(tokens: list[str]) -> list[list[str]]:
    """Parameters between commas."""
    parts: list[list[str]] = [[]]
    for token in tokens:
        if token == ",":
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _is_kernel(head: list[str]) -> bool:
    return "kernel" in head or "__kernel" in head


def _is_function(head: list[str]) -> bool:
    return bool(head) and head[-1] == ")" and "=" not in head


def _name_at(head: list[str]) -> int:
    """Where a function's name stands: before the parameters, which end the head."""
    depth = 0
    for position in range(len(head) - 1, -1, -1):
        depth += (head[position] == ")") - (head[position] == "(")
        if depth == 0 and head[position] == "(":
            return position - 1
    raise CompileSetupError("the sanitizer finds a function without a name")
