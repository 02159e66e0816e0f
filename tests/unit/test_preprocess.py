"""The preprocessor of sanitized builds: macros, conditions, and what it refuses."""

from __future__ import annotations

import pytest

from hrxmp.errors import CompileSetupError
from hrxmp.kernels import catalog
from hrxmp.kernels.preprocess import preprocess


def flat(source: str, **defines: str) -> str:
    return " ".join(preprocess(source, defines))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("#define A 1\nA B A1", "1 B A1"),
        ("#define F(x) x + x\nF(2) F (3) F", "2 + 2 3 + 3 F"),
        ("#define F(x, y) y x\nF((1, 2), g(3, 4))", "g ( 3 , 4 ) ( 1 , 2 )"),
        ("#define P_(a, b) a##b\n#define P(a, b) P_(a, b)\n#define N 7\nP(x, N) P_(x, N)", "x7 xN"),
        ("#define OP_add(a, b) a + b\n#define J(a, b) a##b\nJ(OP_, add)(1, 2)", "1 + 2"),
        ("#define A B\n#define B A\nA B", "A B"),
        ("#define F (1)\nF(2)", "( 1 ) ( 2 )"),
        ("#define W(f, ...) f(__VA_ARGS__)\nW(g, 1, 2)", "g ( 1 , 2 )"),
        ("#define A 1\n#undef A\nA", "A"),
        ("#define L(x) \\\n x \\\n x\nL(\n1\n)", "1 1"),
        ('a // A\n/* b\n c */ d "// e"', 'a d "// e"'),
    ],
)
def test_macros(source: str, expected: str) -> None:
    assert flat(source) == expected


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("1", True), ("0", False), ("X", False), ("K", True), ("K == 64 && !X", True),
        ("K > 64 || K < 64", False), ("defined K && defined(K) && !defined(X)", True),
        ("(K / 3 + 1) % 4 == 2", True), ("K >= 0x40 ? 0 : 1", False), ("-1 < 0", True),
        ("1 + 2 * 3 == 7", True), ("1 << 6 == K", True), ("F(K) == 128", True), ("64u == K", True),
    ],
)  # fmt: skip
def test_conditions(condition: str, holds: bool) -> None:
    source = f"#define F(x) ((x) * 2)\n#if {condition}\nyes\n#else\nno\n#endif"
    assert flat(source, K="64") == ("yes" if holds else "no")


def test_branches_are_taken_once_and_skipped_ones_are_not_read() -> None:
    source = "#if A\n1\n#elif B\n2\n#elif 1\n3\n#else\n4\n#endif\n"
    source += "#if 0\n#if 1\n5\n#endif\n#nonsense\n#endif"
    assert flat(source, A="0", B="1") == "2"
    assert flat(source) == "3"
    assert flat("#ifdef A\n1\n#endif\n#ifndef A\n2\n#endif", A="") == "1"


@pytest.mark.parametrize("source", ["#if 1\n", "#else\n", "#nonsense\n", "#define F(x) x\nF(1\n"])
def test_what_it_does_not_know_is_refused(source: str) -> None:
    with pytest.raises(CompileSetupError, match="sanitizer"):
        flat(source)


def test_no_macro_of_a_kernel_file_is_left() -> None:
    definition = catalog.get("rms_norm_weighted")
    defines = {"K": "64", "WEIGHTED": "1", "LX": "4", "LY": "1", "LZ": "1", "ENTRY_rms_norm": "1"}
    tokens = preprocess(catalog.source_text(definition), defines)
    assert not {"KERNEL", "OVER_ROW", "GROUP_REDUCE", "K", "LX", "#"} & set(tokens)
    assert tokens.count("rms_norm") == 1
