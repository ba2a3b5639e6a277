"""A row of zeros in, the places 1 .. n out: models of fairseq with the plugin's attention that see distances alone.

B rows, N places, E the size of the embedding.
"""

import math
from argparse import SUPPRESS, ArgumentParser
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY, build_model
from torch import Tensor, nn

import mixhead_plugin  # noqa: F401 (registers the architectures)
from mixhead_plugin.modules.relative_position import BucketedBias

WIDTH = 32
SHAPE = "--{side}-embed-dim 32 --{side}-ffn-embed-dim 64 --{side}-layers 2 --{side}-attention-heads 4"
PLAIN = "--dropout 0 --attention-dropout 0 --no-token-positional-embeddings --head-mixing none"
BIAS = 1.0  # standard deviation of T5's biases in the beginning, see `Probe`; relu2 learns slowly from 0.2


class Kind(NamedTuple):
    """A model."""

    arch: str
    flags: str
    causal: bool
    effort: float  # share of the steps that it needs


class Variant(NamedTuple):
    """An attention, and what stands around the zeros."""

    flags: str = ""
    markers: str = ""  # "begin", "end" or both, as tokens of their own
    what: str = ""

    def blind(self, causal: bool) -> bool:
        """Whether the theory says that it cannot see places: weights that sum to 1 over equal values."""
        seen = "begin" in self.markers or ("end" in self.markers and not causal)
        return not seen and "gain" not in self.flags and ("normalizer" not in self.flags or "softmax" in self.flags)


KINDS = {
    "encoder": Kind(
        "mixhead_transformer",
        # the decoder is built too, and not used
        f"{SHAPE.format(side='encoder')} {SHAPE.format(side='decoder')}",
        causal=False,
        effort=1.0,
    ),
    "decoder": Kind(
        "mixhead_transformer_lm",
        f"{SHAPE.format(side='decoder')} --decoder-input-dim 32 --decoder-output-dim 32",
        causal=True,
        effort=0.5,  # every step has rows of all lengths, each in the next one
    ),
}
VARIANTS = {
    "softmax": Variant(),
    "sigsoftmax": Variant("--attention-normalizer sigsoftmax"),
    "l2": Variant("--attention-normalizer l2 --value-init-scale 0.5"),
    "unnormalized": Variant("--attention-normalizer unnormalized"),
    "relu2": Variant("--attention-normalizer relu2"),
    "swish-l2": Variant("--attention-normalizer swish-l2"),
    "gain": Variant("--relative-gain {n}", what="softmax, a learned factor on the weights for each distance"),
    "markers": Variant(markers="begin end", what="softmax, <s> 0 ... 0 </s>"),
    "end-marker": Variant(markers="end", what="softmax, 0 ... 0 </s>, as sources of translation are"),
}
POSITIONS = ("rotary", "t5")


class Setting(NamedTuple):
    """Describe one model."""

    kind: str  # a key of KINDS
    variant: str  # a key of VARIANTS
    position: str  # one of POSITIONS
    n: int  # the longest row that it is trained on
    seed: int

    def flags(self) -> list[str]:
        """Those of `fairseq-train`, without the stock ones."""
        own = VARIANTS[self.variant].flags.format(n=self.n)
        return [*own.split(), "--relative-position", self.position]


class Probe(nn.Module):
    """The model, and one number from each of its states by a linear layer, in units of n.

    T5's biases begin as random numbers, not at the plugin's 0: where all inputs are equal, the sums of the rows of l2
    are largest when all biases are, and no gradient leads away from there.
    """

    def __init__(self, setting: Setting, impl: str = "auto"):
        super().__init__()
        kind, variant = KINDS[setting.kind], VARIANTS[setting.variant]
        self.causal, self.markers, self.unit = kind.causal, variant.markers, setting.n
        self.words = Dictionary()
        self.words.add_symbol("0")
        task = SimpleNamespace(
            source_dictionary=self.words, target_dictionary=self.words, max_positions=lambda: 64 * setting.n
        )
        flags = [*kind.flags.split(), *PLAIN.split(), *setting.flags(), "--attention-impl", impl]
        torch.manual_seed(setting.seed)
        model = build_model(_parse(kind.arch, flags), task)
        self.stack = model.decoder if kind.causal else model.encoder
        for module in self.stack.modules():
            if isinstance(module, BucketedBias):
                nn.init.normal_(module.weight, std=BIAS)
        self.readout = nn.Linear(WIDTH, 1)

    def features(self, lengths: list[int]) -> Tensor:
        """The states at the zeros, [B, N, E]; what lies behind a row's own length means nothing"""
        tokens = self.tokens(lengths)
        if self.causal:
            states = self.stack.extract_features(tokens, None)[0]  # [B, N, E]
        else:
            real = tokens.ne(self.words.pad()).sum(1)
            states = self.stack(tokens, src_lengths=real)["encoder_out"][0].transpose(0, 1)  # [B, N, E]
        first = int("begin" in self.markers)
        return states[:, first : first + max(lengths)]

    def forward(self, lengths: list[int]) -> Tensor:
        """What it takes the places of the zeros for, [B, N], from 1 on"""
        return self.readout(self.features(lengths))[..., 0] * self.unit

    def tokens(self, lengths: list[int]) -> Tensor:
        """[B, N], N the longest row with its markers"""
        zero = self.words.index("0")
        begin = [self.words.bos()] * ("begin" in self.markers)
        end = [self.words.eos()] * ("end" in self.markers)
        rows = [torch.tensor([*begin, *[zero] * length, *end]) for length in lengths]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.words.pad())


class Outcome(NamedTuple):
    """Hold the results of one model."""

    right: float  # share of the places in rows of 1 .. n zeros that round to the right number
    error: float  # mean distance from the right number, there
    worst: float  # largest distance, there
    spread: float  # how far its states differ from one place to the other, see `spread`
    longer: dict[int, float]  # mean distance in one row of so many zeros
    answers: dict[int, list[float]]  # for one row of so many zeros

    @property
    def passed(self) -> bool:
        return self.right == 1


def _parse(arch: str, flags: list[str]) -> Any:
    parser = ArgumentParser(argument_default=SUPPRESS, allow_abbrev=False)
    ARCH_MODEL_REGISTRY[arch].add_args(parser)
    args = parser.parse_args(flags)
    args.arch = arch
    return args


def spread(probe: Probe, lengths: list[int]) -> float:
    """The largest difference of a state from that of the first zero of the first row, over the largest state.

    In float64, where equal states differ by 1e-15 or so. 0 is that nobody who reads the states can tell one place from
    another, nor one of the `lengths`.
    """
    probe = probe.double().eval()
    with torch.no_grad():
        states = torch.cat([probe.features([length])[0] for length in lengths])  # [places, E]
    probe.float()
    return float((states - states[0]).abs().max() / states.abs().max())


def random_spread(setting: Setting, size: float = 0.3, impl: str = "auto") -> float:
    """`spread` where nothing is trained and all parameters are moved away from where they start."""
    probe = Probe(setting, impl)
    generator = torch.Generator().manual_seed(setting.seed)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return spread(probe, [setting.n // 2, setting.n, 2 * setting.n])


def train(setting: Setting, steps: int, learning_rate: float, batch: int = 8) -> Probe:
    """Least squares over rows of random lengths up to n; Adam, warm-up over a tenth of the steps, then a cosine to 0.

    A causal model sees all shorter rows in the longest one, and has half of the steps.
    """
    probe = Probe(setting)
    steps = math.ceil(KINDS[setting.kind].effort * steps)
    parameters = list(probe.parameters())
    optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.98), fused=True)
    generator = torch.Generator().manual_seed(setting.seed)
    for step in range(steps):
        warm = min(1.0, 10 * (step + 1) / steps)
        optimizer.param_groups[0]["lr"] = learning_rate * warm * (1 + math.cos(math.pi * step / steps)) / 2
        lengths = [setting.n]
        if not probe.causal:
            lengths = torch.randint(1, setting.n + 1, (batch,), generator=generator).tolist()
        errors = _errors(probe, lengths) / setting.n
        optimizer.zero_grad()
        errors.square().mean().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return probe


def _errors(probe: Probe, lengths: list[int]) -> Tensor:
    """Answers less places, of all rows in one, [sum of lengths]"""
    answers = probe(lengths)  # [B, N]
    places = torch.arange(1, answers.shape[1] + 1)  # [N]
    inside = places <= torch.tensor(lengths)[:, None]  # [B, N]
    return (answers - places)[inside]


def examine(probe: Probe, n: int, longer: list[int]) -> Outcome:
    """Every length up to n, and the lengths `longer`."""
    probe.eval()
    with torch.no_grad():
        distances = _errors(probe, list(range(1, n + 1))).abs()
        answers = {length: probe([length])[0] for length in (n, *longer)}
    beyond = {length: float(_distance(answers[length])) for length in longer}
    return Outcome(
        right=float((distances < 0.5).float().mean()),
        error=float(distances.mean()),
        worst=float(distances.max()),
        spread=spread(probe, [n // 2, n, 2 * n]),
        longer=beyond,
        answers={length: row.tolist() for length, row in answers.items()},
    )


def _distance(answers: Tensor) -> Tensor:
    return (answers - torch.arange(1, len(answers) + 1)).abs().mean()
