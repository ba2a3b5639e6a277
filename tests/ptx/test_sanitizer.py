"""Test that each kind of fault is an error.

It names the instruction, the thread and the address.
"""

import re

import pytest
import torch

from tests.ptx.memory import Fault
from tests.ptx.micro import assemble, execute

# Each kernel has two blocks of 64 threads and 256 bytes of shared memory. %r10 is the number of the
# thread, 0 to 127, and %rd13 the address of one of 128 numbers. [%r2] is its place in shared
# memory, [%r3] that of a thread of the other warp. %r9 is the block, %p9 holds in the first one.
OWN = """mov.u32 %r9, %ctaid.x; setp.eq.b32 %p9, %r9, 0; mul.lo.u32 %r10, %r9, 64; add.u32 %r10, %r10, %r1;
mul.wide.u32 %rd13, %r10, 4; add.s64 %rd13, %rd1, %rd13; shl.b32 %r2, %r1, 2; xor.b32 %r3, %r2, 128; mov.b32 %r4, 0;
"""
COPY = "cp.async.ca.shared.global [%r2], [%rd13], 4;\ncp.async.commit_group;\n"
WAIT, BARRIER, PUT = "cp.async.wait_group 0;\n", "bar.sync 0;\n", "st.shared.b32 [%r2], %r10;\n"
KEEP = "st.global.b32 [%rd13], %r11;\n"
GET_FIRST = "ld.global.b32 %r11, [%rd1];\n" + KEEP
GET = "ld.shared.b32 %r11, [%r2];\n" + KEEP
GET_OTHER = "ld.shared.b32 %r11, [%r3];\n" + KEEP
FIRST_40 = "setp.lt.u32 %p1, %r1, 40;\n@%p1 bra OVER;\n"
SHUFFLE = "shfl.sync.bfly.b32 %r11, %r10, 1, 31, -1;\nOVER:"
COPYING = (
    r"reads before its wait what a cp.async copies: byte 0 of 256 of shared memory: "
    r".*`ld.shared.*thread 0 of"
)
CHANGES = r"race: writes what another warp touches .*: byte 0 of 256 of shared memory: .*"
FAULTS = [
    (
        "ld.global.b32 %r11, [%rd13+4];",
        r"outside: byte 512 of argument 0, \(128,\).*`ld.*thread 63 of block 1",
    ),
    (
        "st.global.b32 [%rd13+-4], %r10;",
        r"outside: byte -4 of argument 0.*instruction \d+ `st.*thread 0 of block 0",
    ),
    (
        "st.global.b32 [%rd60], %r10;",
        r"outside: .* of no tensor \(0x7fde7fde7fde7fde\): .*`st.global",
    ),
    ("@%p9 ld.global.b32 %r11, [%rd13+2];", r"not aligned: byte 2 of argument 0.*thread 0"),
    (
        "@%p9 st.global.b32 [%rd1], %r10;",
        r"two threads store different numbers: byte 0 of argument 0",
    ),
    ("st.global.b32 [%rd1], %r9;", r"race: two blocks write: byte 0 of argument 0.*`st.global.b32"),
    (GET_FIRST, r"race: reads what another block writes: byte 0 .*`ld.*thread 0 of block 1"),
    (
        "st.shared.b32 [%r2+16], %r10;",
        r"outside: byte 256 of 256 of shared memory: .*thread 60 of block 0",
    ),
    ("st.shared.b32 [%r4+1], %r10;", r"not aligned: byte 1 of 256 of shared memory"),
    (GET, r"reads what nothing wrote: byte 0 of 256 of shared memory: .*thread 0 of"),
    (
        PUT + GET_OTHER,
        r"race: reads what another warp writes .*: byte 128 of 256 .*`ld.shared.*thread 0 of block "
        r"0",
    ),
    (PUT + BARRIER + GET_OTHER + PUT.replace("10", "11"), CHANGES + "`st.shared"),
    ("st.shared.b32 [%r4], %r10;", r"race: two warps write different numbers at once: byte 0"),
    (
        FIRST_40 + BARRIER + "OVER:",
        r"not all threads reach: instruction \d+ `bar.sync 0`; thread 0 of block 0",
    ),
    (
        FIRST_40 + BARRIER + "bra DONE;\nOVER:\n" + BARRIER + "DONE:",
        r"a barrier that not all threads reach",
    ),
    (COPY + BARRIER + GET, COPYING),
    (COPY + WAIT.replace("0", "1") + BARRIER + GET, COPYING),
    (COPY.replace("cp.async.commit_group;\n", "") + WAIT + BARRIER + GET, COPYING),
    (COPY + WAIT + GET_OTHER, r"race: reads what another warp writes"),
    (PUT + BARRIER + GET_OTHER + COPY.replace("d13]", "d1]"), CHANGES + "`cp.async.ca"),
    (COPY + COPY, r"writes where a copy is on its way"),
    (
        "cp.async.cg.shared.global [%r2], [%rd13], 16, 4;",
        r"not aligned: byte \d+ of a source of 16 bytes.*thread 1 of",
    ),
    (FIRST_40 + SHUFFLE, r"not all lanes of a warp take part: .*thread 40 of block 0"),
]


def words_of(value):
    """Return the id of a case: the words of an error, without its patterns."""
    if not isinstance(value, str):
        return "numbers"
    return " ".join(re.findall(r"[a-z0-9.%+-]+", value))[:60]


@pytest.mark.parametrize("error, body", [(error, body) for body, error in FAULTS], ids=words_of)
def test_a_fault_is_noticed(error, body):
    with pytest.raises(Fault, match=error):
        execute(
            assemble(OWN + body, 4),
            torch.arange(128, dtype=torch.int32),
            warps=2,
            blocks=2,
            shared=256,
        )


RIGHT = [
    (PUT + BARRIER + GET_OTHER, torch.arange(128) ^ 32),
    (COPY + WAIT + BARRIER + GET_OTHER, torch.arange(128) ^ 32),
    (
        "mov.b32 %r5, 9;\nst.shared.b32 [%r4], %r5;\nld.shared.b32 %r11, [%r4];\n" + KEEP,
        torch.full((128,), 9),
    ),
    (KEEP, torch.full((128,), 0x7FDE7FDE)),  # NaN: what nothing has written
]


@pytest.mark.parametrize("body, expected", RIGHT)
def test_what_is_right_passes(body, expected):
    numbers = torch.arange(128, dtype=torch.int32)
    execute(assemble(OWN + body, 4), numbers, warps=2, blocks=2, shared=256)
    assert torch.equal(numbers, expected.int())
