"""The deployment files: settings as they are, units that systemd accepts, exposure, the installer.

`python -m tests.unit.test_deploy` writes `deploy/hrxmp.env` from `settings.py`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hrxmp.settings import Settings, default_text, describe, variable

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
BINDIR = Path(sys.executable).parent
LIMITS = {"hrxmp-aggregator.service": 1.0, "hrxmp-workers.service": 1.0, "hrxmp-run@.service": 2.5}
"""Highest exposure, of 10. A run may be a server of any kind: it keeps the network."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def settings_file() -> str:
    """`hrxmp.env`: every variable, its help and its default, as comments."""
    head = (
        "# Settings of all hrxmp services, read at their start; /etc/hrxmp/NAME.env, for the run\n"
        "# NAME alone, wins. Each line shows a default; take the # away to set another value.\n"
    )
    lines = [
        f"\n# {text}\n#{variable(field)}={default_text(field)}\n"
        for field, _kind, text in describe()
    ]
    return head + "".join(lines)


def install(root: Path) -> None:
    """Run the installer as packagers do."""
    command = ["make", "--silent", "install-systemd", f"DESTDIR={root}", f"BINDIR={BINDIR}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=150)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    install(root)
    return root


def test_the_settings_file_has_every_variable_with_its_default() -> None:
    text = (DEPLOY / "hrxmp.env").read_text()
    assert text == settings_file(), "write it with `python -m tests.unit.test_deploy`"
    active = dict(line.split("=", 1) for line in re.findall(r"^#(HRXMP_\w+=.*)$", text, re.M))
    assert Settings.from_environment(active) == Settings()


def test_every_setting_in_a_unit_exists(installed: Path) -> None:
    known = {variable(field) for field, _kind, _help in describe()}
    named = {
        name
        for unit in (installed / "usr/lib/systemd/system").rglob("hrxmp*")
        if unit.is_file()
        for name in re.findall(r"\bHRXMP_[A-Z_]+", unit.read_text())
    }
    assert "HRXMP_CACHE" in named and named <= known


def test_the_installer_keeps_an_operators_settings(tmp_path: Path) -> None:
    install(tmp_path)
    settings = tmp_path / "etc/hrxmp/hrxmp.env"
    assert settings.read_bytes() == (DEPLOY / "hrxmp.env").read_bytes()
    settings.write_text("HRXMP_WORKERS=3\n")
    install(tmp_path)
    assert settings.read_text() == "HRXMP_WORKERS=3\n"
    assert settings.with_suffix(".env.new").exists()
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".part"]


def test_no_placeholder_is_left(installed: Path) -> None:
    for path in installed.rglob("*"):
        assert not path.is_file() or "@BINDIR@" not in path.read_text(), path


def test_every_alert_is_about_a_metric_that_exists() -> None:
    pytest.importorskip("prometheus_client")
    from hrxmp.aggregator.metrics import Metrics

    samples = {s.name for family in Metrics().registry.collect() for s in family.samples}
    rules = re.findall(r"expr: (.*)", (DEPLOY / "alerts.yml").read_text())
    named = {name for rule in rules for name in re.findall(r"hrxmp_\w+", rule)}
    assert len(rules) == 6 and named <= samples


def test_the_page_names_only_what_there_is() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text()
    units = set(re.findall(r"hrxmp[-a-z]*@?\.(?:service|socket|target)", text))
    assert units and all((DEPLOY / unit).exists() for unit in units)
    known = {variable(field) for field, _kind, _help in describe()}
    assert set(re.findall(r"\bHRXMP_[A-Z_]+", text)) <= known
    rules = (DEPLOY / "alerts.yml").read_text()
    assert all(f"alert: {name}" in rules for name in re.findall(r"`(Hrxmp\w+)`", text))
    help_ = subprocess.run(
        [sys.executable, "-m", "hrxmp", "aggregator", "--help"],
        cwd=ROOT, capture_output=True, text=True, timeout=150, check=True,
    ).stdout  # fmt: skip
    for options in re.findall(r"OPTIONS='([^']+)'", text):
        assert all(word in help_ for word in options.split() if word.startswith("--"))


@needs_systemd
def test_systemd_accepts_every_unit(installed: Path) -> None:
    units = installed / "usr/lib/systemd/system"
    names = sorted(str(path) for path in units.iterdir() if path.is_file())
    assert len(names) == 8
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names],
        capture_output=True,
        text=True,
        timeout=150,
    )
    ours = [line for line in done.stderr.splitlines() if "hrxmp" in line]
    assert done.returncode == 0 and not ours, done.stderr


@needs_systemd
@pytest.mark.parametrize(("service", "limit"), LIMITS.items())
def test_exposure_stays_low(installed: Path, service: str, limit: float) -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--root={installed}", "--no-pager",
         service],
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    (level,) = re.findall(r"Overall exposure level.*: ([0-9.]+)", done.stdout)
    assert float(level) <= limit, done.stdout


if __name__ == "__main__":
    (DEPLOY / "hrxmp.env").write_text(settings_file())
