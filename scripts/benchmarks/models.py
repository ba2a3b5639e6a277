"""A training step of a small language model, and a beam search: fairseq's against ours."""

from argparse import Namespace
from typing import Any, Dict, Iterator, List

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Contender, Row, Shape
from benchmarks.checks import Wrong
from benchmarks.measuring import measure, rows_of
from benchmarks.modules import MIXINGS, shake


def task_of(n_words: int) -> Any:
    from fairseq.data import Dictionary
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    words = Dictionary()
    for i in range(n_words):
        words.add_symbol(f"w{i}")
    return TranslationTask(TranslationConfig(), words, words)


def models_of(stock: str, flags: Dict[str, Any], variants: Dict[str, Dict[str, str]], task: Any) -> Dict[str, Any]:
    """fairseq's model and ours, with the same parameters."""
    from fairseq.models import ARCH_CONFIG_REGISTRY, build_model

    import mixhead_plugin  # noqa: F401  (registers the architectures)

    models = {}
    for name, own in variants.items():
        arch = stock if name == "fairseq" else f"mixhead_{stock}"
        args = Namespace(arch=arch, **flags, **own)
        ARCH_CONFIG_REGISTRY[arch](args)
        torch.manual_seed(1)
        models[name] = build_model(args, task)
        models[name].load_state_dict(models["fairseq"].state_dict(), strict=False)
    return models


def steps(shape: Shape, dropout_p: float, device: str) -> Dict[str, Contender]:
    """A training step of a language model of 4 layers: loss, with penalties for the last ones, gradients, Adam."""
    from mixhead_plugin.modules.penalties import RegularizedPass

    flags = dict(
        tokens_per_sample=shape.length,
        decoder_layers=4,
        decoder_embed_dim=shape.heads * shape.head_dim,
        decoder_ffn_embed_dim=4 * shape.heads * shape.head_dim,
        decoder_attention_heads=shape.heads,
        dropout=0.1,
        attention_dropout=dropout_p,
        share_decoder_input_output_embed=True,
        max_target_positions=shape.length,
    )
    variants = {"fairseq": {}}
    for label, head_mixing in MIXINGS.items():
        variants[f"mixhead_plugin: {label}"] = {"head_mixing": head_mixing}
    variants["mixhead_plugin: Mixhead B, reference"] = {"attention_impl": "reference"}
    penalties = {
        "mixhead_plugin: Mixhead A, orthogonal penalty": {"orthogonal": 0.01},
        "mixhead_plugin: Mixhead B, orthogonal penalty": {"orthogonal": 0.01},
        "mixhead_plugin: Mixhead B, rank penalty": {"rank": 0.01},
    }
    variants |= {name: variants[name.rpartition(",")[0]] for name in penalties}
    task = task_of(4000)
    task.args = Namespace(**flags)
    tokens = torch.randint(10, 4000, (shape.batch, shape.length), device=device)
    real = torch.ones_like(tokens, dtype=torch.bool)

    def contender(model: torch.nn.Module, weights: Dict[str, float]) -> Contender:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

        def plain() -> Tensor:
            return F.cross_entropy(model(tokens)[0].flatten(0, 1).float(), tokens.flatten())

        def regularized() -> Tensor:
            with RegularizedPass(model, weights, {"decoder": real}) as of_pass:
                loss = plain()
            return of_pass.add_to(loss, 1)

        forward = regularized if weights else plain
        if weights and not forward() > plain() * 1.0001:  # the mixing is shaken: no penalty is 0
            raise Wrong(f"{weights}: the penalty adds nothing to the loss; nothing is timed")

        def full() -> None:
            optimizer.zero_grad()
            forward().backward()
            optimizer.step()

        return Contender(full, forward)

    models = models_of("transformer_lm", flags, variants, task)
    for name, model in models.items():
        shake(model)
        model.to(device).eval()
        if name != "fairseq":
            _check_step(name, model, tokens)
    contenders = {name: contender(model, penalties.get(name, {})) for name, model in models.items()}
    for model in models.values():
        model.train()
    return contenders


def _check_step(name: str, model: torch.nn.Module, tokens: Tensor) -> None:
    """Loss and gradients are those of the reference, to a thousandth of the largest."""
    from mixhead_plugin.modules.attention import MixheadAttention

    attentions = [module for module in model.modules() if isinstance(module, MixheadAttention)]
    chosen = attentions[0].impl
    found = []
    for impl in (chosen, "reference"):
        for module in attentions:
            module.impl = impl
        loss = F.cross_entropy(model(tokens)[0].flatten(0, 1).float(), tokens.flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append([loss.detach(), torch.cat([gradient.flatten() for gradient in gradients])])
    for module in attentions:
        module.impl = chosen
    for part, got, expected in zip(("loss", "gradient of the parameters"), *found):
        error = (got - expected).abs().max() / expected.abs().max()
        if not error <= 1e-3:
            raise Wrong(f"{name}: {part} differs by {error:.2g} of the reference's largest; nothing is timed")


def decodings(device: str, sentences: int, length: int, beam: int) -> Dict[str, Contender]:
    """A beam search over hypotheses of one fixed length, with the IWSLT architecture (6 + 6 layers, d 512)."""
    from fairseq.sequence_generator import SequenceGenerator

    variants = {"fairseq": {}}
    for label, head_mixing in MIXINGS.items():
        variants[f"mixhead_plugin: {label}"] = {"head_mixing": head_mixing}
    task = task_of(4000)
    flags = dict(share_all_embeddings=True, max_source_positions=256, max_target_positions=256)
    models = models_of("transformer_iwslt_de_en", flags, variants, task)
    source = torch.randint(10, 4000, (sentences, length), device=device)
    source[:, -1] = task.source_dictionary.eos()
    lengths = torch.full((sentences,), length, device=device)
    sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}

    def contender(model: torch.nn.Module) -> Contender:
        model.to(device).eval().make_generation_fast_(
            beamable_mm_beam_size=None, need_attn=False
        )  # as fairseq-generate
        search = SequenceGenerator(
            [model], task.target_dictionary, beam_size=beam, min_len=length, max_len_a=0, max_len_b=length
        )

        def full() -> List[float]:
            return [float(best["score"]) for best, *_ in search.generate([model], sample)]

        return Contender(full)

    contenders = {name: contender(model) for name, model in models.items()}
    expected = torch.tensor(contenders["fairseq"].full())
    for name, made in contenders.items():  # mixing is the identity here: the tests are about decoding what was trained
        error = (torch.tensor(made.full()) - expected).abs().max()
        if not error <= 1e-3 * expected.abs().max():
            raise Wrong(f"{name}: its hypotheses' scores differ by {error:.2g} from fairseq's; nothing is timed")
    return contenders


def step_table(options: Namespace) -> Iterator[List[Row]]:
    shape = Shape(max(1, options.tokens // 512), options.heads, 512, options.head_dim)
    yield _rows("step", shape, steps(shape, options.dropout, options.device), options)


def decoding_table(options: Namespace) -> Iterator[List[Row]]:
    shape = Shape(16, 4, 25, 128)
    yield _rows("decoding", shape, decodings(options.device, shape.batch, shape.length, beam=5), options)


def _rows(level: str, shape: Shape, contenders: Dict[str, Contender], options: Namespace) -> List[Row]:
    times = measure(contenders, options.rounds, options.device, level)
    return rows_of(level, shape, times, dict.fromkeys(contenders, "fairseq"))
