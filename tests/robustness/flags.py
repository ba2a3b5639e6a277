"""Draw random combinations of the plugin's flags, and run fairseq-train with them.

`python -m tests.robustness.flags DATA SEED NUMBER` prints the command line of one draw, to repeat it.
"""

import math
import random
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from mixhead_plugin.errors import option_name
from mixhead_plugin.modules.penalties import PENALTIES
from mixhead_plugin.modules.synthesizer import SYNTHESIZERS
from mixhead_plugin.ops import IMPLEMENTATIONS, NORMALIZERS
from mixhead_plugin.options import FAMILIES, SCOPES
from mixhead_plugin.parts import PARTS, VARIANT
from tests.commands import LM_SIZES, PLUGIN, ROBERTA_SIZES, SIZES, TRAINING, logged, run
from tests.xl import XL_SIZES

# Values of each flag, good and bad. The first half is accepted in some combination.
ATTENTION = {
    "--attention-normalizer": (*NORMALIZERS, "Softmax", ""),
    **{option_name(option): (*table, "position_wise") for option, table in PARTS.items()},
    "--mixed-features": (*VARIANT["mixed_features"], "vk"),
    "--head-dim": ("2", "4", "5", "32", "0", "-1", "1.5", "nan"),
    "--attention-scope": (*SCOPES, "encoder-self"),
    "--attention-impl": ("auto", *IMPLEMENTATIONS, "cuda"),
    "--value-init-scale": ("0.1", "2", "0", "-1", "nan", "inf", "one"),
    "--mixing-lr-scale": ("0.1", "10", "0", "-2", "nan", "inf"),
    "--relative-gain": ("0", "1", "4", "-1", "2.5"),
    "--heads-per-layer": (
        "SIDE-self=3,2",
        "SIDE-self=2:1,4:3",
        "cross=4:3,4",
        "SIDE-self=0,2",
        "SIDE-self=2",
        "cross",
    ),
}
PENALTY = {f"--{name}-weight": ("0", "0.001", "1", "-1", "nan", "inf") for name in PENALTIES}
SYNTHESIZER = {
    "--synthesizer": (*SYNTHESIZERS, "Dense"),
    "--synthesizer-rank": ("1", "2", "0", "-1"),
    "--synthesizer-factor": ("1", "2", "0", "99"),
}
# Flags of fairseq's Transformer-XL, which the plugin's model takes too.
XL = {
    "--n-layer": ("1", "3", "0"),
    "--n-head": ("1", "4", "0", "-3"),
    "--d-model": ("8", "16", "7", "0"),
    "--d-head": ("2", "4", "0"),
    "--mem-len": ("0", "3", "20", "-1"),
    "--div-val": ("1", "2", "0", "100"),
    "--cutoffs": ("5", "100000", "0", "10,5"),
}


class Kind(NamedTuple):
    """A model with a task, and tables of its own flags."""

    arch: str  # without the family
    data: str  # a fixture
    arguments: list[str]
    criterion: str
    tables: tuple[dict[str, tuple[str, ...]], ...]


TEXT = ["--task", "language_modeling", "--tokens-per-sample", "16", "--sample-break-mode", "none", *LM_SIZES]
BPTT = ["--task", "truncated_bptt_lm", "--tokens-per-sample", "8", "--batch-size", "3", *XL_SIZES]
MASKED = ["--task", "masked_lm", "--tokens-per-sample", "16", "--max-positions", "64", *ROBERTA_SIZES]
KINDS = {
    "translation": Kind("transformer", "translation_data", SIZES, "label_smoothed_cross_entropy", ()),
    "language_model": Kind("transformer_lm", "text_data", TEXT, "cross_entropy", ()),
    "synthesizer": Kind("synthesizer_lm", "text_data", TEXT, "cross_entropy", (SYNTHESIZER, SYNTHESIZER)),
    "transformer_xl": Kind("transformer_xl", "text_data", BPTT, "cross_entropy", (XL, XL)),
    "masked_lm": Kind("roberta_base", "text_data", MASKED, "masked_lm", ()),
}


class Draw(NamedTuple):
    kind: Kind
    flags: list[str]  # those that were drawn, each with its value

    def command(self, data: Path, save: Path) -> list[str]:
        flags = [*TRAINING, *self.kind.arguments, *self.flags, "--user-dir", PLUGIN, "--save-dir", str(save)]
        return [str(data), *flags, "--max-update", "1", "--disable-validation"]


def draw(seed: int, number: int) -> Draw:
    """Return the draw of this number; the kinds take turns."""
    rng = random.Random(f"{seed}-{number}")
    kind = list(KINDS.values())[number % len(KINDS)]
    family, regularized = rng.choice(list(FAMILIES)), rng.random() < 0.3
    tables = [ATTENTION, ATTENTION, *kind.tables, *([PENALTY] if regularized else [])]
    chosen = {}
    for table in rng.choices(tables, k=rng.randint(1, 5)):
        flag = rng.choice(list(table))
        values = table[flag]
        value = rng.choice(values[: max(2, len(values) // 2)] if rng.random() < 0.7 else values)
        chosen[flag] = value.replace("SIDE", "decoder" if "lm" in kind.arch or "xl" in kind.arch else "encoder")
    if "--heads-per-layer" in chosen or (family == "fixhead" and kind.arch == "transformer"):
        chosen.setdefault("--head-dim", "4")
    criterion = f"{'orthogonal_' if regularized else ''}{kind.criterion}"
    named = {"--arch": f"{family}_{kind.arch}", "--criterion": criterion, **chosen}
    return Draw(kind, [f"{flag}={value}" for flag, value in named.items()])


def outcome(drawn: Draw, data: Path, save: Path) -> str:
    """Return 'trained' or 'refused'.

    Raises:
        AssertionError: the training failed, or the refusal is not one line that names a drawn flag
    """
    result = run("fairseq-train", *drawn.command(data, save), check=False)
    text = f"fairseq-train {shlex.join(drawn.command(data, save))}\n{result.stdout[-1000:]}{result.stderr[-2000:]}"
    if result.returncode == 0:
        (log,) = logged(result.stdout + result.stderr)
        assert math.isfinite(float(log["loss"])), text
        return "trained"
    assert result.returncode in (1, 2) and "Traceback" not in result.stderr + result.stdout, text
    line = result.stderr.rstrip().splitlines()[-1]
    assert line.startswith("fairseq-train: error: ") and result.stderr.count(": error: ") == 1, text
    drawn_flags = {flag.partition("=")[0] for flag in drawn.flags} | set(PENALTY)  # criteria preset their weights
    assert drawn_flags & set(re.findall(r"--[a-z-]+", line)), text
    assert "train_inner" not in result.stdout + result.stderr and not list(save.glob("*")), text
    return "refused"


if __name__ == "__main__":
    data, seed, number = sys.argv[1:]
    print("fairseq-train", shlex.join(draw(int(seed), int(number)).command(Path(data), Path("save"))))
