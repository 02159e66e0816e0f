"""`hrxmp-run status` on a real pool: who waits on what, for which run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hrxmp.settings import Settings
from hrxmp.workloads.status import main as status
from tests.process.pool_fixture import make_request, outcome, running_pool

pytestmark = pytest.mark.timeout(60)


def test_status_says_who_waits_on_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go = tmp_path / "go"
    with running_pool(workers=1) as pool:
        client = pool.client("the-run")
        stuck = {"do": "wait_file", "arg": str(go)}
        slow = client.request(make_request("slow_kernel", urgent=True, **stuck), 42)
        pool.until(lambda reply: any(w.state == "busy" for w in reply.workers))
        queued = client.request(make_request("queued_kernel", n=1), 43)
        pool.until(lambda reply: reply.pending == 2)
        assert status(["-o", "jsonl"], Settings(runtime_dir=str(pool.folder))) == 0
        (line,) = capsys.readouterr().out.splitlines()
        found = msgspec.json.decode(line)
        assert found["pending"] == 2
        assert [job["state"] for job in found["jobs"]] == ["compiling", "queued"]
        assert found["by_run"]["the-run"]["requests"] == 2
        assert status([pool.endpoint], Settings()) == 0
        text = " ".join(capsys.readouterr().out.split())
        for word in ("slow_kernel", "the-run", "execution 42", "nobody yet"):
            assert word in text
        go.touch()
        assert outcome(slow).error is None
        assert outcome(queued).error is None
        client.close()
        pool.until(lambda reply: reply.by_run == {})


def test_status_without_a_service_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status([f"ipc://{tmp_path}/none"], Settings()) == 1
    assert "gives no answer" in capsys.readouterr().err
    assert status([], Settings(runtime_dir=str(tmp_path))) == 1
