"""What the papers report that is no row of a grid: counts of parameters, pruning, theorems, the position probe."""

import json
from collections.abc import Sequence
from typing import NamedTuple, Optional

import sweep
from sweep import Run

from reproduction import estimates


class Other(NamedTuple):
    what: str
    published: str
    commands: Sequence[str]
    trained: Sequence[Run] = ()  # models that it takes
    then: str = ""  # what it costs beside them
    made: str = ""  # the repository's file with its numbers
    test: bool = False  # whether the command proves it

    @property
    def state(self) -> str:
        return "tested" if self.test else "done" if self.made and (sweep.ROOT / self.made).exists() else "not run"

    @property
    def gpu_hours(self) -> Optional[float]:
        found = [estimates.estimate(run) for run in self.trained]
        return sum(estimate.gpu_hours for estimate in found if estimate) if found else None

    @property
    def cost(self) -> str:
        """In words."""
        if self.made and (sweep.ROOT / self.made).exists():
            return f"{json.loads((sweep.ROOT / self.made).read_text())['seconds'] / 60:.0f} minutes on a CPU, measured"
        hours = "" if self.gpu_hours is None else f"{self.gpu_hours:.3g} hours of training"
        return ", then ".join(filter(None, (hours, self.then)))


def counted(model: str, published: str, test: str) -> Other:
    command = f".venv/bin/python -m pytest tests/models/{test}.py -k as_many_parameters"
    return Other(f"Parameters of {model}", published, (command,), then="seconds on a CPU", test=True)


ARCHITECTURES, XL = "test_recipe_architectures", "test_transformer_xl"

MICHEL = "checkpoints/sixteen_heads"
MICHELS = ("--head-mixing", "none", "--encoder-attention-heads", "8", "--decoder-attention-heads", "8")
TRAIN_MICHEL = f"SAVE={MICHEL} examples/iwslt14_de_en/train.sh {' '.join(MICHELS)} --keep-last-epochs 60"
ANALYSIS = ".venv/bin/python -m mixhead_plugin.analysis"

OTHERS = (
    counted("the vanilla Transformer, 6 layers, WikiText-103", "156M; A adds 384, B 3,456", ARCHITECTURES),
    counted("the vanilla Transformer, 16 layers, WikiText-2", "67M; A adds 1,024, B 9,216", ARCHITECTURES),
    counted("the one with adaptive inputs, WikiText-103", "247M; A adds 1,024, B 17,408", ARCHITECTURES),
    counted("the one with adaptive inputs, LM1B", "330M; A adds 1,024, B 17,408", ARCHITECTURES),
    counted("Synthesizer, WikiText-103", "248M; A adds 1,024, B 17,408", ARCHITECTURES),
    counted("Fixhead, head size 256 / 512, WikiText-103", "314M / 448M", ARCHITECTURES),
    counted("Transformer-XL, WikiText-103 / WikiText-2", "151M / 40M; A adds 1,600, B 8,160", XL),
    counted("Transformer-XL, LM1B", "294M; A adds 1,152, B 19,584", XL),
    Other(
        "Mixhead table 4, sentences joined to about 240 tokens: BLEU on test; softmax, Mixhead",
        "< 1, 34.5",
        (
            "examples/iwslt14_de_en/prepare.sh --concatenate 240",
            "VARIANT=bpe-240 examples/sweep.py iwslt14_de_en --axis head-mixing=none,position-wise "
            "-- --attention-scope self",
        ),
        tuple(
            Run("iwslt14_de_en", {}, ("VARIANT=bpe-240", "--head-mixing", mixing, "--attention-scope", "self"), {})
            for mixing in ("none", "position-wise")
        ),
    ),
    Other(
        "Low-rank bottleneck paper, theorems 1 and 2",
        "heads of n give any weights, smaller ones do not; X exist where small heads differ from large ones",
        ("examples/low_rank_bottleneck/run.py",),
        made="examples/low_rank_bottleneck/results.json",
    ),
    Other(
        "Sixteen heads, figure 7: IWSLT14 De-En, heads cut by importance",
        "up to 60% go without loss, of this model 40% for about 10% of the BLEU",
        (TRAIN_MICHEL, f"{ANALYSIS} prune --metric bleu {MICHEL}/checkpoint_best.pt"),
        (Run("iwslt14_de_en", {}, MICHELS, {}),),
        "a backward pass over the validation set and ten translations of it",
    ),
    Other(
        "Sixteen heads, figure 8: the same model after its first epochs",
        "epochs 1 and 2: 10% of the heads for about 10% of the BLEU; from epoch 3 on 40% for as much",
        (f"{ANALYSIS} prune --metric bleu {MICHEL}/checkpoint{{1,2,3,10,40}}.pt",),
        then="of each a backward pass and ten translations; of the training above",
    ),
    Other(
        "Sixteen heads, tables of every head: the model without it, and with it alone in its layer",
        "most can go alone; one head a layer is too few in some",
        (f"{ANALYSIS} ablate --metric bleu {MICHEL}/checkpoint_best.pt",),
        then="288 translations of the validation set, two for each of 144 heads; of the training above",
    ),
    Other(
        "L2 essay: which attentions see positions",
        "softmax fails; no denominator, l2, a gain for each distance and markers at both ends pass",
        ("examples/position_probe/run.py",),
        made="examples/position_probe/results.json",
    ),
)
