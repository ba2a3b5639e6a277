"""Flags of tiny trainings, one for each criterion of fairseq and of examples/bert."""

from tests import squad
from tests.commands import LM_SIZES, ROBERTA_SIZES, SIZES, as_flags

LM = [
    "--task=language_modeling",
    "--arch=mixhead_transformer_lm",
    "--tokens-per-sample=16",
    "--batch-size=4",
    "--max-target-positions=32",
    *LM_SIZES,
]
TRANSLATION = [
    "--arch=mixhead_transformer",
    *SIZES,
    "--label-smoothing=0.1",
    "--batch-size=16",
]
ROBERTA = [
    "--arch=mixhead_roberta_base",
    "--pooler-dropout=0",
    "--max-positions=64",
    *ROBERTA_SIZES,
]
WORDS = ["--task=masked_lm", "--tokens-per-sample=16", "--batch-size=5"]
SENTENCES = [
    "--task=sentence_prediction",
    "--num-classes=2",
    "--init-token=0",
    "--separator-token=2",
    "--batch-size=16",
]
# By criterion a fixture and flags. The batches are no multiple of 2: a worker idles in the last
# update of an epoch.
TASKS = {
    "cross_entropy": ("text_data", LM),
    "label_smoothed_cross_entropy": ("translation_data", TRANSLATION),
    "adaptive_loss": ("text_data", [*LM, "--adaptive-softmax-cutoff", "5,10"]),
    "masked_lm": ("text_data", [*WORDS, *ROBERTA]),
    "sentence_prediction": ("labelled_data", [*SENTENCES, *ROBERTA]),
}

# The same for the criterions of examples/bert, which need `--user-dir examples/bert`.
BERT = ["--arch=mixhead_bert_base", "--pooler-dropout=0", *ROBERTA_SIZES]
PAIRS = ["--task=bert_pretraining", "--tokens-per-sample=24", "--max-positions=64"]
QUESTIONS = ["--task=squad", *as_flags(squad.WINDOWS)]
BERT_TASKS = {
    "bert_pretraining": ("documents", [*PAIRS, *BERT, "--batch-size=16"]),
    "squad": ("questions", [*QUESTIONS, *BERT, "--batch-size=7"]),
}
