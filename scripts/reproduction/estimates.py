"""What a run would cost on one GPU of today, from its sizes, its tokens and its updates: estimated, not measured.

    seconds of a batch = max((6 P + 12 L H D n) x tokens / (peak x utilisation), L x 2 ms)
    GPU hours = seconds of a batch x batches of an update x updates / 3600

P are the parameters that a token meets: of the layers and of the output (with adaptive softmax, of its first band), L
the layers, H D heads times their size, n the tokens of a sequence; 6 and 12 are two operations for each weight, forward
and twice backward. Peak and utilisation are 989e12 operations a second and 30 %. The 2 ms are for starting a layer's
kernels, which takes small models longer than their arithmetic. Both 30 % and 2 ms are assumptions. What mixing itself
takes is not counted, nor validation and evaluation.

Memory is 16 bytes for each parameter (Adam with float16) or 12 (Nesterov), and for each token of a batch what a layer
keeps for its gradient, 34 d + 5 H n bytes, and for each word of the output 10 of a full softmax (the log-softmax and
its gradient in float32, the gradient of the scores in float16), 12 with label smoothing (two gradients of the
log-softmax before they are added) or 6 of an adaptive one (all in float16).
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple, Optional

import sweep
from sweep import Run

from reproduction import recipes

PEAK = 989e12  # operations a second: an H100's, dense, float16
UTILISATION = 0.3
LAUNCHES = 2e-3  # seconds, of a layer forward and backward
ARITHMETIC, STARTING = "arithmetic", "starting kernels"  # what an estimate's time is
WIKITEXT103, WIKITEXT2, LM1B = 267_744, 33_280, 793_472  # words of the dictionaries
FAMILY = re.compile(r"(?:mixhead|fixhead|sigsoftmax|l2)_")
BERT = re.compile(r"bert_d(\d+)_h(\d+)_k(\d+)")
EXAMPLE_TOKENS = 64  # of an example of GLUE; its texts are short


class Size(NamedTuple):
    """Of a model."""

    layers: int
    width: int
    inner: int
    heads: int
    head_dim: Optional[int]  # None: width / heads
    bands: tuple[tuple[int, int], ...]  # words of each band of the vocabulary, and the size of their embeddings
    projections: int = 4  # of an attention
    attentions: float = 1  # of a layer, by the mean
    full_softmax: bool = False

    @property
    def attention_dim(self) -> int:
        return self.heads * (self.head_dim or self.width // self.heads)

    @property
    def in_layers(self) -> int:
        each = self.attentions * self.projections * self.width * self.attention_dim + 2 * self.width * self.inner
        return self.layers * each

    @property
    def parameters(self) -> int:
        embeddings = sum(words * size + (size * self.width if size != self.width else 0) for words, size in self.bands)
        return self.in_layers + embeddings

    @property
    def output(self) -> int:
        """Parameters of the output that every token meets; none of a BERT, whose output is of few positions."""
        return self.bands[0][0] * self.width if self.full_softmax or len(self.bands) > 1 else 0


def adaptive(words: int, *cutoffs: int, width: int = 1024, factor: int = 4) -> tuple[tuple[int, int], ...]:
    ends = (*cutoffs, words)
    return tuple((end - begin, width // factor**i) for i, (begin, end) in enumerate(zip((0, *ends), ends)))


BAEVSKI = Size(16, 1024, 4096, 8, None, adaptive(WIKITEXT103, 20_000, 60_000))
# Transformer-XL has a fifth projection, of the distances.
SIZES = {
    "transformer_lm": Size(6, 512, 2048, 8, None, ((WIKITEXT103, 512),), full_softmax=True),
    "transformer_lm_wiki2": Size(16, 512, 2048, 8, None, ((WIKITEXT2, 512),), full_softmax=True),
    "transformer_lm_wiki103_512": BAEVSKI,
    "synthesizer_lm_wiki103": BAEVSKI,
    "transformer_lm_gbw_512": BAEVSKI._replace(bands=adaptive(LM1B, 60_000, 160_000)),
    "transformer_lm_lm1b": Size(6, 256, 1024, 8, 32, ((32_000, 256),), full_softmax=True),
    "transformer_xl_wiki103": Size(
        16, 410, 2100, 10, 41, adaptive(WIKITEXT103, 20_000, 40_000, 200_000, width=410, factor=1), projections=5
    ),
    "transformer_xl_wiki2": Size(
        16, 410, 1000, 10, 41, adaptive(WIKITEXT2, 20_000, width=410, factor=1), projections=5
    ),
    "transformer_xl_lm1b": Size(18, 1024, 4096, 8, 128, adaptive(LM1B, 20_000, 40_000, 200_000), projections=5),
    # six layers on each side, with two attentions in those of the decoder
    "transformer_iwslt_de_en": Size(
        12, 512, 1024, 4, None, ((6_632, 512), (8_848, 512)), attentions=1.5, full_softmax=True
    ),
    "bert_base": Size(12, 768, 3072, 12, None, ((30_522, 768),)),
    "roberta_base": Size(12, 768, 3072, 12, None, ((50_265, 768),)),
}


class Estimate(NamedTuple):
    parameters: int
    tokens_per_update: int
    tokens_per_sample: int
    updates: int
    gpu_hours: float
    bound: str  # ARITHMETIC or STARTING, whichever takes longer
    memory_gib: float


class Pretraining(NamedTuple):
    """What a run's model must have been through; the same for all runs that begin with it."""

    arch: str
    gpu_hours: float
    commands: tuple[str, ...]


def size(flags: Mapping[str, Sequence[str]]) -> Optional[Size]:
    """Of the model that a command of fairseq-train makes; None for an architecture that is not known here."""
    name = FAMILY.sub("", flags["--arch"][0], count=1)
    if match := BERT.fullmatch(name):
        width, heads, head_dim = map(int, match.groups())
        known = Size(24, width, 3072 if width == 768 else 4096, heads, head_dim, ((30_522, width),))
    elif name in SIZES:
        known = SIZES[name]
    else:
        return None

    def given(name: str, value: Optional[int]) -> Optional[int]:
        return int(flags[name][0]) if name in flags else value

    width = given("--decoder-embed-dim", known.width)
    bands = known.bands if width == known.width else tuple((words, width) for words, _ in known.bands)
    return known._replace(
        width=width,
        heads=given("--decoder-attention-heads", known.heads),
        head_dim=given("--head-dim", known.head_dim),
        bands=bands,
    )


def tokens(flags: Mapping[str, Sequence[str]]) -> tuple[int, int, int]:
    """Of an update, of one of its batches, and of a sequence."""

    def value(name: str, default: int = 0) -> int:
        return int(flags[name][0]) if name in flags else default

    task = flags.get("--task", ["translation"])[0]
    lengths = {"squad": value("--max-seq-length"), "sentence_prediction": EXAMPLE_TOKENS, "translation": 25}
    length = value("--tokens-per-sample", lengths.get(task, 0))
    rows = value("--batch-size")
    batch = rows * length if rows else value("--max-tokens")
    return batch * value("--update-freq", 1), batch, length


@cache
def own_flags(example: str, variables: tuple[str, ...]) -> tuple[str, ...]:
    """Of a recipe's train.sh on one GPU, once for all rows; none where it prints no command."""
    return recipes.printed(example, "train", variables, {"GPUS": "1"})


def flags_of(run: Run) -> dict[str, list[str]]:
    """All flags of the run's fairseq-train; none where the recipe does not tell."""
    variables = tuple(word for word in run.train if sweep.is_variable(word))
    own = own_flags(run.example, variables)
    return sweep.canonical([*own, *run.train[len(variables) :]]) if own else {}


def training(run: Run) -> Optional[dict[str, int]]:
    """How long a run is trained; None where the recipe does not tell."""
    flags = flags_of(run)
    if not flags:
        return None
    update, _, length = tokens(flags)
    return {"updates": int(flags["--max-update"][0]), "tokens_per_update": update, "tokens_per_sample": length}


def estimate(run: Run) -> Optional[Estimate]:
    """None where the recipe or the model is not known here."""
    flags = flags_of(run)
    model = size(flags) if flags else None
    if model is None:
        return None
    update, batch, length = tokens(flags)
    updates = int(flags["--max-update"][0])
    each = 6 * (model.in_layers + model.output) + 12 * model.layers * model.attention_dim * length
    arithmetic, starting = each * batch / (PEAK * UTILISATION), model.layers * LAUNCHES
    optimizer = 12 if flags.get("--optimizer") == ["nag"] else 16
    words = of_a_word(model, flags) * model.output // model.width
    kept = model.layers * (34 * model.width + 5 * model.heads * length) + words
    return Estimate(
        int(model.parameters),
        update,
        length,
        updates,
        max(arithmetic, starting) * (update // batch) * updates / 3600,
        ARITHMETIC if arithmetic > starting else STARTING,
        (optimizer * model.parameters + kept * batch) / 2**30,
    )


def of_a_word(model: Size, flags: Mapping[str, Sequence[str]]) -> int:
    """Bytes for a token's score of one word, where backward needs most: the scores themselves are free by then."""
    if not model.full_softmax:
        return 2 + 2 + 2  # log-softmax, its gradient, the scores' gradient
    return 4 + 4 + (4 if "label_smoothed" in flags.get("--criterion", [""])[0] else 2)


def pretraining(run: Run) -> Optional[Pretraining]:
    """Of examples/bert/pretraining, both phases; None for what does not begin with a model of it."""
    flags = flags_of(run)
    if "/bert/pretraining/" not in flags.get("--finetune-from-model", [""])[0]:
        return None
    arch = flags["--arch"][0]
    phases = [estimate(Run("bert/pretraining", {}, (f"VARIANT={v}", "--arch", arch), {})) for v in (128, 512)]
    script = f"examples/bert/pretraining/train.sh --arch {arch}"
    return Pretraining(arch, sum(phase.gpu_hours for phase in phases if phase), (script, f"VARIANT=512 {script}"))
