"""Show source heads, M and mixed heads on sentences, in one HTML file that needs no network.

The page has all attentions of the model: lines between tokens, matrices, M of each token, and what
a source head adds to a mixed head. It works for translation, language models and masked language
models.

--text is cut into tokens at spaces, as it was for fairseq-preprocess, or by --sentencepiece. A
translation of it is given by --target; without, the page shows the best hypothesis. Without --text,
the page shows sentences of --subset with their references.

Example: view checkpoint_best.pt --text 'ein Mann schläft .' --output page.html
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.tasks import TASK_REGISTRY, FairseqTask
from torch import Tensor

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis import loading, output, scores
from mixhead_plugin.fairseq.analysis.adapter import attentions_of
from mixhead_plugin.fairseq.analysis.loading import Loaded
from mixhead_plugin.fairseq.padding import target_dictionary
from mixhead_plugin.heads.attention import Attention, Heads, HeadsError
from mixhead_plugin.heads.page import Sentence, ShownHeads, shown, write_page
from mixhead_plugin.heads.sites import where
from mixhead_plugin.heads.views import watched

# The tasks for which `encode` and `from_text` make the input of a text as the task does.
TASKS_OF_TEXT = (
    "translation",
    "language_modeling",
    "masked_lm",
    "multilingual_masked_lm",
    "truncated_bptt_lm",
)
TOKENS = ("src_tokens", "prev_output_tokens")  # the entries of net_input that are [B, N]


def add_arguments(parser: ArgumentParser) -> None:
    loading.add_arguments(parser, batching=False)
    parser.add_argument(
        "--text", action="append", metavar="WORDS", help="a sentence; may be given several times"
    )
    parser.add_argument(
        "--target", action="append", metavar="WORDS", help="its translation; one for each --text"
    )
    parser.add_argument(
        "--sentencepiece",
        metavar="FILE",
        help="model of sentencepiece that cuts --text and --target",
    )
    text = "sentences of --subset, from random places, without --text (default: %(default)s)"
    parser.add_argument("--sentences", type=loading.positive, default=3, metavar="N", help=text)
    text = "tokens of a sentence to read and show (default: the first %(default)s)"
    parser.add_argument("--length", type=loading.positive, default=64, metavar="N", help=text)
    text = "the page (default: %(default)s)"
    parser.add_argument(
        "--output", type=output.writable_file, default="heads.html", metavar="FILE", help=text
    )


def run(args: Namespace) -> None:
    if args.sentencepiece is not None and not args.text:
        raise OptionError(
            f"--sentencepiece {args.sentencepiece}: cuts --text, which is not given; must be left "
            "out"
        )
    texts = args.text or []
    targets = args.target or []
    if targets and len(targets) != len(texts):
        raise OptionError(
            f"--target: {len(targets)} given; must be {len(texts)}, one for each --text"
        )
    loaded = loading.load_from(args, args.checkpoint)
    if targets and not scores.translates(loaded):
        raise OptionError(
            f"--target {targets[0]}: must be left out, {args.checkpoint} does not translate"
        )
    positions = loaded.model.max_positions()  # of a translation model, those of both sides
    sides = positions if isinstance(positions, tuple) else (positions,)
    length = min(args.length, *sides)
    inputs = from_text(args, loaded, length) if texts else from_data(args, loaded)
    sentences = [see(loaded, each, length) for each in inputs]
    try:
        write_page(args.output, loaded.name, facts(loaded), sentences)
    except HeadsError as error:
        raise OptionError(f"{args.checkpoint}: {error}") from error
    print(f"wrote {args.output}")


def facts(loaded: Loaded) -> str:
    """Return a line on the attentions of a model."""
    lines = set()
    for attention in attentions_of(loaded.model):
        module = attention.module
        mixing = module.variant.head_mixing
        size = f"{module.num_heads} heads of size {module.head_dim}"
        if module.value_head_dim != module.head_dim:
            size += f" with values of {module.value_head_dim}"
        lines.add(f"head mixing {mixing}, {module.variant.normalizer}, {size}")
    return f"{loaded.cfg.model._name}: {'; '.join(sorted(lines))}"


class Input(NamedTuple):
    """The input of a model for one sentence, and the words that its dictionary lacks."""

    net_input: dict[str, Tensor]
    to_predict: Tensor  # tokens [N]
    unknown_source: Sequence[str] = ()  # the words of --text that the dictionary lacks
    unknown_target: Sequence[str] = ()  # the words of --target that the dictionary lacks


def words(dictionary: Dictionary, tokens: Tensor, unknown: Sequence[str]) -> list[str]:
    """Return the words of tokens [N].

    Args:
        dictionary: the dictionary that has numbered the tokens
        tokens: the numbers of the words [N]
        unknown: the words that the dictionary lacks, in their order
    """
    left = iter(unknown)
    shown_words = []
    for token in tokens.tolist():
        word = dictionary[token]
        if token == dictionary.unk():
            lacking = next(left, "")  # a translation of the model may have more of them
            if lacking:
                word = f"{lacking} (unknown)"
        shown_words.append(word)
    return shown_words


def say_if_cut(length: int, tokens: int) -> None:
    if tokens > length:
        print(f"--length {length}: the model reads only the first {length} of {tokens} tokens")


def see(loaded: Loaded, inputs: Input, length: int) -> Sentence:
    """Pass one sentence through the model, and return it with the heads of all attentions."""
    net_input = dict(inputs.net_input)
    longest = max(net_input[name].size(1) for name in TOKENS if name in net_input)
    say_if_cut(length, longest)
    for name in TOKENS:
        if name in net_input:
            net_input[name] = net_input[name][:, :length]
    if "src_lengths" in net_input:
        net_input["src_lengths"] = net_input["src_lengths"].clamp(max=length)

    # With --cross-self-attention the decoder's own attention reads the source, too.
    joint = getattr(getattr(loaded.model, "decoder", None), "cross_self_attention", False)
    shown_heads: list[ShownHeads] = []

    def keep(attention: Attention, heads: Heads) -> None:
        place = where(attention.name)
        both = joint and place.site == "decoder-self"
        shown_heads.append(shown(place, heads.weights(), heads.mixing, reads_both=both))

    with watched(attentions_of(loaded.model), keep):
        loading.forward(loaded, net_input, alone=True)

    source = loaded.task.source_dictionary
    target = target_dictionary(loaded.task)
    read = words(source, net_input["src_tokens"][0], inputs.unknown_source)
    to_predict = inputs.to_predict[:length]
    if "prev_output_tokens" in net_input:
        return Sentence(
            encoder_reads=read,
            decoder_reads=words(target, net_input["prev_output_tokens"][0], inputs.unknown_target),
            decoder_predicts=words(target, to_predict, inputs.unknown_target),
            attentions=shown_heads,
        )
    if shown_heads[0].site == "encoder-self":  # a masked language model
        return Sentence(
            encoder_reads=read, decoder_reads=[], decoder_predicts=[], attentions=shown_heads
        )
    return Sentence(
        encoder_reads=[],
        decoder_reads=read,
        decoder_predicts=words(target, to_predict, inputs.unknown_source),
        attentions=shown_heads,
    )


def from_data(args: Namespace, loaded: Loaded) -> Iterator[Input]:
    """Yield --sentences of --subset, with their references."""
    for batch in loading.batches(loaded, args.subset, batch_size=1, limit=args.sentences):
        yield Input(batch["net_input"], batch["target"][0])


def from_text(args: Namespace, loaded: Loaded, length: int) -> Iterator[Input]:
    """Yield each --text, with its --target or the model's own translation.

    Args:
        args: the flags of the command
        loaded: the model
        length: the largest number of tokens that a translation model reads
    """
    _refuse_own_tokens(loaded, args.text[0])
    source = loaded.task.source_dictionary
    target = loaded.task.target_dictionary
    for number, text in enumerate(args.text):
        tokens, unknown = encode(args, loaded, source, text, "--text")
        if not scores.translates(loaded):
            read, to_predict = _of_one_side(loaded, tokens)
            net_input = {"src_tokens": read[None], "src_lengths": read.new_tensor([len(read)])}
            yield Input(net_input, to_predict, unknown_source=unknown)
            continue
        say_if_cut(length, len(tokens))
        tokens = tokens[:length]  # before the search
        net_input = {"src_tokens": tokens[None], "src_lengths": tokens.new_tensor([len(tokens)])}
        lacking: list[str] = []
        if args.target:
            to_predict, lacking = encode(args, loaded, target, args.target[number], "--target")
        else:
            batch = {"id": tokens.new_tensor([0]), "net_input": net_input}
            ((to_predict,),) = scores.translate(loaded, [batch])
        read = torch.cat([to_predict.new_tensor([target.eos()]), to_predict[:-1]])
        yield Input(
            {**net_input, "prev_output_tokens": read[None]},
            to_predict,
            unknown_source=unknown,
            unknown_target=lacking,
        )


def _refuse_own_tokens(loaded: Loaded, text: str) -> None:
    """Refuse --text for a task that makes the input of a text in its own way.

    Such a task adds tokens, for example that of a language. Without them, the page would show a
    sentence that the model has never read.
    """
    makes_input = type(loaded.task).build_dataset_for_inference
    # A task of which fairseq-interactive reads no text has the method of FairseqTask.
    known = [FairseqTask.build_dataset_for_inference]
    for name in TASKS_OF_TEXT:
        if name in TASK_REGISTRY:  # truncated_bptt_lm is not in a fairseq without its examples
            known.append(TASK_REGISTRY[name].build_dataset_for_inference)
    if makes_input not in known:
        raise OptionError(
            f"--text {text!r}: --task {loaded.cfg.task._name} adds tokens of its own to a text; "
            "must be left out, and the page shows sentences of --subset"
        )


def _of_one_side(loaded: Loaded, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a model that does not translate reads for the tokens of a text [N], and predicts.

    masked language model   <s>  a  b  </s>
    language model          </s> a  b            and predicts a b </s>
    with --add-bos-token    <s>  </s> a  b       and predicts <s> a b </s>
    """
    source = loaded.task.source_dictionary
    begin = tokens.new_tensor([source.bos()])
    sites = {where(attention.name).site for attention in attentions_of(loaded.model)}
    if "encoder-self" in sites:
        return torch.cat([begin, tokens]), tokens
    read = torch.cat([tokens.new_tensor([source.eos()]), tokens[:-1]])
    if getattr(loaded.cfg.task, "add_bos_token", False):
        return torch.cat([begin, read]), torch.cat([begin, tokens])
    return read, tokens


def _pieces_of(text: str, file: str) -> list[str]:
    """Return the pieces of a text; `file` is the model of sentencepiece that cuts it."""
    try:
        import sentencepiece  # not above: the other texts are shown without it
    except ImportError as error:
        raise OptionError(
            f"--sentencepiece {file}: needs sentencepiece: pip install sentencepiece"
        ) from error
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=file)
        return model.encode(text, out_type=str)
    except RuntimeError as error:  # the file is missing, or none of sentencepiece
        raise OptionError(f"--sentencepiece {file}: {error}") from error


def encode(
    args: Namespace, loaded: Loaded, dictionary: Dictionary, text: str, flag: str
) -> tuple[Tensor, list[str]]:
    """Return the tokens of a text, and the words that the dictionary lacks.

    Args:
        args: the flags of the command
        loaded: the model
        dictionary: the dictionary of this side
        text: words with spaces between them
        flag: the flag that gives the text, for messages

    Returns:
        the tokens [N] on the model's device, with the end of the sentence; and the words that the
            dictionary lacks
    """
    pieces = text.split()
    if args.sentencepiece is not None:
        pieces = _pieces_of(text, args.sentencepiece)
    if not pieces:
        raise OptionError(f"{flag} {text!r}: has no words")
    unknown = [piece for piece in pieces if dictionary.index(piece) == dictionary.unk()]
    if unknown:
        print(f"{flag}: the dictionary lacks {', '.join(unknown)}")
    numbers = [*map(dictionary.index, pieces), dictionary.eos()]
    return torch.tensor(numbers, device=loaded.device), unknown
