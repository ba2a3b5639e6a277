"""Train fairseq's model and the Mixhead one with the same flags, and score both.

All is done by fairseq's own commands.
"""

import argparse
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple, NoReturn

import sacrebleu
import sentencepiece
from demo_flags import read_flags
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.bleu import in_corpus_order
from common.cores import CORES
from common.fingerprint import fingerprint
from common.logs import numbers_in
from common.parallel_text import read_lines

from mixhead_plugin.heads import figures

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "mixhead_plugin"
CORPUS = ROOT / "examples" / "demo" / "corpus"
HELD_OUT = 600  # pairs for validation, and as many for the test
SPLITS = ("train", "valid", "test")
LANGUAGES = ("de", "en")
RUNNING: list[subprocess.Popen] = []  # so that a failure can end the other training
# Otherwise fairseq leaves out the last sentences of every set, those that fill no multiple of 8.
WHOLE_SETS = ["--required-batch-size-multiple", "1"]
METRIC = "sacreBLEU"
BEAM = 5
POSITIONS = 1024  # of fairseq's transformer, by default
SAMPLES = 5
# of the lines in the picture
PLAIN_COLOUR = "#000000"
MIXED_COLOUR = "#D55E00"

# Both models have these flags; 4 heads are the best of 4, 8 and 32 in docs/protocol.md, 'Pilots',
# for both.
FLAGS = """
    --source-lang de --target-lang en --share-all-embeddings
    --encoder-layers 2 --decoder-layers 2
    --encoder-embed-dim 128 --encoder-ffn-embed-dim 512
    --encoder-attention-heads 4 --decoder-attention-heads 4
    --dropout 0.1 --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --optimizer adam --adam-betas (0.9,0.98) --clip-norm 1.0
    --lr 3e-3 --lr-scheduler inverse_sqrt --warmup-updates 200 --max-tokens 1500
""".split()


def fail(message: str) -> NoReturn:
    sys.exit(f"demo: error: {message}")


class Result(NamedTuple):
    """One trained model."""

    arch: str
    parameters: int
    train_seconds: float
    score_seconds: float
    score: float
    validation: list[tuple[int, float]]  # updates, perplexity
    hypotheses: list[str]


def run(
    command: list[str], log: Path, threads: int, bar: tqdm | None = None
) -> tuple[list[str], float]:
    """Run one of fairseq's commands; return its lines and its seconds.

    Args:
        command: the name of the command and its flags
        log: the file that keeps the lines
        threads: the number of threads of torch
        bar: follows a training; None for no bar
    """
    command = [str(Path(sys.executable).parent / command[0]), *command[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    start = time.monotonic()
    lines = []
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
        RUNNING.append(process)
        for line in process.stdout:
            file.write(line)
            lines.append(line.rstrip("\n"))
            if bar is not None:
                follow(line, bar)
        status = process.wait()
        RUNNING.remove(process)
    if status != 0:
        tail = "\n".join(deque(lines, 15))
        fail(
            f"{Path(command[0]).name} failed; its whole output is in {log}, these are its last "
            f"lines:\n{tail}"
        )
    return lines, time.monotonic() - start


def side_by_side(work: Callable[[str, int, int], Result], archs: tuple[str, ...]) -> list[Result]:
    """Call `work(arch, row, threads)` for all architectures at once; they share the cores evenly.

    Two processes of one thread each are faster than one of two threads, because the threads wait
    for each other. As soon as one fails, the others end, too; its error is raised.
    """
    threads = max(1, CORES // len(archs))
    with ThreadPoolExecutor(max_workers=min(len(archs), CORES)) as pool:
        futures = [pool.submit(work, arch, row, threads) for row, arch in enumerate(archs)]
        try:
            ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in ended:
                future.result()
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            for process in list(RUNNING):  # their threads take them off while they end
                process.terminate()
            raise


def follow(line: str, bar: tqdm) -> None:
    """Move `bar` to the update of a log line."""
    validated = numbers_in(line, "valid")
    if validated:
        bar.set_postfix_str(f"validation perplexity {validated['valid_ppl']}")
    trained = numbers_in(line, "train_inner")
    if trained:
        bar.update(int(trained["num_updates"]) - bar.n)


def train(
    arch: str, data: Path, save: Path, args: argparse.Namespace, row: int, threads: int
) -> tuple[int, list[tuple[int, float]], float]:
    """Train one model.

    Args:
        arch: its architecture
        data: a folder of fairseq-preprocess
        save: the folder for its checkpoints
        args: flags of the demo
        row: the place of its progress bar
        threads: the number of threads of torch

    Returns:
        the number of its parameters; after how many updates it was validated, and the perplexity
        there; the seconds of the training
    """
    command = ["fairseq-train", str(data), *FLAGS, *WHOLE_SETS]
    command += [
        f"--user-dir={PLUGIN}",
        f"--arch={arch}",
        f"--max-update={args.updates}",
        f"--validate-interval-updates={max(1, args.updates // 8)}",
        f"--seed={args.seed}",
        f"--save-dir={save}",
        "--no-epoch-checkpoints",
        "--log-format=json",
        "--log-interval=10",
        "--num-workers=0",
    ]
    log = save.with_suffix(".train.log")
    with tqdm(
        total=args.updates, desc=f"{arch:>22}", unit="update", position=row, dynamic_ncols=True
    ) as bar:
        lines, seconds = run(command, log, threads, bar)

    parameters = None
    validation = []
    for line in lines:
        match = re.search(r"num\. shared model params: ([\d,]+)", line)
        if match:
            parameters = int(match[1].replace(",", ""))
        validated = numbers_in(line, "valid")
        if validated:
            updates = int(validated["valid_num_updates"])
            validation.append((updates, float(validated["valid_ppl"])))
    if parameters is None:
        fail(f"{log}: has no line with the number of parameters")
    return parameters, validation, seconds


def subwords(text: Path, out: Path, size: int) -> None:
    """Train sentencepiece on the training text; write every file of `text` in pieces to `out`."""
    try:
        sentencepiece.SentencePieceTrainer.train(
            input=",".join(str(text / f"train.{language}") for language in LANGUAGES),
            model_prefix=str(out / "sentencepiece"),
            vocab_size=size,
            hard_vocab_limit=False,
            character_coverage=1.0,
            # fixed: with another number the sums differ by rounding, and so may the pieces
            num_threads=2,
            minloglevel=2,
        )
    except RuntimeError as error:
        fail(f"sentencepiece cannot cut {text} into --vocabulary {size} pieces: {error}")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(out / "sentencepiece.model"))
    for split in SPLITS:
        for language in LANGUAGES:
            file = text / f"{split}.{language}"
            cut = [pieces.encode(line, out_type=str) for line in sentences(file)]
            # fairseq leaves such a sentence out of a training, but ends where it should be scored
            if split != "train":
                refuse_long(file, cut)
            with (out / file.name).open("w", encoding="utf-8", newline="\n") as target:
                target.writelines(f"{' '.join(line)}\n" for line in cut)


def sentences(file: Path) -> list[str]:
    """Return the lines of a file without white space around them."""
    return [line.strip() for line in read_lines(file, fail)]


def refuse_long(file: Path, cut: list[list[str]]) -> None:
    """End the program if a sentence in pieces is longer than the model's positions."""
    for number, line in enumerate(cut, start=1):
        if len(line) >= POSITIONS:  # one is for the end of the sentence
            most = f"must be at most {POSITIONS - 1:,}, the model's positions"
            fail(f"{file}: line {number} has {len(line):,} pieces; {most}")


def preprocess(cut: Path, data: Path, *extra: str) -> None:
    command = ["fairseq-preprocess", "--destdir", str(data), "--workers", str(CORES), *extra]
    command += ["--source-lang", "de", "--target-lang", "en"]
    for split in SPLITS:
        command += [f"--{split}pref", str(cut / split)]
    run(command, cut / "preprocess.log", 1)


def own_parallel_text(folder: Path) -> Path:
    """Return the user's folder; end the program unless {train,valid,test}.{de,en} are parallel."""
    for split in SPLITS:
        counts = []
        for language in LANGUAGES:
            file = folder / f"{split}.{language}"
            if not file.is_file():
                fail(f"DATA={folder}: {file.name} is missing")
            counts.append(len(sentences(file)))
        if counts[0] != counts[1]:
            fail(
                f"DATA={folder}: {split}.de has {counts[0]} lines, {split}.en {counts[1]}; they "
                "must match"
            )
        if counts[0] == 0:
            fail(f"DATA={folder}: {split}.de and {split}.en have no lines")
    return folder


def write_corpus(folder: Path) -> Path:
    """Unpack the pairs of examples/demo/corpus; the last ones are for validation and test."""
    for language in LANGUAGES:
        with gzip.open(CORPUS / f"{language}.gz", "rt", encoding="utf-8") as file:
            lines = file.readlines()
        parts = {
            "train": lines[: -2 * HELD_OUT],
            "valid": lines[-2 * HELD_OUT : -HELD_OUT],
            "test": lines[-HELD_OUT:],
        }
        for split, part in parts.items():
            (folder / f"{split}.{language}").write_text("".join(part), encoding="utf-8")
    return folder


def translate(
    data: Path, save: Path, references: list[str], threads: int
) -> tuple[float, list[str], float]:
    """Return BLEU, the translations in the order of the test set, and the seconds."""
    command = ["fairseq-generate", str(data), *WHOLE_SETS]
    command += [
        f"--user-dir={PLUGIN}",
        f"--path={save / 'checkpoint_best.pt'}",
        "--source-lang=de",
        "--target-lang=en",
        f"--beam={BEAM}",
        "--remove-bpe=sentencepiece",
        "--max-tokens=6000",
        "--max-len-a=1.2",
        "--max-len-b=10",
    ]
    log = save.with_suffix(".generate.log")
    lines, seconds = run(command, log, threads)
    try:
        hypotheses = in_corpus_order(lines, len(references))
    except ValueError as error:
        fail(f"{log}: {error}")
    bleu = sacrebleu.corpus_bleu(hypotheses, [references])
    return bleu.score, hypotheses, seconds


def report(results: list[Result]) -> None:
    print(
        f"\n{'model':<24} {METRIC:>10} {'parameters':>11} {'added':>7} {'training':>10} "
        f"{'translation':>12}"
    )
    for r in results:
        more = r.parameters - results[0].parameters
        seconds = f"{r.train_seconds:>8.0f} s {r.score_seconds:>10.0f} s"
        print(f"{r.arch:<24} {r.score:>10.2f} {r.parameters:>11,} {more:>7,} {seconds}")
    updates = results[0].validation[-1][0]
    print(
        "\nThis shows that everything works. It does not show how good Mixhead is, because it is "
        "one seed after\n"
        f"{updates} updates, and a lead so early in training can disappear. docs/does-it-help.md "
        "has several seeds."
    )


def record(results: list[Result], args: argparse.Namespace, text: Path, folder: Path) -> None:
    """Write results.json, and pictures of the validation perplexity against updates.

    Args:
        results: the results of all models
        args: flags of the demo
        text: the folder of the text in `SPLITS` and `LANGUAGES`
        folder: the folder to write to
    """
    rows = []
    for result in results:
        row = result._asdict()
        del row["hypotheses"]
        rows.append(row)
    settings = {"updates": args.updates, "vocabulary": args.vocabulary, "seed": args.seed}
    files = [text / f"{split}.{language}" for split in SPLITS for language in LANGUAGES]
    settings["data"] = fingerprint(text, files)
    everything = {"metric": METRIC, "flags": " ".join(FLAGS), **settings, "models": rows}
    (folder / "results.json").write_text(json.dumps(everything, indent=2) + "\n")
    figure, panels = figures.subplots(1, 1, (6, 3.5))
    axes = panels[0, 0]
    for result in results:
        colour = MIXED_COLOUR if result.arch.startswith("mixhead") else PLAIN_COLOUR
        updates, perplexities = zip(*result.validation, strict=True)
        axes.plot(
            updates,
            perplexities,
            marker=".",
            color=colour,
            label=f"{result.arch}: {result.score:.2f} {METRIC}",
        )
    axes.set(xlabel="updates", ylabel="validation perplexity", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figures.save(figure, folder, "training")


def compare(args: argparse.Namespace, folder: Path) -> None:
    """Train both models, translate the test set with them, and print and write what came out."""
    if "DATA" in os.environ:
        text = own_parallel_text(Path(os.environ["DATA"]))
        print(f"data: {text}")
    else:
        text = write_corpus(folder / "text")
        print("data: German-English sentences (examples/demo/corpus)")
    subwords(text, folder / "subwords", args.vocabulary)
    data = folder / "binary"
    preprocess(folder / "subwords", data, "--joined-dictionary")
    sources = sentences(text / "test.de")
    references = sentences(text / "test.en")

    def work(arch: str, row: int, threads: int) -> Result:
        save = folder / arch
        parameters, validation, train_seconds = train(arch, data, save, args, row, threads)
        bleu, hypotheses, seconds = translate(data, save, references, threads)
        return Result(arch, parameters, train_seconds, seconds, bleu, validation, hypotheses)

    results = side_by_side(work, ("transformer", "mixhead_transformer"))
    print()
    number = min(SAMPLES, len(references))
    for i in random.Random(args.seed).sample(range(len(references)), number):
        print(f"\nGerman     {sources[i]}\nreference  {references[i]}")
        for result in results:
            name = "Mixhead" if result.arch.startswith("mixhead") else "fairseq"
            print(f"{name:<10} {result.hypotheses[i]}")
    report(results)
    record(results, args, text, folder)


def main() -> None:
    args = read_flags()
    if args.folder is None:
        folder = ROOT / "runs" / "demo" / "translation"
        shutil.rmtree(folder, ignore_errors=True)
    else:
        folder = args.folder.absolute()
    for part in ("text", "subwords"):
        (folder / part).mkdir(parents=True)
    start = time.monotonic()
    compare(args, folder)
    print(
        f"\nin {time.monotonic() - start:.0f} s; results, pictures, checkpoints and logs: "
        f"{os.path.relpath(folder)}"
    )


if __name__ == "__main__":
    main()
