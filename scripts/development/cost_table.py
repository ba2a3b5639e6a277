"""The table of costs on the front page, from the modules and from what was measured.

scripts/development/readme_tables.py writes it.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from studies.markdown import table

from development import gpu_tables
from mixhead_plugin.nn import MixedAttention

RESULTS = Path(__file__).resolve().parents[2] / "results" / "cpu"
MIXHEADS = {"Mixhead A": "position-independent", "Mixhead B": "position-wise"}


def costs() -> str:
    """Return what mixing costs in parameters, time and memory, a column for A and one for B."""
    attention = printed(
        "core_1x8x2048x64.txt",
        "core: batch 1, heads 8, length 2048, head size 64, dropout 0.0",
        "by upstream",
    )
    small_heads = printed(
        "module.txt",
        "module: batch 40, heads 32, length 64, head size 8, dropout 0.1, padded",
        "by softmax",
    )
    large = "nanogpt: GPT-2: 12 layers, d 768, 12 heads, 1 x 1024 tokens"
    small = "nanogpt: letters: 6 layers, d 384, 6 heads, 8 x 256 tokens"
    large_step = printed("nanogpt.txt", large, "by upstream")
    small_step = printed("nanogpt.txt", small, "by upstream")
    memory = printed("nanogpt.txt", large, "peak mib")
    plain_memory = memory["torch's attention, not mixed"]

    query = gpu_tables.one_query().ratios
    gpt_on_h200 = gpu_tables.gpt(gpu_tables.H200).ratios
    gpt_on_h100 = gpu_tables.gpt(gpu_tables.H100).ratios

    rows = [
        [
            "new parameters of an attention layer",
            "",
            *(str(new_parameters(mixing)) for mixing in MIXHEADS.values()),
        ],
        [
            "GPUs (H200 and H100): an attention alone, forward and backward, 2,048 tokens",
            "torch's flash attention",
            *(listed(gpu_tables.ratios_of_both_passes(name, "8x8x2048x64")) for name in MIXHEADS),
        ],
        [
            "GPUs: the same, 16 heads of 64",
            "torch's flash attention",
            *(listed(gpu_tables.ratios_of_both_passes(name, "8x16x2048x64")) for name in MIXHEADS),
        ],
        [
            "GPU (H200): attention of one step of decoding "
            f"(the plugin without mixing: {whole(query['softmax'])})",
            "torch's attention",
            *(whole(query[name]) for name in MIXHEADS),
        ],
        [
            "GPUs: training step of a language model of 4 layers, two machines with an H200 and "
            "one with an H100",
            "fairseq's attention",
            *(listed(gpu_tables.ratios_of_training(name)) for name in MIXHEADS),
        ],
        [
            "GPUs (H200 and H100): training step of nanoGPT, 12 layers with 12 heads of 64",
            "torch's attention",
            *(listed([gpt_on_h200[name], gpt_on_h100[name]]) for name in MIXHEADS),
        ],
        [
            "CPU: an attention alone, forward and backward, 2,048 tokens",
            "torch's attention",
            *ratios(attention[f"auto: {name}"] for name in MIXHEADS),
        ],
        [
            "CPU: an attention with its projections, 64 tokens, 32 heads of 8",
            "the plugin without mixing",
            *ratios(small_heads[name] for name in MIXHEADS),
        ],
        [
            "CPU: training step of nanoGPT, 6 layers with 6 heads of 64",
            "torch's attention",
            *ratios(small_step[name] for name in MIXHEADS),
        ],
        [
            "CPU: the same, 12 layers with 12 heads of 64",
            "torch's attention",
            *ratios(large_step[name] for name in MIXHEADS),
        ],
        [
            "CPU: memory of this step, beyond the model's own",
            "torch's attention",
            *ratios(memory[name] / plain_memory for name in MIXHEADS),
        ],
    ]
    return table(["", "compared with", *MIXHEADS], rows)


def ratios(values: Iterable[float]) -> list[str]:
    """Return the cells of ratios to a plain attention."""
    return [f"{value:.2f}" for value in values]


def whole(ratio: float) -> str:
    """Return the cell of a ratio whose digits behind the point differ from run to run."""
    return f"{ratio:.0f}"


def listed(values: Iterable[float]) -> str:
    """Return the cell of a ratio that was measured several times: 1.12, 1.69 and 1.91."""
    *others, last = ratios(values)
    return f"{', '.join(others)} and {last}"


def new_parameters(mixing: str) -> int:
    """Return how many parameters a mixing adds to an attention of 8 heads of 64."""
    plain = MixedAttention(512, 8, device="meta")
    mixed = MixedAttention(512, 8, device="meta", head_mixing=mixing)
    return parameters_of(mixed) - parameters_of(plain)


def parameters_of(module: MixedAttention) -> int:
    """Return how many numbers a module learns."""
    return sum(parameter.numel() for parameter in module.parameters())


def printed(file: str, title: str, column: str) -> dict[str, float]:
    """Return a column of what scripts/benchmark.py printed below a title, by contender."""
    sections = (RESULTS / file).read_text().split("\n\n")
    (section,) = [each for each in sections if each.splitlines()[0] == title]
    # The title, the heads of the columns of numbers, and a line for each contender.
    _, head, *lines = [re.split(r" {2,}", line.strip()) for line in section.splitlines()]
    place = head.index(column)
    numbers_of = {}
    for name, *numbers in lines:
        if place < len(numbers):  # a contender may lack the last columns
            numbers_of[name] = float(numbers[place])
    return numbers_of
