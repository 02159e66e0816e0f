"""Every message decoder against hostile bytes: a typed refusal or a valid message, nothing else."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hrxmp import messages, records
from hrxmp.clock import HybridLogicalClock, mono_ns, wall_ns
from hrxmp.identity import new_identity
from hrxmp.wire import Link

UNIONS = {
    name: getattr(messages, name)
    for name in ("ToPool", "FromPool", "ToWorker", "FromWorker", "ToAggregator", "FromAggregator")
}
BODIES = sorted(
    {member for union in UNIONS.values() for member in typing.get_args(union)},
    key=lambda member: member.__name__,
)
DECODERS = {name: msgspec.msgpack.Decoder(union) for name, union in UNIONS.items()}


def refuses(decoder: Any, payload: bytes) -> bool:
    """Whether the payload is refused, by the errors that `wire` expects and by no others."""
    try:
        found = decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return True
    assert isinstance(found, msgspec.Struct)
    return False


@given(st.sampled_from(sorted(UNIONS)), st.binary(max_size=2000))
@settings(max_examples=500)
def test_random_bytes_are_refused_or_valid(name: str, payload: bytes) -> None:
    refuses(DECODERS[name], payload)


structures = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20)
    | st.binary(max_size=20) | st.floats(),
    lambda inner: st.lists(inner, max_size=5)
    | st.dictionaries(st.text(max_size=12), inner, max_size=5),
    max_leaves=20,
)  # fmt: skip
kinds = st.sampled_from([body.__struct_config__.tag for body in BODIES])


@given(st.sampled_from(sorted(UNIONS)), kinds, st.dictionaries(st.text(max_size=12), structures))
@settings(max_examples=60)
def test_well_formed_nonsense_is_refused_or_valid(
    name: str, kind: str, fields: dict[str, Any]
) -> None:
    refuses(DECODERS[name], msgspec.msgpack.encode({**fields, "kind": kind}))


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@given(data=st.data())
@settings(max_examples=40)
def test_real_messages_survive_and_mangled_ones_do_no_harm(body: Any, data: st.DataObject) -> None:
    """A message made by its own type decodes to itself; with bytes changed it may be refused."""
    made = data.draw(_BUILDERS[body])
    payload = msgspec.msgpack.encode(made)
    union = next(name for name, union in UNIONS.items() if body in typing.get_args(union))
    assert DECODERS[union].decode(payload) == made
    wrong = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        wrong[data.draw(st.integers(0, len(wrong) - 1))] = data.draw(st.integers(0, 255))
    refuses(DECODERS[union], bytes(wrong[: data.draw(st.integers(0, len(wrong)))]))


@given(st.integers(0, 3), st.lists(st.binary(max_size=300), max_size=12))
@settings(max_examples=300)
def test_a_link_counts_what_it_drops(which: int, frames: list[bytes]) -> None:
    """`Link` itself, without its socket: whatever the frames, a message or a count."""
    link: Link[Any] = Link.__new__(Link)
    link.dropped = {}
    link.clock = HybridLogicalClock()
    link._decode = DECODERS["ToPool"]
    good = msgspec.msgpack.encode(
        messages.Envelope(
            protocol=messages.PROTOCOL, run_id="r", exec_id=None, source="s",
            incarnation=new_identity("r", "s").incarnation, msg_seq=0, mono_ns=mono_ns(),
            hlc=(wall_ns(), 0),
        )
    )  # fmt: skip
    frames = [[], [good], [good, b"\x80"], frames][which] + (frames if which < 3 else [])
    found = link._open(b"peer", frames)
    assert (found is None) == (sum(link.dropped.values()) == 1)


@given(st.binary(max_size=500))
@settings(max_examples=200)
def test_record_lines_decode_or_are_refused(payload: bytes) -> None:
    refuses(msgspec.json.Decoder(records.AnyRecord), payload)


def test_deep_nesting_is_refused_and_does_not_crash() -> None:
    for opening in (b"\x91", b"\x81\xa1a"):
        for decoder in DECODERS.values():
            assert refuses(decoder, opening * 100_000)
            assert refuses(decoder, b"\x82\xa4kind\xa5hello\xa1x" + opening * 100_000)


def _fields(cls: Any) -> Any:
    """A strategy for a struct, field by field, with numbers that the wire can carry."""
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{name: _of(hints[name]) for name in cls.__struct_fields__})


def _of(kind: Any) -> Any:
    if kind is int:
        return st.integers(-(2**63), 2**63 - 1)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _fields(kind)
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (list, tuple) and arguments:
        if typing.get_origin(kind) is list:
            return st.lists(_of(arguments[0]), max_size=3)
        if arguments[-1] is Ellipsis:
            return st.lists(_of(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*(_of(argument) for argument in arguments))
    if typing.get_origin(kind) is dict:
        return st.dictionaries(_of(arguments[0]), _of(arguments[1]), max_size=3)
    if arguments:  # a union
        return st.one_of(*(st.none() if a is type(None) else _of(a) for a in arguments))
    return st.from_type(kind)


_BUILDERS = {body: _fields(body) for body in BODIES}
