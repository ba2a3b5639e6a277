"""Put faults into the kernels, and print which are noticed.

    python -m tests.ptx.faults [machine [CASE ...] | source [KIND ...]]

`machine` changes the compiled PTX, one place at a time, and runs the kernel again on the same memory. `source` changes
the kernels' text, and runs a case in the emulator and in triton's interpreter.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.ptx import cases, launch
from tests.ptx.machine import run
from tests.ptx.memory import Fault
from tests.ptx.program import Program

ROOT = Path(__file__).parents[2]
CASES = {
    "flash": "none/softmax/float16/causal/dropout/3/4x16/0/80/70/75",
    "mixed": "shared/softmax/float16/causal-padding/plain/2/4x16/0/80/37/45",
}


def without(pattern: str) -> Callable[[str], Iterator[str]]:
    """Return a function that yields a text without each match in turn."""
    return lambda text: (text[: m.start()] + text[m.end() :] for m in re.finditer(pattern, text, re.M))


def longer(text: str) -> Iterator[str]:
    for m in re.finditer(r"cp\.async\.wait_group\s+(\d+)", text):
        yield text[: m.start(1)] + str(int(m[1]) + 1) + text[m.end(1) :]


def swapped(text: str) -> Iterator[str]:
    """Yield texts in which each fourth product takes the first two words of A, or of B, in the wrong order."""
    for m in [*re.finditer(r"mma\.sync\S*\s*{[^}]*},\s*{([^}]*)},\s*{([^}]*)}", text)][::4]:
        for group in (1, 2):
            first, second, *rest = m[group].split(",")
            if first.strip() != second.strip():
                yield text[: m.start(group)] + ",".join([second, first, *rest]) + text[m.end(group) :]


MACHINE = {
    "a barrier removed": without(r"^\s*bar\.sync\b.*;"),
    "a wait removed": without(r"^\s*cp\.async\.wait_group\b.*;"),
    "a wait for one group less": longer,
    "a commit removed": without(r"^\s*cp\.async\.commit_group\b.*;"),
    "words of an mma fragment swapped": swapped,
    "the guard of a load removed": without(r"@!?%p\d+ (?=ld\.global)"),
    "the guard of a store removed": without(r"@!?%p\d+ (?=st\.global)"),
    "the length of a copy removed": without(r"(?<=, 0x[48]), %r\d+(?=;)|(?<=, 0x10), %r\d+(?=;)"),
}
# kind, case, file, text, replacement; lines of one kind go together
SOURCE = """
padding of one byte # mixed # operators # padding.int() # padding.view(torch.uint8)
padding of one byte # mixed # rows # primitive_bitwidth >= 16 # primitive_bitwidth >= 8
no mask of a load of rows # flash # rows # tl.load(p_x, mask=inside, other=0.0) # tl.load(p_x)
no `other` of a load of rows # flash # rows # tl.load(p_x, mask=inside, other=0.0) # tl.load(p_x, mask=inside)
no mask of a store of rows # flash # rows # element_ty), mask=inside) # element_ty))
no mask of a statistic's store # flash # flash # b_factor, mask=o_m < n_queries) # b_factor)
no mask of a load of M # mixed # mixed # return tl.load(p_m, mask=inside, other=0.0) # return tl.load(p_m)
loads by rows with the wrong strides # mixed # rows # x.s_b, x.s_n, x.s_h, x.s_d # x.s_b, x.s_h, x.s_n, x.s_d
a wrong stride of rows # flash # rows # [None, :] * x.s_d  # [None, :] * x.s_n
a wrong stride of heads # mixed # rows # [:, None, None] * x.s_h, # [:, None, None] * x.s_b,
causal, one key too few # flash # rows # seen &= o_n <= o_m # seen &= o_n < o_m
causal, one key too many # flash # rows # o_m + (n_keys - n_queries) # o_m + (n_keys - n_queries) + 1
causal, tiles end one key early # flash # rows # first + C.BM + n_keys # first + C.BM - 1 + n_keys
causal, a tile without its mask # flash # rows # tl.maximum(first + 1 + n_keys # tl.maximum(first + C.BN + n_keys
dropout of another row # flash # flash # dropout, i_bh, i_m, first # dropout, i_bh, i_m + 4, first
no zeros beside M on the diagonal # mixed # mixed # b_m[None, :, None, :], 0.0) # b_m[None, :, None, :], 1.0)
"""


def in_machine_code(name: str) -> Iterator[dict]:
    """Run a case, then each kernel with each fault: on the memory from before, compared with that from after."""
    launches, texts = {}, []

    def record(program: Program, blocks: int, warps: int, shared: int, values: list) -> Counter:
        tensors = [value for value in values if not isinstance(value, bytes)]
        before = [tensor.clone() for tensor in tensors]
        counts = run(program, blocks, warps, shared, values)
        launches[texts[-1]] = tensors, before, [tensor.clone() for tensor in tensors], (blocks, warps, shared, values)
        return counts

    launch.run = record
    assert not cases.run(cases.case_of(name), lambda kernel, ptx: texts.append((kernel, ptx)) or ptx)["fault"]
    for (kernel, text), (tensors, before, after, how) in launches.items():
        for kind, change in MACHINE.items():
            found, silent = Counter(), []
            for changed in change(text):
                for tensor, content in zip(tensors, before):
                    tensor.copy_(content)
                try:
                    run(Program(changed), *how)
                    same = all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(tensors, after))
                    found["silent" if same else "wrong numbers"] += 1
                    if same:
                        place = next(n for n, (a, b) in enumerate(zip(text, changed)) if a != b)
                        silent.append(text[:place].count("\n") + 1)
                except Fault as error:
                    found["a race" if "race" in str(error) else "another error"] += 1
            yield dict(kernel=kernel, kind=kind, put_in=found.total(), **found, silent_lines=silent)


def in_source(words: list[str]) -> Iterator[dict]:
    """Yield for each fault what the emulator and the interpreter say of a case in a changed copy of the project."""
    lines = [line.split(" # ") for line in SOURCE.strip().splitlines()]
    kinds = {line[0]: line[1] for line in lines if not words or any(word in line[0] for word in words)}
    for kind, which in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            for part in ("mixhead_plugin", "tests"):
                shutil.copytree(ROOT / part, Path(folder, part), ignore=shutil.ignore_patterns("__pycache__"))
            for _, _, file, old, new in (line for line in lines if line[0] == kind):
                path = Path(folder, "mixhead_plugin/ops/triton", f"{file}.py")
                assert old in path.read_text(), (kind, old)
                path.write_text(path.read_text().replace(old, new))
            found = dict(kind=kind)
            for where, interpreted in (("emulator", "0"), ("interpreter", "1")):
                command = [sys.executable, "-m", "tests.ptx.faults", "case", CASES[which]]
                environment = {**os.environ, "TRITON_INTERPRET": interpreted}
                result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
                found[where] = (result.stdout.splitlines() or result.stderr.splitlines() or ["no word"])[-1][:160]
            yield found


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        try:
            report = cases.run(cases.case_of(sys.argv[2]), interpreted=os.environ["TRITON_INTERPRET"] == "1")
            print(report["fault"] or "silent")
        except Exception as error:
            print(f"{type(error).__name__}: {error}".splitlines()[0])
    if "case" not in sys.argv and "source" not in sys.argv[1:2]:
        for case in [CASES[name] for name in sys.argv[2:]] or CASES.values():
            for found in in_machine_code(case):
                print(json.dumps(found), flush=True)
    if "case" not in sys.argv and "machine" not in sys.argv[1:2]:
        for found in in_source(sys.argv[2:]):
            print(json.dumps(found), flush=True)
