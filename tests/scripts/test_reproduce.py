"""The papers' tables made again: runs, their JSON, statistics, verdicts and the report; with scripts for fairseq."""

import importlib.util
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "reproduce.py"
spec = importlib.util.spec_from_file_location("reproduce", SCRIPT)
reproduce = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reproduce)
import sweep  # noqa: E402 (found where the script looks)
from reproduction import costs, logs, provenance, report, results, samples, tables  # noqa: E402

# It logs as fairseq does; the metric comes from its flags, of which the last --head-mixing and --seed count.
TRAIN = """#!/usr/bin/env bash
if [[ ${DRY_RUN:-} ]]; then
    echo fairseq-train "$(dirname "$0")" --tokens-per-sample 8 --max-tokens 40 --update-freq 2 --max-update 30 \
        --arch toy "$@"
    exit
fi
[[ $* != *--fail* ]] || { echo "train: error: as it was told" >&2; exit 3; }
mkdir -p "$SAVE"
touch "$SAVE/checkpoint_best.pt"
echo "$*" > "$SAVE/flags"
echo "train $*" >> "$(dirname "$0")/calls"
log="2026-01-01 00:00:00 | INFO |"
echo "$log fairseq_cli.train | num. shared model params: 1,234,567 (num. trained: 1,234,567)"
for update in 10 20 30; do
    echo "$log train_inner | epoch 001:     $update / 30 loss=7.5, ppl=181.0, wps=100, ups=2.5, wpb=40, bsz=4, \
num_updates=$update, lr=0.1, gnorm=1.5, train_wall=4, wall=9"
done
echo "$log train | epoch 001 | loss 7.5 | ppl 181.0 | num_updates 30 | lr 0.1 | train_wall 12 | wall 12"
echo "$log valid | epoch 001 | valid on 'valid' subset | loss 8.25 | ppl 304.4 | num_updates 30"
"""
EVALUATE = """#!/usr/bin/env bash
if [[ ${DRY_RUN:-} ]]; then
    echo fairseq-generate data --path "$SAVE/checkpoint_best.pt" --beam 5 --remove-bpe "$@"
    exit
fi
echo "evaluate $*" >> "$(dirname "$0")/calls"
read -r flags < "$SAVE/flags"
value=100
[[ $flags != *position-independent* ]] || value=90
[[ $flags != *average* ]] || value=120
seed=${flags##*--seed }
seed=${seed%% *}
[[ $* != *--gen-subset\\ valid* ]] || value=$((value + 5))
echo "perplexity = $value.$((seed * seed))"
"""
FULL = """# The paper's rows.
title = "A toy (Mixhead table 7)"
example = "toy"
[metrics]
valid = "--gen-subset valid"
test = ""
[axes.attention]
softmax = "--head-mixing none"
A = "--head-mixing position-independent"
average = "--head-mixing average"
B = "--head-mixing position-wise"
[published]
softmax = "21.82/20.89"
A = "21.20/20.48"
B = "21.10/20.18"
average = "22.50/21.57"
"""
SMALL = (
    FULL.partition("[published]")[0]
    .replace("The paper's rows.", "Made small\n# for a test.")
    .replace('B = "--head-mixing position-wise"\n', "")
)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A folder of recipes with one table; what calls() has been trained and evaluated."""
    for name in (*sweep.TRAINING, *sweep.EVALUATION, *sweep.OWN, "DRY_RUN", "GPUS"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "examples"
    (folder / "toy").mkdir(parents=True)
    (folder / "grids" / "small").mkdir(parents=True)
    for name, text in (("train.sh", TRAIN), ("evaluate.sh", EVALUATE)):
        (folder / "toy" / name).write_text(text)
        (folder / "toy" / name).chmod(0o755)
    (folder / "grids" / "mixhead_table_7.toml").write_text(FULL)
    (folder / "grids" / "small" / "mixhead_table_7.toml").write_text(SMALL)
    monkeypatch.setattr(sweep, "EXAMPLES", folder)
    monkeypatch.setitem(tables.MEASURES, "toy", tables.PERPLEXITY)
    monkeypatch.setattr(provenance, "about", lambda: {"cpu": "a CPU", "versions": {"python": "3"}})
    monkeypatch.setattr(provenance, "commit", lambda: None)
    monkeypatch.setattr(reproduce, "draw", lambda *arguments, **options: None)
    return tmp_path


@pytest.fixture
def command(toy, capsys):
    """Runs `reproduce.py ...` and returns its status, what it printed and what it said of errors."""

    def command(*words):
        arguments = [*words, "--out", str(toy / "runs"), "--results", str(toy / "results")]
        try:
            status = reproduce.main(arguments)
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()

    return command


def calls(toy):
    path = toy / "examples" / "toy" / "calls"
    found = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def content(toy, scale="small"):
    return json.loads((toy / "results" / "table7.json").read_text())["scales"][scale]


# ---- running ---------------------------------------------------------------------------------------------------------


def test_every_row_is_trained_with_every_seed_and_kept(command, toy):
    status, printed, _ = command("run", "table7", "--scale", "small", "--seeds", "2")
    assert status == 0 and "; about " in printed and " left\n" in printed
    trained = [call for call in calls(toy) if call.startswith("train")]
    assert trained == [
        f"train --seed {seed} --head-mixing {mixing}"
        for seed in (1, 2)
        for mixing in ("none", "position-independent", "average")
    ]
    part = content(toy)
    assert part["recipe"] == {"example": "toy", "updates": 30, "tokens_per_update": 80, "tokens_per_sample": 8}
    assert part["about"] == "Made small for a test." and part["axes"] == {"attention": ["softmax", "A", "average"]}
    assert [(run["labels"], run["seed"]) for run in part["runs"]] == [
        ([label], seed) for label in ("softmax", "A", "average") for seed in (1, 2)
    ]
    run = part["runs"][3]
    assert run["values"] == {"valid": 95.4, "test": 90.4}
    assert run["train"] == {"--head-mixing": ["position-independent"], "--seed": ["2"]}
    assert (run["updates"], run["parameters"], run["seconds_per_update"]) == (30, 1_234_567, 0.4)
    assert (run["train_loss"], run["valid_loss"], run["device"]) == (7.5, 8.25, "a CPU")
    assert 0 <= run["wall_seconds"] < 60 and 0 < run["peak_memory_mib"] < 2000
    assert json.loads((toy / "results" / "table7.json").read_text())["published"]["A"] == "21.20/20.48"

    status, printed, _ = command("run", "table7", "--scale", "small", "--seeds", "2")
    assert status == 0 and calls(toy) == [] and "6 runs, 6 of them done before" in printed


def test_what_is_missing_is_added_and_what_is_committed_is_not_repeated(command, toy):
    command("run", "table7", "--scale", "small", "--seeds", "1", "--only", "softmax")
    assert len(calls(toy)) == 3
    (toy / "runs").rename(toy / "lost")
    status, printed, _ = command("run", "table7", "--scale", "small", "--seeds", "1", "--only", "softmax,A")
    assert status == 0 and "1 runs are in " in printed
    assert [call for call in calls(toy) if "train" in call] == ["train --seed 1 --head-mixing position-independent"]
    assert [run["labels"] for run in content(toy)["runs"]] == [["softmax"], ["A"]]
    command("run", "table7", "--scale", "small", "--seeds", "1", "--only", "softmax,A", "--again")
    assert [call for call in calls(toy) if "train" in call] == ["train --seed 1 --head-mixing none"]


def test_a_run_of_another_table_is_not_repeated(command, toy):
    command("run", "table7", "--scale", "small", "--seeds", "2", "--only", "softmax,A")
    grids = toy / "examples" / "grids"
    for text, path in ((FULL, "mixhead_table_8.toml"), (SMALL, "small/mixhead_table_8.toml")):
        (grids / path).write_text(text.replace("softmax =", '"8" =').replace("B =", "b ="))
    calls(toy)
    status, printed, _ = command("run", "table8", "--scale", "small", "--seeds", "2", "--only", "8,average")
    assert status == 0 and printed.startswith("2 runs are of the same flags as some of other tables")
    assert {call for call in calls(toy) if "train" in call} == {
        f"train --seed {seed} --head-mixing average" for seed in (1, 2)
    }
    ours, others = (json.loads((toy / "results" / f"table{n}.json").read_text())["scales"]["small"] for n in (8, 7))
    assert [(run["labels"], run["seed"]) for run in ours["runs"]] == [
        ([label], seed) for label in ("8", "average") for seed in (1, 2)
    ]
    assert [run["values"] for run in ours["runs"][:2]] == [run["values"] for run in others["runs"][:2]]
    command("run", "table8", "--scale", "small", "--seeds", "1", "--only", "8", "--again")
    assert [call for call in calls(toy) if "train" in call] == ["train --seed 1 --head-mixing none"]


def test_other_flags_are_another_run(command, toy):
    command("run", "table7", "--scale", "small", "--seeds", "1", "--only", "softmax")
    grid = toy / "examples" / "grids" / "small" / "mixhead_table_7.toml"
    grid.write_text(grid.read_text().replace("--head-mixing none", "--head-mixing none --lr 2"))
    calls(toy)
    command("run", "table7", "--scale", "small", "--seeds", "1", "--only", "softmax")
    assert len(calls(toy)) == 3
    (run,) = content(toy)["runs"]
    assert run["train"]["--lr"] == ["2"]
    grid.write_text(grid.read_text().replace("--lr 2", "--lr 3"))
    _, _, errors = command("run", "table7", "--scale", "small", "--seeds", "1", "--only", "A")
    assert (
        errors
        == "reproduce: table7, small: 1 runs of other flags than mixhead_table_7.toml has now leave the results\n"
    )
    assert [run["labels"] for run in content(toy)["runs"]] == [["A"]]


def test_a_new_metric_is_evaluated_without_training(command, toy):
    command("run", "table7", "--scale", "small", "--seeds", "1", "--only", "A")
    grid = toy / "examples" / "grids" / "small" / "mixhead_table_7.toml"
    grid.write_text(
        grid.read_text().replace('test = ""', 'test = ""\n"test unmixed" = "--results-path {save}/un {root}"')
    )
    calls(toy)
    command("run", "table7", "--scale", "small", "--seeds", "1", "--only", "A")
    (call,) = calls(toy)
    _, path, root = call.rpartition("--results-path ")[2].split()[-1:][0], *call.split()[-2:]
    assert path.endswith("/checkpoints/un") and root == str(sweep.ROOT)
    (run,) = content(toy)["runs"]
    assert run["values"].keys() == {"valid", "test", "test unmixed"}
    assert str(toy) not in json.dumps(run) and str(ROOT) not in json.dumps(run)


def test_no_path_of_a_machine_is_kept(command, toy, monkeypatch):
    monkeypatch.setenv("DATA", str(toy / "text"))
    command("run", "table7", "--scale", "small", "--seeds", "1", "--only", "A")
    assert str(toy) not in json.dumps(content(toy))
    monkeypatch.delenv("DATA")
    calls(toy)
    _, printed, _ = command("run", "table7", "--scale", "small", "--seeds", "1", "--only", "A")
    assert calls(toy) == [] and "1 runs are in " in printed


def test_a_run_that_fails_leaves_the_others(command, toy):
    grid = toy / "examples" / "grids" / "small" / "mixhead_table_7.toml"
    grid.write_text(grid.read_text().replace("--head-mixing average", "--head-mixing average --fail"))
    status, _, errors = command("run", "table7", "--scale", "small", "--seeds", "1")
    assert status == 1 and errors.count("\n") == 1
    assert errors.startswith(
        "reproduce: failed: 1_average: train.sh ended with status 3 (train: error: as it was told)"
    )
    assert [run["labels"] for run in content(toy)["runs"]] == [["softmax"], ["A"]]


def test_interrupted_it_keeps_what_is_done_and_goes_on(command, toy):
    script = toy / "examples" / "toy" / "train.sh"
    once = 'if [[ $* == *average* ]] && mkdir "$(dirname "$0")/once"; then kill -INT $PPID; sleep 30; fi'
    script.write_text(TRAIN.replace("mkdir -p", f"{once}\nmkdir -p"))
    status, _, errors = command("run", "table7", "--scale", "small", "--seeds", "1")
    assert (status, errors) == (130, "reproduce: interrupted; the same command goes on from here\n")
    assert [run["labels"] for run in content(toy)["runs"]] == [["softmax"], ["A"]]
    calls(toy)
    status, printed, _ = command("run", "table7", "--scale", "small", "--seeds", "1")
    assert status == 0 and "3 runs, 2 of them done before" in printed
    assert [call for call in calls(toy) if "train" in call] == ["train --seed 1 --head-mixing average"]
    assert content(toy)["runs"][2]["wall_seconds"] > 0


def test_tiny_is_small_with_a_few_updates_and_is_not_among_the_results(command, toy, capsys):
    assert reproduce.main(["run", "table7", "--scale", "tiny", "--seeds", "1", "--out", str(toy / "runs")]) == 0
    assert calls(toy)[0] == f"train --seed 1 --head-mixing none {tables.TINY}"
    assert (toy / "runs" / "results" / "table7.json").exists() and not (toy / "results").exists()


def test_costs_are_measured_in_turn(command, toy):
    status, printed, _ = command("cost", "table7", "--scale", "small", "--rounds", "2", "--updates", "12")
    assert status == 0 and "A: 0.400 s/update (1.00 of softmax)" in printed
    flags = "--max-update 12 --log-interval 2 --disable-validation --no-save"
    assert calls(toy) == [
        f"train --seed {seed} --head-mixing {mixing} {flags}"
        for seed, order in (
            (1, ("none", "position-independent", "average")),
            (2, ("position-independent", "average", "none")),
        )
        for mixing in order
    ]
    cost = content(toy)["cost"]
    assert (cost["rounds"], cost["updates"], cost["device"]) == (2, 12, "a CPU")
    assert cost["threads"] == int(os.environ.get("OMP_NUM_THREADS", sweep.CORES)) and "gpus" not in cost
    assert [row["labels"] for row in cost["rows"]] == [["softmax"], ["A"], ["average"]]


def test_ratios_are_of_the_same_round():
    rows = costs.summary(
        {("softmax",): [1.0, 2.0, 10.0], ("B",): [1.5, 2.8, 16.0], ("other",): [3.0, 3.0, 3.0]},
        {("softmax",): [100, 110, 100], ("B",): [150, 220, 130], ("other",): [1, 1, 1]},
        {("softmax",): ("softmax",), ("B",): ("softmax",), ("other",): None},
    )
    assert rows[1] == {
        "labels": ["B"],
        "seconds_per_update": 2.8,
        "rounds": [1.5, 2.8, 16.0],
        "peak_memory_mib": 150,
        "time_ratios": [1.5, 1.4, 1.6],
        "memory_ratios": [1.5, 2.0, 1.3],
    }
    assert rows[0]["time_ratios"] == [1, 1, 1] and "time_ratios" not in rows[2]


@pytest.mark.parametrize(
    "words, message",
    [
        (["run", "table99"], "table99: must be one of table7"),
        (["run", "table7", "--scale", "huge"], "argument --scale: invalid choice: 'huge'"),
        (["run", "table7", "--seeds", "0"], "argument --seeds: 0: must be a number, at least 1"),
        (["run", "table7", "--jobs", "x"], "argument --jobs: x: must be a number, at least 1"),
        (["run", "table7", "--only", ""], "--only : '' is no label; labels are softmax; A; average; B"),
        (["run", "table7", "--only", "A,"], "--only A,: '' is no label"),
        (["run", "table7", "--only", "A,C"], "--only A,C: 'C' is no label; labels are softmax; A; average; B"),
        (["cost", "table7", "--rounds", "-1"], "argument --rounds: -1: must be a number"),
        (["spectrum", "table7"], "runs/table7-full: has no trained run"),
        (["report"], "results: has no results; "),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(words, message, command, toy):
    status, printed, errors = command(*words) if words else reproduce_alone()
    assert (status, printed) == (2, "") and errors.count("\n") == 1
    assert errors.startswith("reproduce: error: ") and message in errors
    assert calls(toy) == []


def reproduce_alone():
    import contextlib
    import io

    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as ended:
        reproduce.main([])
    return ended.value.code, "", errors.getvalue()


def test_a_scale_without_a_grid_is_refused(command, toy):
    (toy / "examples" / "grids" / "small" / "mixhead_table_7.toml").unlink()
    for scale in ("small", "tiny"):
        status, _, errors = command("run", "table7", "--scale", scale)
        assert status == 2 and f"--scale {scale}: table7 has full alone: " in errors and errors.count("\n") == 1


def test_a_row_that_the_paper_does_not_have_is_refused(command, toy):
    grid = toy / "examples" / "grids" / "small" / "mixhead_table_7.toml"
    grid.write_text(grid.read_text().replace("A = ", '"A, new" = '))
    status, _, errors = command("run", "table7", "--scale", "small")
    assert status == 2 and "A, new: is no row of mixhead_table_7.toml" in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"table": "table8", "scales": {}}', '{"table": "table7", "scales": {"small": {}}}',
     '{"table": "table7", "scales": {"small": {"runs": [{}]}}}'],
)  # fmt: skip
@pytest.mark.parametrize("words", [["run", "table7", "--scale", "small"], ["report"], ["list"]])
def test_a_broken_file_of_results_is_never_written_over(text, words, command, toy):
    (toy / "results").mkdir()
    (toy / "results" / "table7.json").write_text(text)
    status, _, errors = command(*words)
    assert status == 2 and errors.count("\n") == 1 and f"{toy}/results/table7.json: " in errors
    assert (toy / "results" / "table7.json").read_text() == text and calls(toy) == []


def test_labels_may_have_commas():
    labels = {"d 512, h 8", "d 512, h 8, d_k 32", "B"}
    assert tables.parts("d 512, h 8, d_k 32,B", labels) == ["d 512, h 8, d_k 32", "B"]
    assert tables.parts("B,d 512, h 8", labels) == ["B", "d 512, h 8"]


# ---- logs ------------------------------------------------------------------------------------------------------------

LOG = """\
2026-01-01 00:00:00 | INFO | fairseq.utils | rank   0: capabilities =  9.0  ; total memory = 80.000 GB ; name = A GPU
2026-01-01 00:00:00 | INFO | fairseq_cli.train | num. shared model params: 2,048 (num. trained: 2,048)
2026-01-01 00:00:00 | INFO | train_inner | {"epoch": 1, "loss": "9", "ups": "0.02", "num_updates": "5", \
"train_wall": "90", "gb_free": "70.5"}
2026-01-01 00:00:00 | INFO | train_inner | {"epoch": 1, "loss": "8", "ups": "0.33", "num_updates": "10", \
"train_wall": "15", "gb_free": "69.5"}
2026-01-01 00:00:00 | INFO | valid | {"epoch": 1, "valid_nll_loss": "7.25", "valid_num_updates": "10"}
2026-01-01 00:00:00 | INFO | train | {"epoch": 1, "train_nll_loss": "7.5", "train_num_updates": "10"}
2026-01-01 00:00:00 | INFO | train_inner | {"epoch": 2, "loss"
"""


def test_a_log_says_sizes_speed_losses_and_memory(tmp_path):
    (tmp_path / "train.log").write_text(LOG)
    assert logs.read(tmp_path / "train.log") == logs.Log(10, 2048, 3.0, 7.5, 7.25, "A GPU", 10.5 * 1024)
    assert logs.read(tmp_path / "none") == logs.Log(*[None] * 7)


@pytest.mark.parametrize("form", ["simple", "json"])
@pytest.mark.parametrize("names", [["valid"], ["test"], ["valid", "valid1"], ["test-b", "valid"]])
def test_the_validation_loss_is_of_the_first_set_whatever_its_name(names, form, tmp_path):
    def line(name, loss, updates):
        start = f"2026-01-01 00:00:00 | INFO | {name} | "
        if form == "json":
            return f'{start}{{"epoch": 1, "{name}_loss": "{loss}", "{name}_num_updates": "{updates}"}}\n'
        return f"{start}epoch 001 | valid on '{name}' subset | loss {loss} | ppl 2 | num_updates {updates}\n"

    noise = '2026-01-01 00:00:00 | INFO | fairseq_cli.train | begin validation on "valid" subset\n'
    noise += "2026-01-01 00:00:00 | INFO | numexpr | loss 3, num_updates 7\n"
    lines = [line(name, loss + i, updates) for updates, loss in ((10, 9), (20, 7)) for i, name in enumerate(names)]
    (tmp_path / "train.log").write_text(noise.join(lines))
    found = logs.read(tmp_path / "train.log")
    assert (found.valid_loss, found.updates) == (7, 20)


# ---- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 10, 31])
@pytest.mark.parametrize("t", [0.0, 0.3, -1.7, 4.303, 25.0])
def test_the_t_distribution_is_scipys(t, degrees):
    stats = pytest.importorskip("scipy.stats")
    assert samples.two_sided(t, degrees) == pytest.approx(2 * stats.t.sf(abs(t), degrees), abs=1e-12)


def test_a_sample_is_by_hand():
    found = samples.sample([1.0, 2.0, 3.0])
    assert (found.n, found.mean, found.deviation) == (3, 2, 1)
    assert math.isnan(samples.sample([1.0]).p) and math.isnan(samples.sample([1.0]).margin)
    assert (samples.sample([2.0, 2.0]).p, samples.sample([0.0, 0.0]).p) == (0, 1)
    assert samples.slope([(0, 1.0), (1, 3.0), (2, 5.0)]) == pytest.approx(2)


# ---- the report ------------------------------------------------------------------------------------------------------


def test_the_report_sets_ours_beside_the_papers(command, toy):
    command("run", "table7", "--scale", "small")
    command("cost", "table7", "--scale", "small", "--rounds", "1")
    status, _, _ = command("report")
    text = (toy / "results" / "README.md").read_text()
    assert status == 0
    heads = "paper's gain, % | our gain, % (test) | s/update | peak MiB |"
    assert f"| attention | paper (valid/test) | ours: valid | ours: test | {heads}" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| A | 21.20/20.48 |"))
    assert row.startswith("| A | 21.20/20.48 | 95.47 ± 0.40 (3) | 90.47 ± 0.40 (3) | +1.98 | +10.48 [")
    time, memory = row.removesuffix(" |").split(" | ")[6:]
    assert time == "0.4 (1.00)" and re.fullmatch(r"\d+ \(\d\.\d\d\)", memory)
    assert "Made small for a test." in text and "1.23 million parameters" in text
    assert "| Mixhead A beats softmax | all tables | holds here (p " in text
    assert "| Average mixing hurts | table 7 | holds here (p " in text
    assert "| B beats A | tables 1, 2, 3, 7 | not testable at this size: not run here |" in text
    assert str(toy) not in text
    (toy / "runs").rename(toy / "lost")  # from the JSON alone
    command("report")
    assert (toy / "results" / "README.md").read_text() == text


def test_the_committed_report_is_what_the_numbers_render():
    folder = ROOT / "results"
    if not folder.exists():
        pytest.skip("no results are committed")
    studies = results.studies(folder)
    assert (folder / "README.md").read_text() == report.render(studies)
    drawn = re.findall(r"\]\((\w+\.svg)\)", (folder / "README.md").read_text())
    assert {name.split(".")[0].removesuffix("_spectrum") for name in drawn} == {study.table for study in studies}
    for name in drawn:
        of_table = [study for study in studies if study.table == name.split(".")[0].removesuffix("_spectrum")]
        assert results.mark(of_table) in (folder / name).read_text(encoding="utf-8"), f"{name}: reproduce.py report"
        assert (folder / name).with_suffix(".png").exists()
    assert not {path.suffix for path in folder.iterdir()} - {".md", ".json", ".svg", ".png"}


# ---- the list --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def listed():
    from reproduction import listing

    nowhere = Path("nowhere")
    return [listing.of_table(table, nowhere, nowhere) for table in tables.tables().values()], listing


def test_the_list_has_every_row_with_its_number_and_a_command(listed):
    content, listing = listed
    by_table = {table["table"]: {"/".join(row["labels"]): row for row in table["rows"]} for table in content}
    assert list(by_table)[:10] == [f"table{n}" for n in range(1, 11)]
    for path in (sweep.EXAMPLES / "grids").glob("*.toml"):
        grid = sweep.read_grid(path)
        if not grid.published:
            continue
        (table,) = (table for table in tables.tables().values() if table.file == path.name)
        for label, number in grid.published.items():
            assert by_table[table.name][label]["published"] == number
    assert by_table["table5"]["RTE/B/2e-5"]["published"] == "68.4"
    text = listing.text(content)
    assert max(map(len, text.splitlines())) <= 120
    for table in content:
        for row in table["rows"]:
            assert row["estimate"]["gpu_hours"] > 0, (table["table"], row)
            assert row["command"].removeprefix("scripts/reproduce.py ") in text


def test_a_command_of_the_list_is_of_its_row_alone(listed):
    import shlex

    for table in listed[0]:
        for row in table["rows"]:
            words = shlex.split(row["command"])
            args = reproduce.parser().parse_args(words[1:])
            grid = tables.table(args.table).grid("full")
            assert tables.chosen(grid, args.only) == [tuple(row["labels"])]


def test_estimates_know_the_papers_sizes(listed):
    """Millions of parameters, as the papers print them."""
    content, _ = listed
    found = {
        f"{t['table']} {'/'.join(r['labels'])}": r["estimate"]["parameters"] / 1e6 for t in content for r in t["rows"]
    }
    papers = {
        "table1 vanilla/B": 156, "table1 baevski/B": 247, "table1 transformer-xl/B": 151, "table1 synthesizer/B": 248,
        "table2 vanilla/B": 67, "table2 transformer-xl/B": 40, "table3 baevski/B": 330, "table3 transformer-xl/B": 294,
        "table10 256/softmax": 314, "table10 512/softmax": 448,
        "low_rank_tables_mnli d 1024, h 8": 336, "low_rank_tables_mnli d 512, h 32": 319,
        "low_rank_tables_mnli d 512, h 8, d_k 64": 142, "low_rank_tables_mnli d 768, h 20": 327,
    }  # fmt: skip
    for row, millions in papers.items():
        assert found[row] == pytest.approx(millions, rel=0.025), row


def test_an_estimate_follows_the_recipes_flags(listed):
    content, _ = listed
    (row,) = (
        row
        for table in content
        for row in table["rows"]
        if row["labels"] == ["baevski", "B"] and "table1" in row["command"]
    )
    estimate = row["estimate"]
    assert (estimate["tokens_per_update"], estimate["updates"]) == (8 * 4608, 286_000)
    assert 5 < estimate["gpu_hours"] < 100


# ---- with fairseq ----------------------------------------------------------------------------------------------------

LANGUAGE = """# Generated text.
title = "Generated text"
example = "wikitext2"
train = '''--arch mixhead_transformer_lm --tokens-per-sample 16 --decoder-embed-dim 16 --decoder-input-dim 16
    --decoder-output-dim 16 --decoder-ffn-embed-dim 16 --decoder-layers 1 --decoder-attention-heads 4 --max-tokens 64
    --update-freq 1 --no-epoch-checkpoints'''
evaluate = "--tokens-per-sample 16 --context-window 0"
[metrics]
valid = "--gen-subset valid"
test = "--gen-subset test"
[axes.attention]
softmax = "--head-mixing none"
B = "--head-mixing position-wise"
"""
TRANSLATION = """# Generated sentences.
title = "Generated sentences"
example = "multi30k_de_en"
train = '''--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --max-tokens 200
    --no-epoch-checkpoints --attention-scope self'''
[metrics]
test = "--beam 1 --max-len-a 0 --max-len-b 4"
"test unmixed" = '''--beam 1 --max-len-a 0 --max-len-b 4 --task unmixed_translation
    --user-dir {root}/scripts/reproduction/unmixed_decoding --results-path {save}/unmixed.translations'''
[axes.heads]
4 = "--encoder-attention-heads 4 --decoder-attention-heads 4"
[axes.attention]
softmax = "--head-mixing none --attention-normalizer sigsoftmax"
B = "--head-mixing position-wise"
"""


@pytest.mark.slow
@pytest.mark.parametrize("name, grid", [("table7", LANGUAGE), ("table4", TRANSLATION)])
def test_the_whole_way_with_fairseq(name, grid, text_data, translation_data, corpus, tmp_path, monkeypatch, capfd):
    """Trained, evaluated, timed, looked into and reported at the scale `tiny`."""
    file = tmp_path / f"mixhead_table_{name[-1]}.toml"
    file.write_text(grid)
    path = tables.Table.path
    monkeypatch.setattr(tables.Table, "path", lambda self, s: path(self, s) if s == "full" else file)
    data = tmp_path / "data"
    shutil.copytree(text_data, data / "lines")
    shutil.copytree(translation_data, data / "binary")
    (data / "binary" / "reference").mkdir()
    for split in ("valid", "test"):
        shutil.copy(corpus / f"{split}.en", data / "binary" / "reference" / f"{split}.raw.en")
    for variable in ("AVERAGE", "BREAKS", "CHECKPOINT", "DRY_RUN", "MODEL", "PRECISION", "SAVE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("DATA", str(data))
    monkeypatch.setenv("GPUS", "0")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    where = ["--out", str(tmp_path / "runs")]
    scale = [name, "--scale", "tiny", *where]
    assert reproduce.main(["run", *scale, "--seeds", "1"]) == 0, capfd.readouterr()
    assert reproduce.main(["cost", *scale, "--rounds", "1", "--updates", "12"]) == 0, capfd.readouterr()
    assert reproduce.main(["spectrum", *scale, "--seeds", "1"]) == 0, capfd.readouterr()
    folder = tmp_path / "runs" / "results"
    assert reproduce.main(["report", "--results", str(folder), *where]) == 0, capfd.readouterr()

    part = json.loads((folder / f"{name}.json").read_text())["scales"]["tiny"]
    assert [run["labels"][-1] for run in part["runs"]] == ["softmax", "B"]
    for run in part["runs"]:
        assert run["updates"] == 6 and run["parameters"] > 1000 and run["seconds_per_update"] > 0
        assert run["train_loss"] > 1 and run["valid_loss"] > 1
        assert 100 < run["peak_memory_mib"] < 8000 and 0 < run["wall_seconds"] < 600
        assert run["versions"].keys() >= {"python", "torch", "mixhead_plugin"} and run["commit"]
        assert run["spectrum"]["places"] and all(
            p["mean_effective_rank"] > 0 for p in run["spectrum"]["places"].values()
        )
        assert str(tmp_path) not in json.dumps(run) and str(ROOT) not in json.dumps(run)
    assert all(row["seconds_per_update"] > 0 and row["peak_memory_mib"] > 100 for row in part["cost"]["rows"])
    assert part["recipe"]["updates"] == 6
    if name == "table4":
        for found in (tmp_path / "runs" / "table4-tiny").glob("*/checkpoints"):
            assert (found / "unmixed.translations" / "test.en").exists()
            assert (found / "checkpoint_best.translations" / "test.en").exists()
    made = {path.name for path in folder.iterdir()}
    figures = {f"{name}{what}.{kind}" for what in ("", "_spectrum") for kind in ("svg", "png")}
    assert made == {"README.md", f"{name}.json", *figures}
