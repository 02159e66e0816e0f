"""Boots a systemd with hrxmp's units installed, in a container over this machine's /usr.

For the deployment test; not a test itself. Root and systemd-nspawn are needed. The container has
a file tree of its own, no network, and this interpreter's packages under /opt/hrxmp, so that the
units run as installed, with all their hardening.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDS = ("systemd-nspawn", "systemd-sysusers", "nsenter")
BOOT_S = 60
BASE = "/opt/base"
VENV = "/opt/hrxmp"
SOURCE = "/opt/source"
ORIGINAL = "/opt/original"


def usable() -> bool:
    """Whether this machine can boot one."""
    if os.geteuid() != 0 or not all(shutil.which(name) for name in NEEDS):
        return False
    return subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"]).returncode == 0


_UNIFIED = ("unshare", "--mount", "sh", "-c",
            'mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec "$@"', "sh")  # fmt: skip
"""Gives a command the unified cgroup hierarchy, which systemd needs to see that a unit is empty;
machines without it have the old one at the same place."""

_LIBRARIES = f"LD_LIBRARY_PATH={BASE}/lib"
"""An interpreter with a libpython of its own may look for it where it was before."""


class Machine:
    """A running container; `tree` is its root as seen from here."""

    def __init__(self, tree: Path, process: subprocess.Popen[bytes]) -> None:
        self.tree = tree
        self.process = process
        self.leader = 0

    def inside(self, *command: str) -> list[str]:
        """The command that runs `command` inside, as root."""
        return ["nsenter", "--all", f"--target={self.leader}", "env", _LIBRARIES, *command]

    def shell(self, *command: str, check: bool = True, timeout_s: float = 60) -> str:
        """Run a command inside, as root; what it printed."""
        done = subprocess.run(
            self.inside(*command),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=timeout_s,
        )  # fmt: skip
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stdout}")
        return done.stdout

    def show(self, unit: str, field: str) -> str:
        """A property of a unit."""
        return self.shell("systemctl", "show", "--value", f"--property={field}", unit).strip()

    def changed(self, unit: str, field: str, before: str, timeout_s: float = 60) -> str:
        """Wait until a property of a unit is another, and not 0; what it is then."""
        return self._until(unit, field, lambda now: now not in (before, "0"), timeout_s)

    def settled(self, unit: str, timeout_s: float = 60) -> str:
        """Wait until a unit is neither running nor about to; its state then."""
        over = ("inactive", "failed")
        return self._until(unit, "ActiveState", lambda now: now in over, timeout_s)

    def _until(self, unit: str, field: str, right: Callable[[str], bool], timeout_s: float) -> str:
        # systemctl has no such wait without a message bus, so it is asked again and again.
        stop = time.monotonic() + timeout_s
        while not right(now := self.show(unit, field)):
            if time.monotonic() > stop:
                raise TimeoutError(f"{unit}: {field} is {now}\n{self.journal(unit)}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(0.1)
                raise RuntimeError(f"the container ended with {code}")
        return now

    def journal(self, unit: str) -> str:
        """What a unit said."""
        return self.shell("journalctl", "--no-pager", "-o", "cat", "-u", unit)


@contextlib.contextmanager
def machine(folder: Path, drop_ins: Mapping[str, str]) -> Iterator[Machine]:
    """A booted container with hrxmp.target up and these drop-ins by unit; it is gone afterwards."""
    tree, overlay = folder / "tree", folder / "overlay"
    _write_tree(tree)
    for unit, text in drop_ins.items():
        (tree / f"etc/systemd/system/{unit}.d").mkdir(parents=True)
        (tree / f"etc/systemd/system/{unit}.d/test.conf").write_text(text)
    _write_packages(overlay / "opt")
    command = [
        "systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", "--private-network",
        "--notify-ready=yes", "--kill-signal=SIGRTMIN+3", "--console=pipe",
        f"--machine=hrxmp-{uuid.uuid4().hex[:8]}",
        f"--directory={tree}",
        f"--overlay-ro=/usr:{overlay}/usr:/usr",
        f"--overlay-ro={sys.prefix}:{overlay}/opt:{VENV}",
        f"--bind-ro={sys.base_prefix}:{BASE}",
        f"--bind-ro={ROOT}:{SOURCE}",
        "systemd.unit=hrxmp.target",
        f"systemd.setenv={_LIBRARIES}",
    ]  # fmt: skip
    install = ["make", "--silent", "install-systemd", f"DESTDIR={overlay}"]
    subprocess.run(install, cwd=ROOT, check=True, timeout=30)
    shutil.move(overlay / "etc/hrxmp", tree / "etc/hrxmp")
    _make_users(tree, overlay)
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.bind(str(folder / "notify"))
    told.settimeout(BOOT_S)
    with (folder / "console").open("wb") as console:
        process = subprocess.Popen(
            [*_UNIFIED, *command],
            stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT,
            env={**os.environ, "NOTIFY_SOCKET": str(folder / "notify"),
                 "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
        )  # fmt: skip
    running = Machine(tree, process)
    try:
        running.leader = _leader(told)
        yield running
    finally:
        told.close()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _write_tree(tree: Path) -> None:
    for name in ("etc", "opt", "usr", "var/lib", "tmp", "run"):
        (tree / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (tree / name).symlink_to(f"usr/{name}")
    (tree / "etc/machine-id").write_text(uuid.uuid4().hex + "\n")
    for name in ("os-release", "ld.so.cache", "ld.so.conf", "nsswitch.conf", "localtime"):
        if Path("/etc", name).exists():
            shutil.copy(Path("/etc", name), tree / "etc" / name)
    if Path("/etc/OpenCL").is_dir():
        shutil.copytree("/etc/OpenCL", tree / "etc/OpenCL")


def _write_packages(overlay: Path) -> None:
    """What is laid over this environment, so that it works at its new place."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = overlay / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    packages.mkdir(parents=True)
    (packages / "hrxmp").symlink_to(f"{SOURCE}/hrxmp")
    (overlay / "pyvenv.cfg").write_text(f"home = {BASE}/bin\nversion = {version}\n")
    (overlay / "bin").mkdir()
    for name in ("python", "python3"):
        (overlay / "bin" / name).symlink_to(f"{BASE}/bin/python{version}")
    for role in ("run", "aggregator", "workers", "trace"):
        script = overlay / f"bin/hrxmp-{role}"
        script.write_text(f"#!{VENV}/bin/python\nfrom hrxmp.__main__ import {role}\n{role}()\n")
        script.chmod(0o755)


def _make_users(tree: Path, overlay: Path) -> None:
    files = ["/usr/lib/sysusers.d/basic.conf", overlay / "usr/lib/sysusers.d/hrxmp.conf"]
    for file in files:
        command = ["systemd-sysusers", f"--root={tree}", str(file)]
        subprocess.run(command, check=True, timeout=30, stderr=subprocess.DEVNULL)


def _leader(told: socket.socket) -> int:
    """The container's process 1 as seen from here, once everything has started."""
    found: dict[str, str] = {}
    while found.get("READY") != "1":
        text = told.recv(4096).decode()
        found |= dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return int(found["X_NSPAWN_LEADER_PID"])
