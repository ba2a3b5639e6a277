"""Measure how far the mixing matrices of language models are from orthogonal, on validation text.

    PYTHONPATH=examples .venv/bin/python -m wikitext2.orthogonality DATA CHECKPOINT...

Print for each checkpoint the mean of ||M^T M - I||_F^2 over its attentions and all positions. An
attention that mixes features has more such matrices, and their distances are added.
"""

import argparse
from pathlib import Path

import torch
from common.errors import failing
from fairseq import checkpoint_utils
from tqdm import tqdm

import mixhead_plugin
from mixhead_plugin.fairseq.criterions.penalties import RegularizedPass, count_attentions

mixhead_plugin.register()

fail = failing("orthogonality")


def distance(checkpoint: Path, data: Path) -> float:
    """Return the mean of ||M^T M - I||_F^2 over the attentions and positions of one model."""
    overrides = {"data": str(data), "batch_size": 16, "max_tokens": None}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides=overrides
    )
    model.eval()
    attentions = count_attentions(model, ["orthogonal"])["orthogonal"]
    if attentions == 0:
        fail(f"{checkpoint}: has no trained mixing of heads or features")
    task.load_dataset("valid")
    epochs = task.get_batch_iterator(task.dataset("valid"), max_sentences=16)
    batches = epochs.next_epoch_itr(shuffle=False)
    total = 0.0
    positions = 0
    for sample in tqdm(batches, desc=checkpoint.parent.name, leave=False, disable=None):
        tokens = sample["net_input"]["src_tokens"]
        real = tokens.ne(task.source_dictionary.pad())
        with (
            torch.no_grad(),
            RegularizedPass(model, {"orthogonal": 1.0}, {"decoder": real}) as regularized,
        ):
            model(**sample["net_input"])
        number = int(real.sum())
        total += float(regularized.values["orthogonal"]) / attentions * number
        positions += number
    return total / positions


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "data", type=Path, help="a folder of prepare.sh, such as data/wikitext2/lines"
    )
    parser.add_argument("checkpoints", type=Path, nargs="+")
    arguments = parser.parse_args()
    if not (arguments.data / "dict.txt").is_file():
        fail(f"{arguments.data}: has no dict.txt; must be a folder of prepare.sh")
    for checkpoint in arguments.checkpoints:
        if not checkpoint.is_file():
            fail(f"{checkpoint}: no such file")
        print(f"{checkpoint}\t{distance(checkpoint, arguments.data):.6f}", flush=True)


if __name__ == "__main__":
    main()
