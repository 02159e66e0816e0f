"""Whether a device can compile and run one line: asked in a child process, because a broken
driver may kill whoever asks (PoCL built for an older LLVM aborts on a newer processor).

Both ends are here. The parent's (`broken_reason`) runs in whatever process opens a device; the
child's (`python -m hrxmp.kernels.probe INDEX`) leaves nothing behind.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from hrxmp.kernels import loader

_TIMEOUT_S = 60.0
_SOURCE = "kernel void answer(global int *out) { out[get_global_id(0)] = 42; }"


def broken_reason(index: int) -> str:
    """Why device `index` cannot be used, or "" when it compiled and ran a one-line kernel.

    The child is told what this process's loader reads, so it numbers the devices alike.
    """
    command = [sys.executable, "-m", "hrxmp.kernels.probe", str(index), loader.prepared_vendors()]
    try:
        with tempfile.TemporaryDirectory(prefix="hrxmp-probe-") as scratch:
            done = subprocess.run(
                [*command, scratch],
                cwd=Path(__file__).parents[2],
                check=False,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
            )
    except subprocess.TimeoutExpired:
        return f"a one-line kernel was not ready after {_TIMEOUT_S:.0f} s"
    except OSError as error:
        return f"the probe could not be started: {error}"
    return _reason(done.returncode, done.stdout.strip() or done.stderr.strip())


def _reason(status: int, text: str) -> str:
    if status == 0:
        return ""
    last = text.splitlines()[-1] if text else "no message"
    if status < 0:
        name = signal.Signals(-status).name
        return f"compiling a one-line kernel died with {name}: {last}"
    return f"a one-line kernel failed: {last}"


def _main(index: int, vendors: str, scratch: str) -> int:
    from hrxmp.kernels import device

    loader.prepare_loader(vendors=vendors, scratch=scratch)
    cl = loader.opencl()
    try:
        opened = device.open_indexed(index)
        program = cl.Program(opened.context, _SOURCE).build()
        out = cl.Buffer(opened.context, cl.mem_flags.WRITE_ONLY, 4)
        program.answer(opened.queue, (1,), (1,), out)
        result = bytearray(4)
        cl.enqueue_copy(opened.queue, result, out)
    except Exception as error:  # whatever it is, it is the reason asked for
        print(f"{type(error).__name__}: {error}".replace("\n", " "))
        return 1
    if int.from_bytes(result, sys.byteorder) != 42:
        print("the kernel's result is wrong")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), *sys.argv[2:]))
