"""`hrxmp-run keygen FOLDER`: CURVE keys for aggregators and pools on other boxes.

Runs in the launcher's process; starts nothing and opens no socket.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hrxmp.settings import Settings
from hrxmp.wire import make_keys


def main(argv: list[str], settings: Settings) -> int:
    """Make the keys and say what goes where; the exit code."""
    parser = argparse.ArgumentParser(
        prog="hrxmp-run keygen", description="Make CURVE keys for tcp endpoints."
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", default=settings.curve_dir or None,
        help="default: HRXMP_CURVE_DIR",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.folder is None:
        parser.error("a folder is needed")
    make_keys(args.folder)
    sys.stderr.write(
        f"hrxmp: keys are in {args.folder}; set HRXMP_CURVE_DIR to it.\n"
        "hrxmp: a client's box needs server.key, client.key and client.key_secret only;\n"
        "hrxmp: whoever has a key in the folder `clients` is let in.\n"
    )
    return 0
