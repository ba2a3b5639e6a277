"""Test that each kind of fault is an error that names the instruction, the thread and the address."""

import pytest
import torch

from tests.ptx.memory import Fault
from tests.ptx.micro import assemble, at, execute

# Each kernel has 64 threads, 64 numbers and 256 bytes of shared memory. %r10 is the thread's number, at [%rd11]; [%r2]
# is its place in shared memory, [%r3] that of a thread of the other warp.
OWN = at(1, 4) + "ld.global.b32 %r10, [%rd11];\nshl.b32 %r2, %r1, 2;\nxor.b32 %r3, %r2, 128;\nmov.b32 %r4, 0;\n"
COPY = "cp.async.ca.shared.global [%r2], [%rd11], 4;\ncp.async.commit_group;\n"
WAIT, BARRIER, PUT = "cp.async.wait_group 0;\n", "bar.sync 0;\n", "st.shared.b32 [%r2], %r10;\n"
KEEP = "st.global.b32 [%rd11], %r11;\n"
GET, GET_OTHER = "ld.shared.b32 %r11, [%r2];\n" + KEEP, "ld.shared.b32 %r11, [%r3];\n" + KEEP
FIRST_40 = "setp.lt.u32 %p1, %r1, 40;\n@%p1 bra OVER;\n"
UNCOMMITTED = COPY.replace("cp.async.commit_group;\n", "")

DONE = "bra DONE;\nOVER:\n" + BARRIER + "DONE:"
SHUFFLE = "shfl.sync.bfly.b32 %r11, %r10, 1, 31, -1;\nOVER:"
COPYING = r"reads before its wait what a cp.async copies: byte 0 of shared memory: .*`ld.shared.*thread 0 of"
FAULTS = [
    (
        "ld.global.b32 %r11, [%rd11+4];\n" + KEEP,
        r"outside: byte 256 of argument 0, \(64,\).*instruction \d+ `ld.*63 of",
    ),
    ("st.global.b32 [%rd11+-4], %r10;", r"outside: byte -4 of argument 0.*`st.global.b32 .*thread 0 of block 0"),
    ("st.global.b32 [%rd60], %r10;", r"address 0x7fde7fde7fde7fde is in no tensor: .*`st.global"),
    ("setp.eq.b32 %p1, %r1, 0;\n@%p1 ld.global.b32 %r11, [%rd11+2];", r"not aligned: byte 2 of argument 0.*thread 0"),
    ("st.global.b32 [%rd1], %r10;", r"two threads store different numbers: byte 0 of argument 0"),
    ("st.shared.b32 [%r2+16], %r10;", r"outside: byte 256 of 256 of shared memory: .*thread 60 of block 0"),
    ("st.shared.b32 [%r2+1], %r10;", r"not aligned: byte 1 of 256 of shared memory"),
    (GET, r"reads what nothing wrote: byte 0 of shared memory: .*thread 0 of"),
    (PUT + GET_OTHER, r"race: reads what warp 1 writes by instruction \d+ `st.shared.*: byte 128 .*thread 0"),
    (
        PUT + BARRIER + GET_OTHER + PUT.replace("10", "11"),
        r"race: writes what another warp touches .*: byte 0 of shared .*`st.sh",
    ),
    ("st.shared.b32 [%r4], %r10;", r"race: two warps write different numbers at once: byte 0"),
    (FIRST_40 + BARRIER + "OVER:", r"not all threads reach: instruction \d+ `bar.sync 0`; thread 0 of block 0"),
    (FIRST_40 + BARRIER + DONE, r"a barrier that not all threads reach"),
    (COPY + BARRIER + GET, COPYING),
    (COPY + WAIT.replace("0", "1") + BARRIER + GET, COPYING),
    (UNCOMMITTED + WAIT + BARRIER + GET, COPYING),
    (COPY + WAIT + GET_OTHER, r"race: reads what warp 1 writes by instruction \d+ `cp.async.ca"),
    (PUT + BARRIER + GET_OTHER + COPY.replace("d11]", "d1]"), r"race: writes what another warp touches .*`cp.async.ca"),
    (COPY + COPY, r"writes where a copy is on its way"),
    (FIRST_40 + SHUFFLE, r"not all lanes of a warp take part: .*thread 40 of block 0"),
]


@pytest.mark.parametrize("body, error", FAULTS)
def test_a_fault_is_noticed(body, error):
    with pytest.raises(Fault, match=error):
        execute(assemble(1, OWN + body), torch.arange(64, dtype=torch.int32), warps=2, shared=256)


RIGHT = [
    (PUT + BARRIER + GET_OTHER, torch.arange(64) ^ 32),
    (COPY + WAIT + BARRIER + GET_OTHER, torch.arange(64) ^ 32),
    ("mov.b32 %r5, 9;\nst.shared.b32 [%r4], %r5;\nld.shared.b32 %r11, [%r4];\n" + KEEP, torch.full((64,), 9)),
]


@pytest.mark.parametrize("body, expected", RIGHT)
def test_what_is_right_passes(body, expected):
    numbers = torch.arange(64, dtype=torch.int32)
    execute(assemble(1, OWN + body), numbers, warps=2, shared=256)
    assert torch.equal(numbers, expected.int())


READ_AND_WRITE = "setp.eq.b32 %p1, %r9, 0;\n@!%p1 ld.global.b32 %r11, [%rd1];\n@%p1 st.global.b32 [%rd11], %r9;"
RACES = [
    ("st.global.b32 [%rd11], %r9;", r"race: two blocks write: byte 0 of argument 0.*`st.global.b32"),
    (READ_AND_WRITE, r"race: .*`@!%p1 ld.* of block 1, reads byte 0 of .* where .*`@%p1 st.* of block 0 writes"),
]


@pytest.mark.parametrize("body, error", RACES)
def test_a_race_of_two_blocks_is_noticed(body, error):
    with pytest.raises(Fault, match=error):
        text = assemble(1, "mov.u32 %r9, %ctaid.x;\n" + at(1, 4) + body)
        execute(text, torch.zeros(64, dtype=torch.int32), blocks=3)


def test_a_gap_of_a_strided_tensor_is_no_part_of_it():
    with pytest.raises(Fault, match=r"in a gap of a strided tensor: byte 4 of argument 0.*thread 1 of block 0"):
        execute(assemble(1, OWN), torch.zeros(64, 2, dtype=torch.int32)[:, 0])


def test_what_is_not_written_is_not_a_number():
    numbers = torch.zeros(64)
    execute(assemble(1, OWN + KEEP), numbers, warps=2)
    assert numbers.isnan().all()
