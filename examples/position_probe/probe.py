"""Train fairseq's models, with the plugin's attention, to number a row of zeros 1 .. n.

The models see only distances.

B rows, N positions, E is the size of the embedding.
"""

import math
from argparse import SUPPRESS, ArgumentParser
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY, build_model
from torch import Tensor, nn

import mixhead_plugin
from mixhead_plugin.parts.relative_position import BucketedBias

mixhead_plugin.register_names()

WIDTH = 32
SHAPE = (
    "--{side}-embed-dim 32 --{side}-ffn-embed-dim 64 --{side}-layers 2 --{side}-attention-heads 4"
)
UNITS = (
    "--{side}-embed-dim 32 --{side}-layers 4 --gau-query-dim 8 --dropout 0 --attention-dropout 0"
)
PLAIN = "--dropout 0 --attention-dropout 0 --no-token-positional-embeddings --head-mixing none"
POSITIONS = ("rotary", "t5")
BIAS = 1.0  # standard deviation of T5's initial biases (see `Probe`); with 0.2, relu2 learns slowly


class Kind(NamedTuple):
    """A model of fairseq, or one of gated attention units."""

    arch: str
    flags: str
    causal: bool
    effort: float  # the part of --steps for which it is trained
    positions: tuple[str, ...] = POSITIONS  # those of POSITIONS that it can have


class Probed(NamedTuple):
    """An attention, and the markers around the zeros."""

    flags: str = ""
    markers: str = ""  # "begin", "end" or both
    what: str = ""  # explains it in --help

    def blind(self, causal: bool) -> bool:
        """Return True if in theory it sees no positions.

        That is so where the weights of a row sum to 1, and all values are equal.
        """
        sees_begin = "begin" in self.markers
        sees_end = "end" in self.markers and not causal
        weights_sum_to_1 = "normalizer" not in self.flags or "softmax" in self.flags
        has_gain = "gain" in self.flags
        return weights_sum_to_1 and not (sees_begin or sees_end or has_gain)


KINDS = {
    "encoder": Kind(
        "mixhead_transformer",
        # the model has an unused decoder
        f"{SHAPE.format(side='encoder')} {SHAPE.format(side='decoder')} {PLAIN}",
        causal=False,
        effort=1.0,
    ),
    "decoder": Kind(
        "mixhead_transformer_lm",
        f"{SHAPE.format(side='decoder')} --decoder-input-dim 32 --decoder-output-dim 32 {PLAIN}",
        causal=True,
        effort=0.5,  # the longest row contains all shorter ones
    ),
    # Two units stand where one attention and one feed-forward block stood.
    "gau-encoder": Kind(
        "gau_roberta",
        f"{UNITS.format(side='encoder')} --head-mixing none",
        causal=False,
        effort=1.0,
        positions=("rotary",),
    ),
    "gau-decoder": Kind(
        "gau_lm",
        f"{UNITS.format(side='decoder')} {PLAIN}",
        causal=True,
        effort=0.5,
        positions=("rotary",),
    ),
}
PROBED = {
    "softmax": Probed(),
    "sigsoftmax": Probed("--attention-normalizer sigsoftmax"),
    "l2": Probed("--attention-normalizer l2 --value-init-scale 0.5"),
    "unnormalized": Probed("--attention-normalizer unnormalized"),
    "relu2": Probed("--attention-normalizer relu2"),
    "swish-l2": Probed("--attention-normalizer swish-l2"),
    "gain": Probed(
        "--relative-gain {n}", what="softmax, a learned factor on the weights for each distance"
    ),
    "markers": Probed(markers="begin end", what="softmax, <s> 0 ... 0 </s>"),
    "end-marker": Probed(
        markers="end", what="softmax, 0 ... 0 </s>, as sources of translation are"
    ),
}


class Setting(NamedTuple):
    """A model to train."""

    kind: str  # a key of KINDS
    variant: str  # a key of PROBED
    position: str  # one of POSITIONS
    n: int  # the longest row that it is trained on
    seed: int

    def flags(self) -> list[str]:
        """Return the plugin's flags."""
        own = PROBED[self.variant].flags.format(n=self.n)
        return [*own.split(), "--relative-position", self.position]


class Probe(nn.Module):
    """A model with a linear layer that reads one number, in units of n, from each state.

    T5's biases start at random numbers here; in the plugin they start at 0. With equal inputs the
    gradient there would be 0, because the sum of a row of l2 weights is largest when all biases are
    equal.
    """

    def __init__(self, setting: Setting, impl: str = "auto"):
        super().__init__()
        kind = KINDS[setting.kind]
        self.causal = kind.causal
        self.markers = PROBED[setting.variant].markers
        self.unit = setting.n
        self.words = Dictionary()
        self.words.add_symbol("0")
        task = SimpleNamespace(
            source_dictionary=self.words,
            target_dictionary=self.words,
            max_positions=lambda: 64 * setting.n,
        )
        flags = [*kind.flags.split(), *setting.flags(), "--attention-impl", impl]
        torch.manual_seed(setting.seed)
        model = build_model(_parse(kind.arch, flags), task)
        self.stack = model.decoder if kind.causal else model.encoder
        if kind.arch == "gau_roberta":
            self.stack = model.encoder.sentence_encoder
        for module in self.stack.modules():
            if isinstance(module, BucketedBias):
                nn.init.normal_(module.weight, std=BIAS)
        self.readout = nn.Linear(WIDTH, 1)

    def features(self, lengths: list[int]) -> Tensor:
        """Return the states of the zeros, [B, N, E].

        States after the end of a row have no meaning.
        """
        tokens = self.tokens(lengths)
        if self.causal:
            states, _ = self.stack.extract_features(tokens, None)  # [B, N, E]
        else:
            real = tokens.ne(self.words.pad()).sum(1)
            (states,) = self.stack(tokens, src_lengths=real)["encoder_out"]  # [N, B, E]
            states = states.transpose(0, 1)  # [B, N, E]
        first = 1 if "begin" in self.markers else 0  # the first zero
        return states[:, first : first + max(lengths)]

    def forward(self, lengths: list[int]) -> Tensor:
        """Return the answers [B, N]; right are 1, 2, ..."""
        return self.readout(self.features(lengths))[..., 0] * self.unit

    def tokens(self, lengths: list[int]) -> Tensor:
        """Return the tokens [B, N], padded to the longest row."""
        rows = []
        for length in lengths:
            row = [self.words.index("0")] * length
            if "begin" in self.markers:
                row.insert(0, self.words.bos())
            if "end" in self.markers:
                row.append(self.words.eos())
            rows.append(torch.tensor(row))
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.words.pad())


class Outcome(NamedTuple):
    """The results of one model."""

    right: float  # share of the answers in rows of 1 .. n zeros that round to the right number
    error: float  # mean distance from the right number in these rows
    worst: float  # largest distance in these rows
    spread: float  # see `spread`
    longer: dict[int, float]  # length of a row -> mean distance
    answers: dict[int, list[float]]  # length of a row -> answers

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
    """Return the largest difference between a state and that of the first zero.

    It is relative to the largest state.

    In float64 rounding alone gives about 1e-15. If the difference is 0, the states tell neither the
    position nor the length of the row.
    """
    probe = probe.double().eval()
    with torch.no_grad():
        states = torch.cat([probe.features([length])[0] for length in lengths])  # [places, E]
    probe.float()
    return float((states - states[0]).abs().max() / states.abs().max())


def random_spread(setting: Setting, size: float = 0.3, impl: str = "auto") -> float:
    """Return the `spread` of an untrained model.

    Random numbers were added to all its parameters.
    """
    probe = Probe(setting, impl)
    generator = torch.Generator().manual_seed(setting.seed)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return spread(probe, [setting.n // 2, setting.n, 2 * setting.n])


def train(setting: Setting, steps: int, learning_rate: float, batch: int = 8) -> Probe:
    """Train with Adam, by least squares, on rows of random lengths up to n.

    The learning rate warms up over a tenth of the steps and falls to 0 as a cosine. A causal model
    trains only on rows of length n, which contain all shorter rows.
    """
    probe = Probe(setting)
    steps = math.ceil(KINDS[setting.kind].effort * steps)
    parameters = list(probe.parameters())
    optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.98), fused=True)
    generator = torch.Generator().manual_seed(setting.seed)
    for step in range(steps):
        warm = min(1.0, 10 * (step + 1) / steps)
        rate = learning_rate * warm * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.param_groups[0]["lr"] = rate
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
    """Return answers minus right answers of all rows, [sum of lengths]."""
    answers = probe(lengths)  # [B, N]
    places = torch.arange(1, answers.shape[1] + 1)  # [N]
    inside = places <= torch.tensor(lengths)[:, None]  # [B, N]
    return (answers - places)[inside]


def examine(probe: Probe, n: int, longer: list[int]) -> Outcome:
    """Test a model on every length up to n, and on the lengths `longer`."""
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
