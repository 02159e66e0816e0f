"""Kernel source with every access to memory checked: what `HRXMP_SANITIZER` builds.

Pure text work on preprocessed tokens. Each subscript, `->`, `*p`, vector load and store goes
through `cl/sanitize.h`, where the compiler picks by the pointer's address space whether there is
something to check; so nothing has to be known here about what a name is. Functions get the
bindings' ranges as a hidden first argument; the kernel gets them from arguments of its own at the
end. What could read memory past this (inline assembler, unknown builtins) is refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from hrxmp.errors import CompileSetupError
from hrxmp.kernels import catalog
from hrxmp.kernels.preprocess import is_identifier, preprocess

ZONE_BYTES = 65536
MAX_BINDINGS = 32
FINDING_INTS = 4
COMMAND_INTS = MAX_BINDINGS * 2 * FINDING_INTS
"""Ints of one command's findings: for each binding, of accesses and of values."""

_QUALIFIERS = frozenset(
    ["const", "volatile", "restrict", "static", "inline", "unsigned", "signed", "struct", "union"]
)
_SPACES = frozenset(["global", "local", "private", "constant"])
_TYPE = re.compile(
    r"(?:u?(?:char|short|int|long)|float|double|half)(?:2|3|4|8|16)?"
    r"|void|bool|size_t|ptrdiff_t|uintptr_t|intptr_t|atomic_\w+"
)
_HEADED = frozenset(["if", "for", "while", "switch"])
_STATEMENTS = frozenset(["return", "else", "do", "case", "default", "goto", "break", "continue"])
_ASSIGNMENTS = frozenset(["=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="])
_VECTOR = re.compile(r"v(load|store)(a?)(_half)?(2|3|4|8|16)?(?:_rt[ezpn])?")
_ASSEMBLER = frozenset(["asm", "__asm__", "__asm"])
_FORBIDDEN = re.compile(
    r"async_work_group_\w*copy|wait_group_events|__builtin_\w*(load|store|mem)\w*"
)
_ATOMIC = re.compile(r"atomic_(?!work_item_fence|flag)\w+|atom_\w+")


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


class _Program:
    """One translation unit."""

    def __init__(self, tokens: list[str], *, access: bool) -> None:
        self.tokens = tokens
        self.access = access
        self.bindings = 0
        self.types: set[str] = set()
        self.functions: set[str] = set()

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
                end = _closing(self.tokens, at)
                units.append((head, self.tokens[at + 1 : end]))
                head, at = [], end + 1
                continue
            if token == "{":
                end = _closing(self.tokens, at)
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
            self.types.add(next(t for t in reversed(_plain(head)) if is_identifier(t)))
        elif body is not None and not _is_kernel(head):
            self.functions.add(head[_name_at(head)])

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
            return " ".join([*head, "{", *_Body(self, body).text(), "}"])
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
        return " ".join([*head[:-1], ",", extra, ") {", begin, *_Body(self, body).text(), "}"])


class _Body:
    """The rewriting of one function's body."""

    def __init__(self, program: _Program, tokens: list[str]) -> None:
        self._program = program
        self._tokens = tokens

    def text(self) -> list[str]:
        """The rewritten tokens."""
        return self._statements(0, len(self._tokens))

    # -- statements --------------------------------------------------------------------------

    def _statements(self, at: int, end: int) -> list[str]:
        done: list[str] = []
        fresh = True  # a statement may begin here
        while at < end:
            token = self._tokens[at]
            if fresh and self._declares(at, end):
                part, at = self._declaration(at, end)
                done += part
                continue
            if token in _HEADED:
                close = _closing(self._tokens, at + 1)
                done += [token, "(", *self._statements(at + 2, close), ")"]
                at, fresh = close + 1, True
                continue
            if token == "_Pragma" or token in _ASSEMBLER:
                close = _closing(self._tokens, self._tokens.index("(", at))
                self._check_assembler(at, close)
                done += self._tokens[at : close + 1]
                at, fresh = close + 1, True
                continue
            fresh = token in "{};" or token.startswith("\n") or token in _STATEMENTS or token == ":"
            if token in "{};:" or token.startswith("\n") or token in _STATEMENTS:
                done.append(token)
                at += 1
                continue
            part, at = self._expression(at, end, stop=frozenset(";{}:"))
            done += part
            fresh = True
        return done

    def _is_type(self, token: str) -> bool:
        return bool(_TYPE.fullmatch(token)) or token in self._program.types

    def _declares(self, at: int, end: int) -> bool:
        token = self._tokens[at]
        if token in _QUALIFIERS or token.strip("_") in _SPACES:
            return True
        following = self._tokens[at + 1] if at + 1 < end else ""
        return self._is_type(token) and (is_identifier(following) or following == "*")

    def _declaration(self, at: int, end: int) -> tuple[list[str], int]:
        """Type, declarators with their sizes as they are, initialisers rewritten."""
        done: list[str] = []
        while at < end:
            token = self._tokens[at]
            if token == "[":
                close = _closing(self._tokens, at)
                done += self._tokens[at : close + 1]
                at = close + 1
            elif token == "__attribute__":
                close = _closing(self._tokens, at + 1)
                done += self._tokens[at : close + 1]
                at = close + 1
            elif token == "=":
                part, at = self._expression(at + 1, end, stop=frozenset(",;"))
                done += ["=", *part]
            else:
                done.append(token)
                at += 1
                if token == ";":
                    break
        return done, at

    # -- expressions -------------------------------------------------------------------------

    def _expression(self, at: int, end: int, stop: frozenset[str]) -> tuple[list[str], int]:
        """Up to a token of `stop` outside of parentheses."""
        done: list[str] = []
        operand = False  # an operand has just ended
        conditions = 0
        while at < end:
            token = self._tokens[at]
            conditions += token == "?"
            if token == ":" and conditions:
                conditions -= 1
            elif token in stop:
                break
            if _starts_operand(token) or (token == "*" and not operand):
                part, at = self._operand(at, end)
                done += part
                operand = True
            else:
                done.append(token)
                operand = operand and token in ("++", "--")
                at += 1
        return done, at

    def _operand(self, at: int, end: int) -> tuple[list[str], int]:
        """`*` and casts, then a postfix expression; with the assignment that follows it."""
        token = self._tokens[at]
        if token == "*":
            part, at = self._operand(at + 1, end)
            return self._assigned(part, ["0"], at, end)
        if token == "(" and self._is_cast(at):
            close = _closing(self._tokens, at)
            cast = self._tokens[at : close + 1]
            at = close + 1
            while at < end and self._tokens[at] in ("-", "!", "~", "&", "+"):
                cast.append(self._tokens[at])
                at += 1
            part, at = self._operand(at, end)
            return [*cast, *part], at
        return self._postfix(at, end)

    def _is_cast(self, at: int) -> bool:
        inner = self._tokens[at + 1 : _closing(self._tokens, at)]
        qualifiers = ("*", *_QUALIFIERS, *_SPACES)
        words = [t for t in inner if t.strip("_") not in qualifiers]
        return len(words) == 1 and self._is_type(words[0])

    def _postfix(self, at: int, end: int) -> tuple[list[str], int]:
        token = self._tokens[at]
        self._refuse(token)
        if token in ("(", "{"):
            close = _closing(self._tokens, at)
            done, at = [token, *self._list(at + 1, close), self._tokens[close]], close + 1
        else:
            done, at = [token], at + 1
        while at < end:
            token = self._tokens[at]
            if token == "(":
                close = _closing(self._tokens, at)
                done, at = self._call(done, self._arguments(at + 1, close)), close + 1
            elif token == "[":
                close = _closing(self._tokens, at)
                index = self._list(at + 1, close)
                done, at = self._assigned(done, index, close + 1, end)
            elif token == ".":
                done, at = [*done, ".", self._tokens[at + 1]], at + 2
            elif token == "->":
                done, at = [*_at(done, ["0"]), ".", self._tokens[at + 1]], at + 2
            else:
                break
        return done, at

    def _assigned(
        self, base: list[str], index: list[str], at: int, end: int
    ) -> tuple[list[str], int]:
        """An element, or the assignment to it with the check of what was stored."""
        place = _at(base, index)
        if at >= end or self._tokens[at] not in _ASSIGNMENTS:
            return place, at
        _once(base, index)
        operator = self._tokens[at]
        value, at = self._expression(at + 1, end, stop=frozenset(",;)"))
        return ["SAN_SET", "(", *base, ",", *index, ",", *place, operator, *value, ")"], at

    def _list(self, at: int, end: int) -> list[str]:
        return _joined(self._arguments(at, end))

    def _arguments(self, at: int, end: int) -> list[list[str]]:
        found = []
        while at < end:
            part, at = self._expression(at, end, stop=frozenset(","))
            found.append(part)
            at += 1
        return found

    def _call(self, function: list[str], arguments: list[list[str]]) -> list[str]:
        name = function[0] if len(function) == 1 else ""
        vector = _VECTOR.fullmatch(name)
        if vector:
            return _vector_call(name, vector, arguments)
        if name == "prefetch":
            return ["(", "(", "void", ")", "0", ")"]
        if _ATOMIC.fullmatch(name) and name not in self._program.functions:
            arguments = [["&", *_at(arguments[0], ["0"])], *arguments[1:]]
        if name in self._program.functions:
            arguments = [["san"], *arguments]
        return [*function, "(", *_joined(arguments), ")"]

    def _check_assembler(self, at: int, close: int) -> None:
        """Without operands it reaches no memory of ours."""
        operands = ":" in self._tokens[at:close]
        if operands and self._tokens[at] in _ASSEMBLER:
            self._refuse(self._tokens[at])

    def _refuse(self, token: str) -> None:
        if self._program.access and (token in _ASSEMBLER or _FORBIDDEN.fullmatch(token)):
            raise CompileSetupError(
                f"the sanitizer cannot see what {token!r} accesses",
                remedy="check this kernel with HRXMP_SANITIZER=value, or choose a plain form of it",
            )


def _starts_operand(token: str) -> bool:
    return is_identifier(token) or token in ("(", "{") or token[0] in "\"'." or token[0].isdigit()


def _once(*parts: list[str]) -> None:
    """Checked stores evaluate their place twice: a side effect there must not happen twice."""
    for token in itertools.chain(*parts):
        if token in ("++", "--"):
            raise CompileSetupError(
                "the sanitizer cannot check a store whose place has a side effect"
            )


def _vector_call(name: str, match: re.Match[str], arguments: list[list[str]]) -> list[str]:
    kind, aligned, half, width = match.groups()
    count = width or "1"
    if kind == "store":
        _once(*arguments)
    if not half:
        macro, sizes = f"SAN_{kind.upper()}", [count]
    else:
        step = "4" if aligned and count == "3" else count
        macro, sizes = f"SAN_{kind.upper()}_HALF", [count, step]
    return [macro, "(", *_joined([[name], *([size] for size in sizes), *arguments]), ")"]


def _at(base: list[str], index: list[str]) -> list[str]:
    return ["SAN_AT", "(", *base, ",", *index, ")"]


def _joined(parts: list[list[str]]) -> list[str]:
    done: list[str] = []
    for part in parts:
        done += [",", *part] if done else part
    return done


def _plain(head: list[str]) -> list[str]:
    """A declaration without its attributes."""
    if "__attribute__" not in head:
        return head
    at = head.index("__attribute__")
    return _plain(head[:at] + head[_closing(head, at + 1) + 1 :])


def _closing(tokens: list[str], at: int) -> int:
    """The position of the bracket that closes the one at `at`."""
    depth = 0
    for position in range(at, len(tokens)):
        depth += (tokens[position] in "([{") - (tokens[position] in ")]}")
        if depth == 0:
            return position
    raise CompileSetupError(f"the sanitizer misses the end of a {tokens[at]!r}")


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
