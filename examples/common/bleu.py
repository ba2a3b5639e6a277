"""Compute BLEU from the output of fairseq-generate.

With --score-reference, compute the likelihood of the references.

`python -m common.bleu DATA RESULTS [FLAG OF fairseq-generate ...]`: RESULTS is its --results-path,
unless the flags name another. The translations are also written there, in the order of the corpus.
"""

import argparse
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import sacrebleu
from common.errors import failing
from common.parallel_text import TARGET, read_lines, write_lines

fail = failing("evaluate")


def in_corpus_order(output: Iterable[str], number: int) -> list[str]:
    """Return the best translation of every sentence; fairseq-generate sorts its output by length.

    Args:
        output: the lines of fairseq-generate
        number: how many sentences the corpus has

    Raises:
        ValueError: a sentence has no translation, or there are more than `number`
    """
    translations: dict[int, str] = {}
    for line in output:
        match = re.match(r"H-(\d+)\t[^\t]*\t(.*)", line)
        if match:
            translations.setdefault(int(match[1]), match[2])  # with --nbest the best comes first
    if sorted(translations) != list(range(number)):
        raise ValueError(f"translations of {len(translations):,} sentences, must be {number:,}")
    return [translations[i] for i in range(number)]


def nats_a_token(output: Iterable[str], number: int) -> float:
    """Return the negative log-likelihood of `number` references, in nats a token.

    fairseq prints the log-probability of each token in bits. Every token counts once, the end of
    the sentence too; nothing is smoothed.

    Raises:
        ValueError: the output does not score each sentence or has no scores of tokens, or the
            scores are no finite numbers
    """
    scores = {}  # of the tokens of each sentence
    for line in output:
        if match := re.match(r"P-(\d+)\t(.*)", line):
            scores[int(match[1])] = [float(score) for score in match[2].split()]
    if sorted(scores) != list(range(number)):
        raise ValueError(f"scores of {len(scores):,} sentences, must be {number:,}")
    bits = math.fsum(map(math.fsum, scores.values()))
    tokens = sum(map(len, scores.values()))
    if tokens == 0:
        raise ValueError("has no scores of tokens")
    nats = -math.log(2) * bits / tokens
    if not math.isfinite(nats):
        raise ValueError(f"the nats a token are {nats}, which is no finite number")
    return nats


def compounds_split(line: str) -> str:
    """Split hyphenated words.

    Papers on English-German have done so since 2017 before scoring tokens.
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)


def token_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Return BLEU of tokenised lines, and the line that `fairseq-score` prints."""
    from fairseq.data import Dictionary  # takes seconds; only tokens need it
    from fairseq.scoring import bleu

    words = Dictionary()
    scorer = bleu.Scorer(bleu.BleuConfig(pad=words.pad(), eos=words.eos(), unk=words.unk()))
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        translated = words.encode_line(hypothesis, append_eos=True)
        right = words.encode_line(reference, append_eos=True)
        scorer.add(right, translated)
    return scorer.score(), scorer.result_string()


def text_bleu(
    hypotheses: Sequence[str], references: Sequence[str], lowercase: bool
) -> tuple[float, str]:
    """Return sacreBLEU of plain lines, and its signature with the details."""
    metric = sacrebleu.BLEU(lowercase=lowercase)
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return score.score, f"{metric.get_signature()} | {score}"


def report_tokens(
    hypotheses: Sequence[str],
    token_references: Sequence[str],
    references: Sequence[str],
    plain_file: Path,
) -> float:
    """Print three scores of translations that are Moses' tokens in lower case.

    Args:
        hypotheses: the translations
        token_references: the references as tokens
        references: the references as text
        plain_file: where the translations are written as text

    Returns:
        the BLEU of the tokens
    """
    metric, details = token_bleu(hypotheses, token_references)
    print(f"tokenised, lower case (fairseq-score): {details}")

    split_hypotheses = [compounds_split(line) for line in hypotheses]
    split_references = [compounds_split(line) for line in token_references]
    _, of_split = token_bleu(split_hypotheses, split_references)
    print(f"the same after compound splitting:     {of_split}")

    from sacremoses import MosesDetokenizer  # takes a second; only tokens need it

    detokenize = MosesDetokenizer(lang=TARGET).detokenize
    plain = [detokenize(line.split()) for line in hypotheses]
    write_lines(plain_file, plain)
    _, of_plain = text_bleu(plain, references, lowercase=True)
    print(f"detokenised, lower case (sacreBLEU):   {of_plain}")
    return metric


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m common.bleu", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--gen-subset", default="test")
    parser.add_argument("--results-path", type=Path)
    parser.add_argument("--score-reference", action="store_true")
    args, _ = parser.parse_known_args()

    subset = args.gen_subset
    results = args.results_path or args.results
    raw = args.data / "reference" / f"{subset}.raw.{TARGET}"
    tokens = args.data / "reference" / f"{subset}.tokens.{TARGET}"  # of recipes with Moses' tokens
    if not raw.exists():
        fail(f"--gen-subset {subset}: {raw} is missing; it has the references")
    references = read_lines(raw, fail)
    output = results / f"generate-{subset}.txt"
    if not output.exists():
        fail(f"{output}: is missing; fairseq-generate writes it")
    generated = read_lines(output, fail)
    try:
        if args.score_reference:
            print(f"nats a token = {nats_a_token(generated, len(references)):.5f}")
            return
        hypotheses = in_corpus_order(generated, len(references))
    except ValueError as error:
        fail(f"{output}: {error}")
    write_lines(results / f"{subset}.{TARGET}", hypotheses)

    if tokens.exists():
        token_references = read_lines(tokens, fail)
        plain_file = results / f"{subset}.detokenised.{TARGET}"
        metric = report_tokens(hypotheses, token_references, references, plain_file)
    else:
        metric, details = text_bleu(hypotheses, references, lowercase=False)
        print(f"detokenised, cased (sacreBLEU): {details}")
    print(f"translations: {results}")
    print(f"BLEU = {metric:.2f}")


if __name__ == "__main__":
    main()
