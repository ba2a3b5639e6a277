"""The examples that train a model without mixing and with it: minilm, nanogpt, vit.

By default they train tiny models with random weights. The slow tests run each as its page says.
"""

import hashlib
import json
import re
from argparse import Namespace
from pathlib import Path

import minilm.run
import nanogpt.run
import pytest
import torch
import torch.nn.functional as F
import vit.run
from common import side_by_side
from common.fingerprint import fingerprint
from torch import nn

from mixhead_plugin import hf
from mixhead_plugin.nn import parameter_groups
from tests import reach
from tests.sentence_encoder import save_small_sentence_encoder

RESULTS = Path(__file__).parents[2] / "results" / "examples"


class TinyViT(nn.Module):
    """Calls attention as timm's does."""

    def __init__(self, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(8, 3 * 8)
        self.head = nn.Linear(8, 10)

    def forward(self, images):  # [B, 1, 8, 8]: each row of pixels is a patch
        parts = self.qkv(images[:, 0]).chunk(3, dim=2)
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(query, key, value)
        return self.head(found.transpose(1, 2).flatten(2).mean(1))


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Return a function that runs an example on a tiny model, and returns what it saves."""
    text = tmp_path / "text.txt"
    text.write_text("the dog that barked ran away. " * 400)
    folder = tmp_path / "encoder"
    save_small_sentence_encoder(folder)
    monkeypatch.setattr(vit.run, "vision_transformer", TinyViT)
    monkeypatch.setattr(vit.run, "LIBRARIES", ("scikit-learn",))
    monkeypatch.setattr(minilm.run, "TEST", 20)
    monkeypatch.setattr(minilm.run, "BATCH", 4)
    own = {
        nanogpt: f"--text {text} --layers 1 --width 16 --heads 4",
        vit: "--heads 2",
        minilm: f"{folder} --view {tmp_path / 'heads.html'}",
    }

    def run(example, words):
        threads = torch.get_num_threads()
        file = tmp_path / "saved.json"
        example.run.main([*own[example].split(), "--save", str(file), *words.split()])
        torch.set_num_threads(threads)
        return json.loads(file.read_text())

    return run


EXAMPLES = pytest.mark.parametrize(
    "example", [minilm, nanogpt, vit], ids=["minilm", "nanogpt", "vit"]
)


@EXAMPLES
def test_both_trainings_begin_as_the_same_model(example, call):
    """A learning rate of 0 leaves both as they begin."""
    still = "--steps 1 --lr 0" + (" --mixing-lr 0" if example is minilm else "")
    (row,) = call(example, still)["rows"]
    assert row["position-wise"]["number"] == pytest.approx(row["none"]["number"], abs=1e-5)


def test_the_last_line_has_the_means_over_the_seeds(call, capsys):
    saved = call(nanogpt, "--steps 2 --lr 0.1 --seeds 3-4 --mixing position-independent")
    assert [row["seed"] for row in saved["rows"]] == [3, 4]
    means = []
    for mixing in ("position-independent", "none"):
        numbers = [row[mixing]["number"] for row in saved["rows"]]
        means.append(f"{sum(numbers) / 2:.4f}")
    assert means[0] != means[1]
    last = capsys.readouterr().out.splitlines()[-1]
    both = f"{means[0]} with position-independent, {means[1]} without mixing"
    assert last == f"test loss, nats a letter = {both}"


def test_what_is_saved_outlives_a_disk_that_is_full_for_the_next_seed(tmp_path, monkeypatch):
    file = tmp_path / "saved.json"
    args = Namespace(steps=1)
    side_by_side.save(file, "loss", [{"seed": 1}], args, (), {})
    real = Path.write_text

    def half(path, text):
        real(path, text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        side_by_side.save(file, "loss", [{"seed": 1}, {"seed": 2}], args, (), {})
    assert json.loads(file.read_text())["rows"] == [{"seed": 1}]


def test_what_is_saved_tells_the_text_that_was_read(call, tmp_path):
    digest = hashlib.sha256((tmp_path / "text.txt").read_bytes()).hexdigest()
    saved = call(nanogpt, "--steps 1")["inputs"]
    assert saved == {"text": {"name": "text.txt", "sha256": {"text.txt": digest}}}


def test_what_is_saved_tells_the_files_of_the_model(call, tmp_path):
    config = (tmp_path / "encoder" / "config.json").read_bytes()
    saved = fingerprint(tmp_path / "encoder")
    assert saved["name"] == "encoder"
    assert saved["sha256"]["config.json"] == hashlib.sha256(config).hexdigest()
    assert "model.safetensors" in saved["sha256"]


def test_the_heads_of_the_encoder_are_written_as_a_page(call, tmp_path):
    call(minilm, "--steps 1")
    assert "<html" in (tmp_path / "heads.html").read_text()


WRONG = {
    "nanogpt --steps 0": "nanogpt: error: --steps 0: must be at least 1",
    "nanogpt --heads 7": "nanogpt: error: --heads 7: must divide --width 128",
    "nanogpt --text /nowhere": (
        "nanogpt: error: --text /nowhere: cannot be read (No such file or directory)"
    ),
    "vit --heads 7": "vit: error: --heads 7: must divide 64, the width of the model",
    "vit --steps 0": "vit: error: --steps 0: must be at least 1",
    "minilm /nowhere": (
        "minilm: error: /nowhere: must be a folder with a model of transformers; see --help"
    ),
    "vit --seeds 8-1": (
        "error: argument --seeds: 8-1: must be a range that begins with its smaller number"
    ),
    "vit --seeds 0": "error: argument --seeds: 0: must be at least 1",
    "vit --seeds all": "error: argument --seeds: all: must be a number or a range, such as 1-8",
    "vit --seeds 1-": "error: argument --seeds: 1-: must be a number or a range, such as 1-8",
    f"vit --seeds {2**32}": f"error: argument --seeds: {2**32}: must be less than {2**32}",
    "vit --lr nan": "vit: error: --lr nan: must be from 0 to 1000",
    "minilm /nowhere --mixing-lr -1": "minilm: error: --mixing-lr -1.0: must be from 0 to 1000",
    "vit --save /": "vit: error: --save /: is a folder; must be the name of a file",
    "minilm /nowhere --view /dev/null/heads.html": (
        "minilm: error: --view /dev/null/heads.html: cannot be written to (File exists)"
    ),
    "nanogpt --mixing differential --heads 1": (
        "nanogpt: error: --mixing differential: num_heads 1: must be a multiple of 2 with "
        "differential mixing"
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_meant_is_refused_in_one_line(words, capsys):
    name, *flags = words.split()
    example = {"nanogpt": nanogpt, "vit": vit, "minilm": minilm}[name]
    with pytest.raises(SystemExit):
        example.run.main(flags)
    assert capsys.readouterr().err.splitlines()[-1].endswith(WRONG[words])


def nan_weight(parameters, *args, **options):
    """Return parameters for the optimizer, after a number in them has become NaN."""
    groups = parameter_groups(parameters, *args, **options)
    with torch.no_grad():
        groups[0]["params"][0].view(-1)[0] = torch.nan
    return groups


@EXAMPLES
def test_a_model_that_diverges_gives_no_number(example, call, capsys, monkeypatch):
    owner = hf if example is minilm else example.run
    monkeypatch.setattr(owner, "parameter_groups", nan_weight)
    with pytest.raises(SystemExit):
        call(example, "--steps 1")
    said = capsys.readouterr()
    assert said.err.endswith(" is no finite number; try a lower --lr\n")
    assert said.out == ""


# The command behind each file of results/examples.
SAVED = {
    "minilm": "examples/minilm/run.py",
    "nanogpt_8_heads": "examples/nanogpt/run.py",
    "nanogpt_32_heads": "examples/nanogpt/run.py --heads 32",
    "vit": "examples/vit/run.py",
}


def test_every_file_of_results_is_known():
    assert {file.stem for file in RESULTS.glob("*.json")} == set(SAVED)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_in_full_it_gives_the_numbers_of_results(name, tmp_path):
    reach.installed()
    program, *words = SAVED[name].split()
    if program == "examples/minilm/run.py":
        words = [str(reach.extract_minilm(tmp_path)), *words]
    printed = (reach.run_with_models if name == "vit" else reach.run)(program, *words)

    saved = json.loads((RESULTS / f"{name}.json").read_text())
    first = next(row for row in saved["rows"] if row["seed"] == 1)
    last = re.search(r"= (\S+) with position-wise, (\S+) without mixing\n$", printed)
    # Another machine rounds otherwise, and training enlarges that.
    assert float(last[1]) == pytest.approx(first["position-wise"]["number"], rel=0.05)
    assert float(last[2]) == pytest.approx(first["none"]["number"], rel=0.05)
