"""Put faults into the kernels, and print which are noticed.

    python -m tests.ptx.faults [machine | source] [KIND ...]

`machine` changes the compiled PTX, one place at a time (each fourth product), and runs the kernel
again on the same memory. A fault that stays silent is shown to be redundant, by a reason. `source`
changes the kernels' text, and runs a case in the emulator and in triton's interpreter. KIND is a
part of the names of kinds.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.ptx import cases, launch, machine
from tests.ptx.cases import Case
from tests.ptx.machine import run
from tests.ptx.memory import Fault
from tests.ptx.program import Program
from tests.ptx.shared import Shared

ROOT = Path(__file__).parents[2]
CASES = {
    "flash": Case(extra="dropout", stages=3, queries=70, keys=71),
    "mixed": Case("shared", hidden="causal padding", shape="3x16", keys=45),
    # with the tiles of tuning.py, whose sizes differ: so a kernel reads where no other one wrote.
    "unwritten": Case(
        "shared", hidden="causal padding", shape="8x64", stages=0, queries=40, keys=140
    ),
    # its backward pass multiplies 16 keys
    "narrow": Case(hidden="causal padding", extra="dropout", shape="1x256", place=1),
}
SMALL = 5, 7  # queries and keys of a second run, with less than a tile
# instead of an instruction, so that the others keep their numbers
NOTHING = "cp.async.wait_group 99999;"
PRODUCT = r"(mma\.sync\S*\s*{[^}]*},\s*{"


def other_numbers(place: re.Match) -> str:
    """Let a load that its guard stops give other numbers than those set before.

    They are 1.0 in bfloat16 and 1.875 in float16.
    """
    return re.sub(
        r"(mov\.u(\d+) \S+), [^;]*;", lambda m: f"{m[1]}, 0x{'3f80' * (int(m[2]) // 16)};", place[0]
    )


# The pattern that is replaced, what replaces it, and reasons why that may be silent. A reason is
# shown by another replacement that is silent, too; or by what NotingShared notes, if that is as
# before. Where neither shows it, the detector is the reason: a copy is made as late as the waits
# that are left allow, and to touch it before is an error.
NOTED = "noted"
SILENCE = "silence"
UNUSED = "any other finite numbers there give the same results"
WAITS = {
    "each copy is made at the same wait": NOTED,
    "nothing touches the copies until a later wait": SILENCE,
}
MACHINE: dict[str, tuple[str, Any, dict[str, str]]] = {
    "a barrier removed": (
        r"bar\.sync\b.*;",
        NOTHING,
        {"no warp touches what another one writes": NOTED},
    ),
    "a wait removed": (r"cp\.async\.wait_group\b.*;", NOTHING, WAITS),
    "a wait for one group less": (
        r"(cp\.async\.wait_group\s+)(\d+)",
        lambda m: f"{m[1]}{int(m[2]) + 1}",
        WAITS,
    ),
    "a commit removed": (r"cp\.async\.commit_group\b.*;", NOTHING, WAITS),
    "two words of A swapped in a product": (
        PRODUCT + r")\s*(%\w+),\s*(?!\2\W)(%\w+)",
        r"\1 \3, \2",
        {},
    ),
    "two words of B swapped in a product": (
        PRODUCT + r"[^}]*},\s*{)\s*(%\w+),\s*(?!\2\W)(%\w+)",
        r"\1 \3, \2",
        {},
    ),
    "the guard of a load removed": (
        r"((?:mov\.u\d+ [^;]*;\s*)+)@%p\d+ (ld\.global)",
        r"\1\2",
        {UNUSED: other_numbers},
    ),
    "the guard of a store removed": (r"@%p\d+ (st\.global)", r"\1", {}),
    "the guard of a copy removed": (
        r"@(%p\d+) (cp\.async\.c)",
        r"\2",
        {"other threads copy the same": r"@!\1 \2"},
    ),
    "the length of a copy removed": (r"(cp\.async\.c\w\.[^;]*, 0x\w+), %r\d+;", r"\1;", {}),
}
# kind, case, file, text, replacement; lines of one kind go together
SOURCE = """
padding of one byte # narrow # calls # padding.int() # padding.view(torch.uint8)
padding of one byte # narrow # rows # primitive_bitwidth >= 16 # primitive_bitwidth >= 8
no mask of a load of rows # flash # rows # tl.load(p_x, mask=inside, other=0.0) # tl.load(p_x)
no `other` of a load of rows # flash # rows # tl.load(p_x, mask=inside, other=0.0) # tl.load(p_x, mask=inside)
no mask of a store of rows # flash # rows # element_ty), mask=inside) # element_ty))
no mask of a statistic's store # flash # rows # b_x, mask=o_m < n_queries) # b_x)
no mask of a load of M # mixed # mixed # mask=(o_h < C.H)[:, None] & (o_h < C.H)[None, :], other # mask=(o_h < C.HP)[:, None], other
no mask of a head that is beyond the last # mixed # mixed # return p_w, (o_h < C.H)[:, None] # return p_w, (o_h < C.HP)[:, None]
M the other way round # mixed # mixed # load_mixing(m.p, m.s_d, m.s_h, dtype, C) # load_mixing(m.p, m.s_h, m.s_d, dtype, C)
a wrong stride of rows # flash # rows # [None, :] * x.s_d  # [None, :] * x.s_n
a wrong stride of heads # mixed # mixed # [:, None] * w.s_h # [:, None] * w.s_b
causal, one key too few # flash # rows # seen &= o_n <= o_m # seen &= o_n < o_m
causal, one key too many # flash # rows # o_m + (n_keys - n_queries) # o_m + (n_keys - n_queries) + 1
causal, tiles end one key early # flash # rows # i_m + C.BM + n_keys # i_m + C.BM - 1 + n_keys
causal, a tile without its mask # flash # rows # tl.maximum(i_m + 1 + n_keys # tl.maximum(i_m + C.BN + n_keys
dropout of another row # flash # flash # tl.trans(rows.not_dropped(seed, dropout, i_bh, i_m, # tl.trans(rows.not_dropped(seed, dropout, i_bh, i_m + 4,
what was not written counts # unwritten # mixed # tl.where(seen_by(o_m, o_n, last, key_spans, n_queries, n_keys, C), b_w, 0.0) # b_w
"""


def chosen(kinds: dict) -> dict:
    return {
        kind: how
        for kind, how in kinds.items()
        if not sys.argv[2:] or any(word in kind for word in sys.argv[2:])
    }


noted: Counter[str] = Counter()


class NotingShared(Shared):
    """Note which copies each wait makes, and how many bytes a warp touches.

    These are bytes that another warp writes between the same two barriers.
    """

    waiting = ""

    def wait(self, site: Any, on, pending: int) -> None:
        self.waiting = str(site).split("`")[0]
        super().wait(site, on, pending)
        self.waiting = ""

    def read(self, site: Any, on, address, count: int, kind: np.dtype):
        size = kind.itemsize * count
        self._note(on, self._places(site, on, address, size), size, self.writers)
        return super().read(site, on, address, count, kind)

    def _claim(self, site: Any, on, address, data):
        at = super()._claim(site, on, address, data)
        self._note(on, at, data.shape[1], self.readers, self.writers)
        return at

    def _write(self, site: Any, on, at, data) -> None:
        super()._write(site, on, at, data)
        noted[f"{site} {self.waiting}"] += len(on)
        self._note(on, at, data.shape[1], self.readers, self.writers)

    def _note(self, on, at, size: int, *marks) -> None:
        noted["touched"] += sum(
            np.count_nonzero(self._gather(m, at, size) & ~self.bit[on][:, None]) for m in marks
        )


class Launch(NamedTuple):
    program: Program
    how: tuple
    tensors: list[torch.Tensor]
    before: list[torch.Tensor]
    after: list[torch.Tensor]

    def result(self, place: re.Match, change: Any) -> str:
        """Return what a change does on the memory from before; compare it with that from after."""
        text = self.program.text
        new = change(place) if callable(change) else place.expand(change)
        noted.clear()
        for tensor, content in zip(self.tensors, self.before):
            tensor.copy_(content)
        try:
            run(Program(text[: place.start()] + new + text[place.end() :]), *self.how)
        except Fault as error:
            return "a race" if "race" in str(error) else "another error"
        same = all(
            torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
            for a, b in zip(self.tensors, self.after)
        )
        return "silent" if same else "wrong numbers"

    def reason(self, place: re.Match, change: Any, reasons: dict[str, str]) -> str:
        """Return why a change is silent."""
        notes = []
        for text in (change, r"\g<0>"):
            self.result(place, text)
            notes.append(noted.copy())
        for why, shown in reasons.items():
            if shown == SILENCE or (
                notes[0] == notes[1] if shown == NOTED else self.result(place, shown) == "silent"
            ):
                return why
        return "no reason was found"


def in_machine_code(case: Case) -> Iterator[dict]:
    """Run a case of two sizes, then each kernel with each fault.

    What is silent has one reason for both sizes.
    """
    launches = []

    def record(program: Program, *how) -> Counter:
        tensors = [value for value in how[-1] if not isinstance(value, bytes)]
        before = [tensor.clone() for tensor in tensors]
        counts = run(program, *how)
        launches.append(
            Launch(program, how, tensors, before, [tensor.clone() for tensor in tensors])
        )
        return counts

    launch.run, machine.Shared = record, NotingShared
    for queries, keys in ((case.queries, case.keys), SMALL):
        assert not cases.run(case._replace(queries=queries, keys=keys))["fault"]
    middle = len(launches) // 2
    for sizes in zip(launches[:middle], launches[middle:], strict=True):
        program, other = (made.program for made in sizes)
        assert program.text == other.text
        for kind, (pattern, change, reasons) in chosen(MACHINE).items():
            found = Counter()
            places = [*re.finditer(pattern, program.text)]
            for place in places[:: 4 if "product" in kind else 1]:
                results = (made.result(place, change) for made in sizes)
                result = next((result for result in results if result != "silent"), "")
                found[
                    result
                    or "silent: "
                    + ", ".join({made.reason(place, change, reasons) for made in sizes})
                ] += 1
            yield dict(kernel=program.name, kind=kind, put_in=found.total(), **found)


def in_source() -> Iterator[dict]:
    """Yield for each fault what the emulator and the interpreter say of a case.

    The fault is in a changed copy of the project.
    """
    lines = [line.split(" # ") for line in SOURCE.strip().splitlines()]
    for kind, which in chosen({line[0]: line[1] for line in lines}).items():
        found = dict(kind=kind)
        with tempfile.TemporaryDirectory() as folder:
            for part in ("mixhead_plugin", "tests"):
                shutil.copytree(
                    ROOT / part, Path(folder, part), ignore=shutil.ignore_patterns("__pycache__")
                )
            for _, _, file, old, new in (line for line in lines if line[0] == kind):
                path = Path(folder, "mixhead_plugin/ops/triton", f"{file}.py")
                assert old in path.read_text(), (kind, old)
                path.write_text(path.read_text().replace(old, new))
            for where, interpreted in (("emulator", False), ("interpreter", True)):
                code = (
                    f"from tests.ptx.cases import *; print(run({CASES[which]}, "
                    f"{interpreted})['fault'] or 'silent')"
                )
                environment = {**os.environ, "TRITON_INTERPRET": str(int(interpreted))}
                command = [sys.executable, "-c", code]
                result = subprocess.run(
                    command, capture_output=True, text=True, env=environment, cwd=folder
                )
                found[where] = (result.stdout or result.stderr or "the process ends").splitlines()[
                    -1
                ][:160]
        yield found


if __name__ == "__main__":
    if "source" not in sys.argv[1:2]:
        for case in [CASES["flash"], CASES["mixed"]]:
            for found in in_machine_code(case):
                print(json.dumps(found), flush=True)
    if "machine" not in sys.argv[1:2]:
        for found in in_source():
            print(json.dumps(found), flush=True)
