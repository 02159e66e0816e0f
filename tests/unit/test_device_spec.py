"""SPECs, the loader's vendors, and the probe's verdicts: no OpenCL in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hrxmp.errors import DeviceAmbiguousError, DeviceNotFoundError
from hrxmp.kernels import loader, probe
from hrxmp.kernels.device import DeviceInfo, select

ROOT = Path(__file__).parents[2]


def info(index: int, name: str, platform: str = "P", pci: str = "", uuid: str = "") -> DeviceInfo:
    return DeviceInfo(
        index=index, platform=platform, name=name, vendor="V", driver="1", version="3", kind="gpu",
        pci=pci, uuid=uuid, compute_units=1, memory_bytes=1,
    )  # fmt: skip


DEVICES = [
    info(0, "H200", "NVIDIA CUDA", "0000:65:00.0", "0a1b"),
    info(1, "H200", "NVIDIA CUDA", "0000:b3:00.0", "0a1c"),
    info(2, "Xeon", "Intel(R) OpenCL"),
    info(3, "pthread-Xeon", "Portable Computing Language"),
]


@pytest.mark.parametrize(
    ("spec", "index"),
    [
        ("0", 0), ("3", 3), (" 1 ", 1), ("0000:b3:00.0", 1), ("b3:00.0", 1), ("B3:00.0", 1),
        ("0A1B", 0), ("GPU-0a1b", 0), ("00000000:B3:00.0", 1), ("pthread", 3), ("portable", 3),
        ("Intel(R) OpenCL / Xeon", 2),
    ],
)  # fmt: skip
def test_spec_means_one_device(spec: str, index: int) -> None:
    assert select(spec, DEVICES).index == index


@pytest.mark.parametrize("spec", ["h200", "xeon", "nvidia"])
def test_spec_that_means_several(spec: str) -> None:
    with pytest.raises(DeviceAmbiguousError, match=spec) as caught:
        select(spec, DEVICES)
    assert "PCI address" in str(caught.value)


@pytest.mark.parametrize("spec", ["4", "-1", "0000:66:00.0", "radeon", " "])
def test_spec_that_means_nothing(spec: str) -> None:
    with pytest.raises(DeviceNotFoundError):
        select(spec, DEVICES)


def test_spec_without_devices() -> None:
    with pytest.raises(DeviceNotFoundError):
        select("0", [])


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """A vendors folder and a prefix that holds Intel's library."""
    vendors, prefix = tmp_path / "vendors", tmp_path / "prefix"
    vendors.mkdir()
    (prefix / "lib").mkdir(parents=True)
    (prefix / "lib" / "libintelocl.so").touch()
    return vendors, prefix


def test_vendors_are_the_systems_and_those_without_icd_file(machine: tuple[Path, Path]) -> None:
    vendors, prefix = machine
    (vendors / "pocl.icd").write_text("libpocl.so.2\n")
    (vendors / "gone.icd").write_text("/nowhere/libgone.so\n")
    (vendors / "empty.icd").write_text("\n")
    assert loader._vendor_libraries(vendors, prefix) == [
        "libpocl.so.2",
        str(prefix / "lib" / "libintelocl.so"),
        "libnvidia-opencl.so.1",
    ]


def test_no_library_twice(machine: tuple[Path, Path]) -> None:
    vendors, prefix = machine
    library = prefix / "lib" / "libintelocl.so"
    (vendors / "intel.icd").write_text(f"{library}\n")
    (vendors / "nvidia.icd").write_text("libnvidia-opencl.so.1\n")
    assert loader._vendor_libraries(vendors, prefix) == [str(library), "libnvidia-opencl.so.1"]


def test_a_machine_without_vendors_folder(tmp_path: Path) -> None:
    assert loader._vendor_libraries(tmp_path / "none", tmp_path) == ["libnvidia-opencl.so.1"]


def prepared(tmp_path: Path, arguments: str, statement: str = "") -> dict[str, str]:
    """The environment after prepare_loader in a process of its own."""
    code = (
        "import json, os\n"
        "from hrxmp.kernels.loader import prepare_loader\n"
        f"prepare_loader(scratch={str(tmp_path)!r}, {arguments})\n"
        f"{statement}\n"
        "print(json.dumps(dict(os.environ)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=150,
        check=True,
    )  # fmt: skip
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


def test_preparing_sets_private_folders_and_removes_them(tmp_path: Path) -> None:
    check = (
        "import stat, pathlib\n"
        "for name in ('OCL_ICD_VENDORS', 'POCL_CACHE_DIR'):\n"
        "    path = pathlib.Path(os.environ[name])\n"
        "    assert stat.S_IMODE(path.stat().st_mode) == 0o700\n"
        "    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700\n"
    )
    environment = prepared(tmp_path, "cuda_cache='/c'", check)
    assert environment["PYOPENCL_NO_CACHE"] == "1"
    assert environment["CUDA_CACHE_PATH"] == "/c"
    assert environment["OCL_ICD_VENDORS"].startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_users_vendors_rule_alone(tmp_path: Path) -> None:
    environment = prepared(tmp_path, "vendors='/my/vendors'")
    assert environment["OCL_ICD_VENDORS"] == "/my/vendors"


def test_opencl_before_preparing_is_refused() -> None:
    code = (
        "from hrxmp.errors import DeviceError\n"
        "from hrxmp.kernels.loader import opencl\n"
        "try:\n"
        "    opencl()\n"
        "except DeviceError as error:\n"
        "    print(error)\n"
        "import sys\n"
        "assert 'pyopencl' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=150,
        check=True,
    )  # fmt: skip
    assert "prepare_loader" in done.stdout


def child(tmp_path: Path, body: str) -> str:
    """An executable that stands for the interpreter of the probe's child."""
    script = tmp_path / "child"
    script.write_text(f"#!{sys.executable}\nimport os, sys\n{body}\n")
    script.chmod(0o700)
    return str(script)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.stderr.write('unknown target CPU\\n'); os.abort()", "SIGABRT: unknown target CPU"),
        ("os.kill(os.getpid(), 11)", "SIGSEGV: no message"),
        ("print('no compiler'); sys.exit(1)", "failed: no compiler"),
        ("import time; time.sleep(60)", "not ready after 1 s"),
    ],
)
def test_probe_says_how_the_child_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    monkeypatch.setattr(sys, "executable", child(tmp_path, body))
    if "not ready" in said:
        monkeypatch.setattr(probe, "_TIMEOUT_S", 1.0)
    assert said in probe.broken_reason(0)


def test_probe_that_succeeds_has_no_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", child(tmp_path, "sys.exit(0)"))
    assert probe.broken_reason(0) == ""
    monkeypatch.setattr(sys, "executable", os.devnull)
    assert "could not be started" in probe.broken_reason(0)
