"""Test that each kind of fault is an error that names the instruction, the thread and the address."""

import pytest
import torch

from tests.ptx import micro
from tests.ptx.memory import Fault

OWN = micro.at(1, 4) + "ld.global.b32 %r10, [%rd11];\nshl.b32 %r2, %r1, 2;\n"  # a number for each thread
COPY = "mov.b32 %r3, 0;\ncp.async.ca.shared.global [%r2], [%rd11], 4;\ncp.async.commit_group;\n"
KEEP = "\nst.global.b32 [%rd11], %r11;"  # the number that was read
NEIGHBOUR = "xor.b32 %r3, %r2, 128;\n"  # the place of a thread of another warp

# What is wrong: the lines of the kernel, and the error. Each has 64 threads, 64 numbers and 256 bytes of shared memory.
FAULTS = {
    "beyond a tensor": (
        "ld.global.b32 %r11, [%rd11+4];" + KEEP,
        r"outside: byte 256 of argument 0, \(64,\) .*: instruction \d+ `ld.global.b32 .*`, thread 63 of block 0",
    ),
    "before a tensor": (
        "st.global.b32 [%rd11+-4], %r10;",
        r"outside: byte -4 of argument 0.*`st.global.*thread 0 of block 0",
    ),
    "of no tensor": ("st.global.b32 [%rd99], %r10;", r"address 0x7fde7fde7fde7fde is in no tensor: .*`st.global"),
    "not aligned in global memory": (
        "setp.eq.b32 %p1, %r1, 0;\n@%p1 ld.global.b32 %r11, [%rd11+2];" + KEEP,
        r"not aligned: byte 2 of argument 0.*thread 0",
    ),
    "beyond shared memory": (
        "st.shared.b32 [%r2+16], %r10;",
        r"outside: byte 256 of 256 of shared memory: .*thread 60 of block 0",
    ),
    "not aligned in shared memory": ("st.shared.b32 [%r2+1], %r10;", r"not aligned: byte 1 of 256 of shared memory"),
    "never written": (
        "ld.shared.b32 %r11, [%r2];" + KEEP,
        r"reads what nothing wrote: byte 0 of shared memory: .*thread 0 of",
    ),
    "read without a barrier": (
        f"st.shared.b32 [%r2], %r10;\n{NEIGHBOUR}ld.shared.b32 %r11, [%r3];" + KEEP,
        r"race: reads what warp 1 writes by instruction \d+ `st.shared.b32.*` without a barrier: byte 128 .*thread 0 of block 0",
    ),
    "written without a barrier": (
        f"st.shared.b32 [%r2], %r10;\nbar.sync 0;\n{NEIGHBOUR}ld.shared.b32 %r11, [%r3];\nst.shared.b32 [%r2], %r11;",
        r"race: writes what another warp touches without a barrier: byte 0 of shared memory: .*`st.shared",
    ),
    "written at once": (
        "mov.b32 %r3, 0;\nst.shared.b32 [%r3], %r10;",
        r"race: two warps write different numbers at once: byte 0",
    ),
    "a barrier for some": (
        "setp.lt.u32 %p1, %r1, 40;\n@%p1 bra OVER;\nbar.sync 0;\nOVER:",
        r"a barrier that not all threads reach: instruction \d+ `bar.sync 0`; thread 0 of block 0 does not",
    ),
    "two barriers": (
        "setp.lt.u32 %p1, %r1, 40;\n@%p1 bra OVER;\nbar.sync 0;\nbra DONE;\nOVER:\nbar.sync 0;\nDONE:",
        r"a barrier that not all threads reach",
    ),
    "a copy without its wait": (
        COPY + "bar.sync 0;\nld.shared.b32 %r11, [%r2];" + KEEP,
        r"reads before its wait what a cp.async copies: byte 0 of shared memory: .*`ld.shared.*thread 0 of block 0",
    ),
    "a wait for too few": (
        COPY + "cp.async.wait_group 1;\nbar.sync 0;\nld.shared.b32 %r11, [%r2];" + KEEP,
        r"reads before its wait what a cp.async copies",
    ),
    "a copy without its commit": (
        COPY.replace("cp.async.commit_group;", "cp.async.wait_group 0;")
        + "bar.sync 0;\nld.shared.b32 %r11, [%r2];"
        + KEEP,
        r"reads before its wait what a cp.async copies",
    ),
    "a copy without a barrier": (
        COPY + f"cp.async.wait_group 0;\n{NEIGHBOUR}ld.shared.b32 %r11, [%r3];" + KEEP,
        r"race: reads what warp 1 writes by instruction \d+ `cp.async.ca",
    ),
    "a copy over what is read": (
        f"st.shared.b32 [%r2], %r10;\nbar.sync 0;\n{NEIGHBOUR}ld.shared.b32 %r11, [%r3];\n{COPY.replace('[%rd11]', '[%rd1]')}",
        r"race: writes what another warp touches without a barrier: .*`cp.async.ca",
    ),
    "a copy onto a copy": (COPY + COPY, r"writes where a copy is on its way"),
    "half a warp": (
        "setp.lt.u32 %p1, %r1, 40;\n@%p1 bra OVER;\nshfl.sync.bfly.b32 %r11, %r10, 1, 31, -1;\nOVER:",
        r"not all lanes of a warp take part: .*`shfl.sync.bfly.*thread 40 of block 0",
    ),
    "two threads store": ("st.global.b32 [%rd1], %r10;", r"two threads store different numbers: byte 0 of argument 0"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_noticed(what):
    body, error = FAULTS[what]
    with pytest.raises(Fault, match=error):
        micro.execute(micro.assemble(1, OWN + body), torch.arange(64, dtype=torch.int32), warps=2, shared=256)


RIGHT = {
    "a barrier": f"st.shared.b32 [%r2], %r10;\nbar.sync 0;\n{NEIGHBOUR}ld.shared.b32 %r11, [%r3];\nbar.sync 0;" + KEEP,
    "a copy": COPY + f"cp.async.wait_group 0;\nbar.sync 0;\n{NEIGHBOUR}ld.shared.b32 %r11, [%r3];" + KEEP,
    "equal numbers of two warps": "mov.b32 %r3, 0;\nmov.b32 %r4, 9;\nst.shared.b32 [%r3], %r4;\nld.shared.b32 %r11, [%r3];"
    + KEEP,
}


@pytest.mark.parametrize(
    "what, expected", zip(RIGHT, [torch.arange(64) ^ 32, torch.arange(64) ^ 32, torch.full((64,), 9)])
)
def test_what_is_right_passes(what, expected):
    numbers = torch.arange(64, dtype=torch.int32)
    micro.execute(micro.assemble(1, OWN + RIGHT[what]), numbers, warps=2, shared=256)
    assert torch.equal(numbers, expected.int())


def blocks(body: str) -> str:
    return micro.assemble(1, "mov.u32 %r9, %ctaid.x;\n" + micro.at(1, 4) + body)


@pytest.mark.parametrize(
    "body, error",
    [
        ("st.global.b32 [%rd11], %r9;", r"race: two blocks write: byte 0 of argument 0.*`st.global.b32"),
        (
            "setp.eq.b32 %p1, %r9, 0;\n@!%p1 ld.global.b32 %r11, [%rd1];\n@%p1 st.global.b32 [%rd11], %r9;",
            r"race: instruction \d+ `@!%p1 ld.global.* thread 0 of block 1, reads byte 0 of .* where .*`@%p1 st.global.* of block 0 writes",
        ),
    ],
)
def test_a_race_of_two_blocks_is_noticed(body, error):
    with pytest.raises(Fault, match=error):
        micro.execute(blocks(body), torch.zeros(64, dtype=torch.int32), blocks=3)


def test_a_gap_of_a_strided_tensor_is_no_part_of_it():
    with pytest.raises(Fault, match=r"in a gap of a strided tensor: byte 4 of argument 0.*thread 1 of block 0"):
        micro.execute(micro.assemble(1, OWN), torch.zeros(64, 2, dtype=torch.int32)[:, 0])


def test_what_is_not_written_is_not_a_number():
    numbers = torch.zeros(64)
    micro.execute(micro.assemble(1, OWN + KEEP), numbers, warps=2)
    assert numbers.isnan().all()
