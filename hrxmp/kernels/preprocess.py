"""A small C preprocessor: kernel source with its defines becomes tokens without macros.

Pure text work, used by sanitized builds only (`instrument`): there every access must be seen as
the compiler will see it. It knows what kernel files use: object and function macros, `##`,
conditions over integers; includes are put in their places by the catalog before. `#pragma` lines
stay, as one token each; what the compiler itself predefines is unknown here and counts as 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from hrxmp.errors import CompileSetupError

_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|\.?\d(?:[eEpP][+-]|[\w.])*|[A-Za-z_]\w*'
    r"|<<=|>>=|\.\.\.|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|##|[^\s]"
)
_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")

Token = tuple[str, frozenset[str]]
"""Text, and the macros that may not be expanded in it any more."""


class Macro(msgspec.Struct, frozen=True):
    """`params` is None for a macro without parentheses."""

    params: tuple[str, ...] | None
    body: tuple[str, ...]


def is_identifier(token: str) -> bool:
    """Whether a token is a name."""
    return bool(_IDENTIFIER.fullmatch(token))


def tokens_of(text: str) -> list[str]:
    """The tokens of a text without comments."""
    return _TOKEN.findall(text)


def preprocess(source: str, defines: dict[str, str]) -> list[str]:
    """The tokens of `source` under `defines`. CompileSetupError for what it does not know."""
    reader = _Reader({name: Macro(None, tuple(tokens_of(t))) for name, t in defines.items()})
    text = _COMMENT.sub(lambda m: m[0] if m[0].startswith('"') else " ", source)
    for line in text.replace("\\\n", " ").splitlines():
        reader.line(line)
    return reader.finish()


class _Reader:
    """Lines in, tokens out: conditions and definitions as they come."""

    def __init__(self, macros: dict[str, Macro]) -> None:
        self._macros = macros
        self._waiting: list[str] = []
        self._done: list[str] = []
        self._conditions: list[tuple[bool, bool, bool]] = []
        """(the branch is taken, one has been, the surroundings are)"""

    def finish(self) -> list[str]:
        self._flush()
        if self._conditions:
            raise CompileSetupError("the sanitizer misses an #endif")
        return self._done

    def line(self, line: str) -> None:
        if not line.lstrip().startswith("#"):
            if self._active:
                self._waiting += tokens_of(line)
            return
        name, *rest = tokens_of(line.lstrip()[1:]) or [""]
        if name in _CONDITIONS:
            self._condition(name, rest)
        elif self._active:
            self._directive(name, rest, line)

    @property
    def _active(self) -> bool:
        return all(taken for taken, _, _ in self._conditions)

    def _directive(self, name: str, rest: list[str], line: str) -> None:
        if name in ("define", "undef"):
            self._flush()
            self._macros.pop(rest[0], None)
        if name == "define":
            self._macros[rest[0]] = _macro(line, rest)
        elif name == "pragma":
            self._waiting.append("\n" + line.strip() + "\n")
        elif name not in ("undef", "line", ""):
            raise CompileSetupError(f"the sanitizer does not know #{name}")

    def _condition(self, name: str, rest: list[str]) -> None:
        self._flush()
        if name in ("if", "ifdef", "ifndef"):
            outer = self._active
            taken = outer and self._holds(name, rest)
            self._conditions.append((taken, taken, outer))
            return
        if not self._conditions:
            raise CompileSetupError(f"the sanitizer misses the #if of an #{name}")
        _, before, outer = self._conditions.pop()
        if name != "endif":
            taken = outer and not before and (name == "else" or self._holds("if", rest))
            self._conditions.append((taken, before or taken, outer))

    def _holds(self, name: str, rest: list[str]) -> bool:
        if name != "if":
            return (rest[0] in self._macros) is (name == "ifdef")
        words: list[str] = []
        while rest:
            word, *rest = rest
            if word != "defined":
                words.append(word)
                continue
            at = 1 if rest[0] == "(" else 0
            words.append(str(int(rest[at] in self._macros)))
            rest = rest[3:] if at else rest[1:]
        return bool(_Condition(expand(words, self._macros)).value())

    def _flush(self) -> None:
        self._done += expand(self._waiting, self._macros)
        self._waiting = []


_CONDITIONS = ("if", "ifdef", "ifndef", "elif", "else", "endif")


def _macro(line: str, rest: list[str]) -> Macro:
    """A definition; it has parameters when a parenthesis touches its name."""
    name, *body = rest
    if not re.search(rf"define\s+{name}\(", line):
        return Macro(None, tuple(body))
    end = body.index(")")
    return Macro(tuple(t for t in body[1:end] if t != ","), tuple(body[end + 1 :]))


def expand(tokens: list[str], macros: dict[str, Macro]) -> list[str]:
    """All macros of a token list expanded, again and again, none within itself."""
    return [text for text, _ in _expand([(text, frozenset()) for text in tokens], macros)]


def _expand(tokens: list[Token], macros: dict[str, Macro]) -> list[Token]:
    stack, done = list(reversed(tokens)), []
    while stack:
        text, hidden = stack.pop()
        macro = macros.get(text)
        if macro is None or text in hidden:
            done.append((text, hidden))
        elif macro.params is None:
            found = _substitute(macro, [], macros)
            stack += _reversed_and_hidden(found, hidden | {text})
        elif stack and stack[-1][0] == "(":
            arguments, end = _arguments(text, stack)
            found = _substitute(macro, arguments, macros)
            stack += _reversed_and_hidden(found, (hidden & end) | {text})
        else:
            done.append((text, hidden))
    return done


def _reversed_and_hidden(tokens: list[Token], hidden: frozenset[str]) -> list[Token]:
    return [(text, own | hidden) for text, own in reversed(tokens)]


def _arguments(name: str, stack: list[Token]) -> tuple[list[list[Token]], frozenset[str]]:
    """The arguments of a call, taken from the stack, and what its closing parenthesis hides."""
    stack.pop()
    found: list[list[Token]] = [[]]
    depth = 0
    while stack:
        token = stack.pop()
        if token[0] == ")" and depth == 0:
            return found, token[1]
        if token[0] == "," and depth == 0:
            found.append([])
            continue
        depth += (token[0] in "([{") - (token[0] in ")]}")
        found[-1].append(token)
    raise CompileSetupError(f"the sanitizer misses the end of a call of the macro {name}")


def _substitute(
    macro: Macro, arguments: list[list[Token]], macros: dict[str, Macro]
) -> list[Token]:
    """A macro's body with its arguments in place; those beside `##` as they are written."""
    given = _given(macro.params or (), arguments)
    done: list[Token] = []
    body = macro.body
    for at, text in enumerate(body):
        if text == "##":
            continue
        pasted = at > 0 and body[at - 1] == "##"
        raw = pasted or (at + 1 < len(body) and body[at + 1] == "##")
        part: list[Token] = [(text, frozenset())]
        if text in given:
            part = given[text] if raw else _expand(given[text], macros)
        if pasted and done and part:
            first = done.pop()
            part = [(first[0] + part[0][0], frozenset()), *part[1:]]
        done += part
    return done


def _given(params: tuple[str, ...], arguments: list[list[Token]]) -> dict[str, list[Token]]:
    """Arguments by parameter; those of `...` are one, with their commas."""
    if params[-1:] != ("...",):
        return dict(zip(params, arguments, strict=False))
    fixed = len(params) - 1
    rest = [token for part in arguments[fixed:] for token in ((",", frozenset[str]()), *part)]
    return {**dict(zip(params, arguments[:fixed], strict=False)), "__VA_ARGS__": rest[1:]}


class _Condition:
    """The value of an #if: integers, names that are not defined count as 0."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = list(reversed(tokens))

    def value(self) -> int:
        """The value of the whole condition."""
        found = self._ternary()
        if self._tokens:
            raise CompileSetupError(f"the sanitizer does not know {self._tokens[-1]!r} in an #if")
        return found

    def _ternary(self) -> int:
        found = self._binary(0)
        if not self._take("?"):
            return found
        first = self._ternary()
        self._take(":")
        second = self._ternary()
        return first if found else second

    def _binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._unary()
        found = self._binary(level + 1)
        while self._tokens and self._tokens[-1] in _LEVELS[level]:
            operator = _LEVELS[level][self._tokens.pop()]
            found = int(operator(found, self._binary(level + 1)))
        return found

    def _unary(self) -> int:
        if self._take("!"):
            return int(not self._unary())
        if self._take("-"):
            return -self._unary()
        if self._take("("):
            found = self._ternary()
            self._take(")")
            return found
        text = self._tokens.pop() if self._tokens else "0"
        return 0 if is_identifier(text) else int(text.rstrip("uUlL"), 0)

    def _take(self, text: str) -> bool:
        if self._tokens and self._tokens[-1] == text:
            self._tokens.pop()
            return True
        return False


_LEVELS: list[dict[str, Callable[[int, int], int]]] = [
    {"||": lambda a, b: bool(a) or bool(b)},
    {"&&": lambda a, b: bool(a) and bool(b)},
    {"|": lambda a, b: a | b},
    {"&": lambda a, b: a & b},
    {"==": lambda a, b: a == b, "!=": lambda a, b: a != b},
    {"<": lambda a, b: a < b, ">": lambda a, b: a > b, "<=": lambda a, b: a <= b,
     ">=": lambda a, b: a >= b},
    {"<<": lambda a, b: a << b, ">>": lambda a, b: a >> b},
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {"*": lambda a, b: a * b, "/": lambda a, b: int(a / b), "%": lambda a, b: a % b},
]  # fmt: skip
