"""Who sends: run ids, source names, incarnations. Pure; every process imports it.

A run id sorts by time. An incarnation is the monotonic clock at the sender's start: a restarted
process gets a larger one without coordination, so its numbers never mix with its predecessor's.
"""

from __future__ import annotations

import hashlib
import secrets
import time

import msgspec

from hrxmp.clock import mono_ns


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A sender: one life of one source of one run."""

    run_id: str
    source: str
    incarnation: int


def new_run_id() -> str:
    """A fresh run id such as `20261130T215903-9f3a61c2`: UTC second and 32 random bits."""
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + "-" + secrets.token_hex(4)


def fingerprint(*fields: object) -> str:
    """A digest that tells devices apart, made of what tells their kernels' keys apart."""
    return hashlib.sha256("\0".join(map(str, fields)).encode()).hexdigest()


def new_identity(run_id: str, source: str) -> Identity:
    """The identity of a process that starts now."""
    return Identity(run_id=run_id, source=source, incarnation=mono_ns())
