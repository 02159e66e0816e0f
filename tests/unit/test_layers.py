"""Imports point down, and each module names only the third-party packages that it may."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hrxmp"

LEVELS = {
    "errors": 0, "settings": 0, "identity": 0, "clock": 0, "dtypes": 0, "kernels.keys": 0,
    "messages": 1, "records": 1,
    "wire": 2, "trace": 2, "delivery": 2, "record_lines": 2, "spool": 2, "lifecycle": 2,
    "supervise": 2, "scratch": 2, "notify": 2,
    "graph": 3, "kernels": 3,
    "executor": 4, "workers": 4, "aggregator": 4,
    "launcher": 5, "__main__": 5, "models": 5, "workloads": 5, "tracetool": 5, "__init__": 5,
}  # fmt: skip
SIBLINGS = {"executor", "workers", "aggregator"}
THIRD_PARTY = {
    "pyopencl": {"kernels.loader", "kernels.device", "kernels.build", "kernels.probe", "executor"},
    "numpy": {"kernels.layout", "executor", "models", "workloads", "graph"},
    "zmq": {"wire"},
    "gguf": {"models"},
    "tokenizers": {"models"},
    "rich": {"launcher", "models", "workloads", "tracetool"},
    "prometheus_client": {"aggregator.metrics"},
    "opentelemetry": {"tracetool", "aggregator.otlp"},
    "msgspec": {""},
}
STANDARD = sys.stdlib_module_names
MODULES = sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """A module's name below `hrxmp`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    name = ".".join(parts)
    return name.removesuffix(".__init__") if len(parts) > 1 else name


def lookup(table: dict[str, int], name: str) -> int:
    """The level of the longest listed prefix of a module's name."""
    while name not in table:
        name, dot, _ = name.rpartition(".")
        if not dot:
            raise KeyError(name)
    return table[name]


def imports(path: Path, *, top_only: bool) -> set[str]:
    """Absolute modules that a file imports at run time."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    nodes = tree.body if top_only else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            deeper = {f"{node.module}.{alias.name}" for alias in node.names}
            files = {name for name in deeper if is_module(name)}
            found |= files or {node.module}
    return found


def is_module(name: str) -> bool:
    """Whether a dotted name is a file or package of ours."""
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_point_down(path: Path) -> None:
    name = dotted(path)
    if name == "__init__":
        return
    level = lookup(LEVELS, name)
    for module in imports(path, top_only=True):
        if not module.startswith("hrxmp."):
            continue
        other = module.removeprefix("hrxmp.")
        assert lookup(LEVELS, other) <= level, f"{name} imports {other}, which is above it"
        ours, theirs = name.split(".")[0], other.split(".")[0]
        apart = {ours, theirs} <= SIBLINGS and ours != theirs
        assert not apart, f"{name} imports {other}: processes share messages, not code"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_third_party_packages_are_named_where_they_may_be(path: Path) -> None:
    name = dotted(path)
    for module in imports(path, top_only=False):
        package = module.split(".")[0]
        if package in STANDARD or package == "hrxmp":
            continue
        allowed = THIRD_PARTY.get(package, set())
        assert any(
            not prefix or name == prefix or name.startswith(f"{prefix}.") for prefix in allowed
        ), f"{name} imports {package}"


@pytest.mark.parametrize("role", ["aggregator", "workers"])
def test_services_start_where_the_driver_is_broken(role: str, tmp_path: Path) -> None:
    """pyopencl and numpy raise when imported; the service must still come up and be ready."""
    for package in ("pyopencl", "numpy"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('broken on purpose')\n")
    code = (
        "import os, signal, sys, threading\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "read, write = os.pipe()\n"
        "def ready():\n"
        "    assert os.read(read, 1) == b'R'\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "threading.Thread(target=ready, daemon=True).start()\n"
        f"from hrxmp.{role}.main import main\n"
        f"code = main(['--bind', 'ipc://{tmp_path}/s', '--ready-fd', str(write)])\n"
        "assert not {'pyopencl', 'numpy'} & set(sys.modules), 'loaded'\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr


def test_modules_and_functions_stay_small() -> None:
    """The size budget of the house style: 400 lines a module, 60 a function at the very most."""
    too_large = [
        f"{dotted(path)}: {count} lines"
        for path in MODULES
        if (count := len(path.read_text().splitlines())) > 400
    ]
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno > 60:
                too_large.append(f"{dotted(path)}.{node.name}: {node.end_lineno - node.lineno}")
    assert not too_large
