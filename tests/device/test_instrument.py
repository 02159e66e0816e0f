"""Instrumented kernels on real devices: what is in bounds works as before, what is not is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hrxmp.errors import CompileSetupError
from hrxmp.executor.findings import Findings
from hrxmp.executor.lowering import lower
from hrxmp.graph import Graph
from hrxmp.kernels.device import Device
from hrxmp.kernels.instrument import COMMAND_INTS, FINDING_INTS, ZONE_BYTES, instrument
from hrxmp.kernels.loader import opencl

COUNT = 64
HEAD = """
typedef struct { float a, b; } Pair;
typedef struct { global const float *from; int at; } Where;
inline float get(global const float *p, int i) { return p[i]; }
inline float deeper(global const float *p, int i) { return get(p + 1, i - 1); }
inline void put(global float *p, int i, float v) { p[i] = v; }
#define GET(p, i) (p)[i]
kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void k(int n, global const float *x, global float *y, global const half *h) {
    int i = get_global_id(0);
    if (i >= n)
        return;
"""
GOOD = """
    local float shared[4];
    float own[2][3], plain = 0.0f;
    float16 wide = vload16(0, x + i / 16 * 16);
    for (int a = 0; a < 2; a++)
        for (int b = 0; b < 3; b++) own[a][b] = x[i] * (a + b);
    shared[i % 4] = own[1][2];
    barrier(CLK_LOCAL_MEM_FENCE);
    global const Pair *pair = (global const Pair *)x;
    Where where = {x, i};
    int near = i > 0 ? i - 1 : i;
    plain += pair[i / 2].a * 0.0f + pair->b * 0.0f + *x * 0.0f + where.from[where.at] * 0.0f;
    plain += vload_half(i, h) + deeper(x, i) + GET(x, near) * 0.0f + wide.s3 * 0.0f;
    vstore4((float4)(0.0f), 0, own[0] - 0 + 0 * i == own[0] ? shared : shared);
    y[i] = plain;
    y[i] += shared[0] + own[1][1];
    put(y, i, y[i]);
    ((global uint *)y)[i] |= 0u;
"""
BAD = {
    "y[i] = x[i + 8];": ("x", "access", 64, 8),
    "y[i + 2] = x[i];": ("y", "access", 64, 2),
    "y[i - 3] += x[i];": ("y", "access", -3, 3),
    "y[i] = deeper(x, i + 1);": ("x", "access", 64, 1),
    "put(y, i * 2, x[i]);": ("y", "access", 64, 32),
    "y[i] = vload16(i / 8, x).s0;": ("x", "access", 64, 32),
    "vstore4((float4)(x[i]), i, y);": ("y", "access", 64, 48),
    "y[i] = vload_half(i + 1, h);": ("h", "access", 64, 1),
    "y[i] = ((global const Pair *)x)[i].a;": ("x", "access", 32, 32),
    "y[i] = *(x + i + 4);": ("x", "access", 64, 4),
    "Where w = {x, i + 1}; y[i] = w.from[w.at];": ("x", "access", 64, 1),
    "global const Pair *p = (global const Pair *)(x + i); y[i] = p->b;": ("x", "access", 31, 1),
    "if (i == 5) y[i] = NAN; else y[i] = x[i];": ("y", "value", 5, 1),
    "y[i] = 1.0f / (i % 32);": ("y", "value", 0, 2),
    "vstore2((float2)(0.0f, log(0.0f)), i / 2, y);": ("y", "value", 0, 64),
}  # fmt: skip


class Checked:
    """One instrumented kernel over x (ones), y (zeros) and h (ones), COUNT elements each."""

    def __init__(self, device: Device, body: str, checks: tuple[str, ...]) -> None:
        cl = opencl()
        text = instrument(HEAD + body + "\n}\n", {}, "k", checks)
        program = cl._cl._Program(device.context, text)
        program._build(b"-cl-std=CL3.0", [device.handle])
        kernel = cl.Kernel(program, "k")
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        arrays = [
            np.ones(COUNT, np.float32),
            np.zeros(COUNT, np.float32),
            np.ones(COUNT, np.float16),
        ]
        found = np.zeros(ZONE_BYTES // 4 + 2 * COMMAND_INTS, np.int32)
        buffers = [cl.Buffer(device.context, flags, hostbuf=a) for a in (*arrays, found)]
        sizes = [np.uint64(array.nbytes) for array in arrays]
        kernel.set_args(np.int32(COUNT), *buffers, np.int32(1), *sizes)
        cl.enqueue_nd_range_kernel(device.queue, kernel, (COUNT,), (1,))
        self.y = np.empty(COUNT, np.float32)
        cl.enqueue_copy(device.queue, self.y, buffers[1])
        cl.enqueue_copy(device.queue, found, buffers[3])
        device.queue.finish()
        before, mine = np.split(found[ZONE_BYTES // 4 :].reshape(-1, FINDING_INTS), 2)
        assert not before.any()  # another command's findings
        self.findings = {
            ("xyh"[slot // 2], ("access", "value")[slot % 2]): self._finding(mine[slot])
            for slot in np.flatnonzero(mine[:, 0])
        }

    def _finding(self, values: np.ndarray[Any, Any]) -> tuple[int, int]:
        return int(values[1:3].view(np.int64)[0]), int(values[0])


def test_nothing_is_found_in_a_good_kernel(device: Device) -> None:
    found = Checked(device, GOOD, ("access", "value"))
    assert found.findings == {}
    expected = Checked(device, GOOD, ())
    np.testing.assert_array_equal(found.y, expected.y)
    assert expected.y.all()


@pytest.mark.parametrize("body", BAD)
def test_what_is_planted_is_found(device: Device, body: str) -> None:
    binding, check, index, count = BAD[body]
    found = Checked(device, body, ("access", "value"))
    assert set(found.findings) == {(binding, check)}
    first, counted = found.findings[binding, check]
    assert counted == count
    # Work-items run in any order, so the first that is noted may be any of the bad ones; the last
    # of them store four elements each.
    assert index <= first < index + 4 * COUNT
    if check == "value":
        assert Checked(device, body, ("access",)).findings == {}


def test_where_bad_accesses_go_there_are_zeros(device: Device) -> None:
    """What a bad read got from there was now and then no number, and so one more finding."""
    graph = Graph(uid=0)
    graph.output(graph.scale(graph.input("x", (4,)), 2.0), "y")
    cl, found = opencl(), Findings(device, lower(graph, device.traits, 0).commands)
    zone = np.empty(ZONE_BYTES, np.uint8)
    for _ in range(2):
        cl.enqueue_copy(device.queue, zone, found._memory, is_blocking=True)
        assert not zone.any()
        dirty = np.full(ZONE_BYTES + 4, 255, np.uint8)
        dirty[ZONE_BYTES:].view(np.int32)[0] = 1  # a bad access of the first binding
        cl.enqueue_copy(device.queue, found._memory, dirty, is_blocking=True)
        assert [item.count for item in found.collect()] == [1]


@pytest.mark.parametrize(
    "body",
    [
        'asm volatile("ld.global.f32 %0, [%1];" : "=f"(y[0]) : "l"(x));',
        "async_work_group_copy(shared, x, 4, 0);",
        "y[i++] = 1.0f;",
    ],
)
def test_what_cannot_be_checked_is_refused(body: str) -> None:
    with pytest.raises(CompileSetupError, match="sanitizer"):
        instrument(HEAD + body + "}", {}, "k", ("access",))
