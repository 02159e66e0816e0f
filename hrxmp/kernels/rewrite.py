"""The rewriting of one function's body: every access to memory becomes a checked one.

Pure text work for `instrument`, on preprocessed tokens. Statements and expressions are told apart
just as far as that needs: sizes of arrays in declarations stay as they are, and what is assigned
to an element is checked together with its place.
"""

from __future__ import annotations

import itertools
import re

import msgspec

from hrxmp.errors import CompileSetupError
from hrxmp.kernels.preprocess import is_identifier

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


class Names(msgspec.Struct, kw_only=True):
    """What is known of a translation unit: its type names and its functions."""

    access: bool
    """Whether accesses are checked, so that what hides them is refused."""
    types: set[str] = set()
    functions: set[str] = set()


class Body:
    """The rewriting of one function's body."""

    def __init__(self, names: Names, tokens: list[str]) -> None:
        self._names = names
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
                close = closing(self._tokens, at + 1)
                done += [token, "(", *self._statements(at + 2, close), ")"]
                at, fresh = close + 1, True
                continue
            if token == "_Pragma" or token in _ASSEMBLER:
                close = closing(self._tokens, self._tokens.index("(", at))
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
        return bool(_TYPE.fullmatch(token)) or token in self._names.types

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
                close = closing(self._tokens, at)
                done += self._tokens[at : close + 1]
                at = close + 1
            elif token == "__attribute__":
                close = closing(self._tokens, at + 1)
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
            close = closing(self._tokens, at)
            cast = self._tokens[at : close + 1]
            at = close + 1
            while at < end and self._tokens[at] in ("-", "!", "~", "&", "+"):
                cast.append(self._tokens[at])
                at += 1
            part, at = self._operand(at, end)
            return [*cast, *part], at
        return self._postfix(at, end)

    def _is_cast(self, at: int) -> bool:
        inner = self._tokens[at + 1 : closing(self._tokens, at)]
        qualifiers = ("*", *_QUALIFIERS, *_SPACES)
        words = [t for t in inner if t.strip("_") not in qualifiers]
        return len(words) == 1 and self._is_type(words[0])

    def _postfix(self, at: int, end: int) -> tuple[list[str], int]:
        token = self._tokens[at]
        self._refuse(token)
        if token in ("(", "{"):
            close = closing(self._tokens, at)
            done, at = [token, *self._list(at + 1, close), self._tokens[close]], close + 1
        else:
            done, at = [token], at + 1
        while at < end:
            token = self._tokens[at]
            if token == "(":
                close = closing(self._tokens, at)
                done, at = self._call(done, self._arguments(at + 1, close)), close + 1
            elif token == "[":
                close = closing(self._tokens, at)
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
        if name in ("prefetch", "__builtin_prefetch"):
            return ["(", "(", "void", ")", "0", ")"]
        if _ATOMIC.fullmatch(name) and name not in self._names.functions:
            arguments = [["&", *_at(arguments[0], ["0"])], *arguments[1:]]
        if name in self._names.functions:
            arguments = [["san"], *arguments]
        return [*function, "(", *_joined(arguments), ")"]

    def _check_assembler(self, at: int, close: int) -> None:
        """Without operands it reaches no memory of ours."""
        operands = ":" in self._tokens[at:close]
        if operands and self._tokens[at] in _ASSEMBLER:
            self._refuse(self._tokens[at])

    def _refuse(self, token: str) -> None:
        if self._names.access and (token in _ASSEMBLER or _FORBIDDEN.fullmatch(token)):
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


def closing(tokens: list[str], at: int) -> int:
    """The position of the bracket that closes the one at `at`."""
    depth = 0
    for position in range(at, len(tokens)):
        depth += (tokens[position] in "([{") - (tokens[position] in ")]}")
        if depth == 0:
            return position
    raise CompileSetupError(f"the sanitizer misses the end of a {tokens[at]!r}")
