"""Takes device memory until there is no more, for `hrxmp-run gpu_memory.py`; nothing is written.

What it holds is called weights, so that the error can say who has the memory.
"""

from __future__ import annotations

import hrxmp

_PIECES = 8


def main() -> None:
    executor = hrxmp.connect()
    piece = executor.device.memory_bytes // _PIECES
    held = [executor.storage(piece, f"blk.{n}.weight") for n in range(_PIECES + 1)]
    # A processor's system promises more than it has; it does not promise this.
    held.append(executor.storage(100 * _PIECES * piece, "cache_k.0"))
    print(f"{len(held)} pieces of {piece} bytes, and no end")


if __name__ == "__main__":
    main()
