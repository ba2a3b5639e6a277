"""What there is to run, and what it costs: speeds read from logs, costs in turn, grids of all scales, the list."""

import argparse
import fcntl
import importlib
import json
import os
import random
import re
import shlex
import sys
from pathlib import Path

import pytest
import recipes
import torch
import torch.nn.functional as F
from test_reproduce import ROOT, TRAIN, calls, command, content, reproduce, toy  # noqa: F401 (two are fixtures)

import sweep  # isort: skip (found where scripts/reproduce.py looks)
from reproduction import costs, estimates, identity, listing, logs, tables  # isort: skip
from reproduction.others import OTHERS  # isort: skip

TABLES = tables.tables()

# ---- the speed of a training, from its log ---------------------------------------------------------------------------


def lines_of(times, words, kind, left_out=()):
    """A log of intervals of as many updates as `times` says, as fairseq rounds it, and the median of their means."""
    text, updates, wall, means = "", 0, 0.0, []
    for of_interval in times:
        updates += len(of_interval)
        wall += sum(of_interval)
        seconds = sum(of_interval) / len(of_interval)
        values = {
            "loss": "7.5",
            "wps": f"{round(words / seconds, 1):g}",
            "ups": f"{round(1 / seconds, 2):g}",
            "wpb": f"{round(words, 1):g}",
            "num_updates": f"{updates}",
            "train_wall": f"{round(sum(of_interval)):g}",
            "wall": f"{round(wall):g}",
        }
        values = {name: value for name, value in values.items() if name not in left_out}
        said = json.dumps({"epoch": 1, **values}) if kind == "json" else f"epoch 001:  {updates} / 99 "
        if kind == "simple":
            said += ", ".join(f"{name}={value}" for name, value in values.items())
        text += f"2026-01-01 00:00:00 | INFO | train_inner | {said}\n"
        means.append(seconds)
    return text, sorted(means[1:])[len(means[1:]) // 2]  # the first interval is of warming up


@pytest.mark.parametrize("kind", ["simple", "json"])
@pytest.mark.parametrize("seconds", [0.043, 0.347, 1.62, 14.9])
@pytest.mark.parametrize("updates", [1, 2, 50])
def test_the_seconds_of_an_update_are_as_exact_as_the_log_allows(updates, seconds, kind, tmp_path):
    noise = random.Random(1)
    times = [[seconds * noise.uniform(0.9, 1.1) for _ in range(updates)] for _ in range(6)]
    text, true = lines_of([[9 * seconds], *times[1:]], 2048, kind)
    (tmp_path / "train.log").write_text(text)
    assert logs.read(tmp_path / "train.log").seconds_per_update == pytest.approx(true, rel=1e-3)


@pytest.mark.parametrize("kind", ["simple", "json"])
@pytest.mark.parametrize("left_out", [("wps",), ("wpb",), ("wps", "wpb"), ("wps", "ups")])
def test_a_log_without_words_per_second_gives_what_it_has(left_out, kind, tmp_path):
    text, true = lines_of([[0.7] * 50] * 4, 2048, kind, left_out)
    (tmp_path / "train.log").write_text(text)
    assert logs.read(tmp_path / "train.log").seconds_per_update == pytest.approx(true, rel=0.01)


@pytest.mark.parametrize("kind", ["simple", "json"])
@pytest.mark.parametrize("starts", [1, 2, 3])
@pytest.mark.parametrize("begins", [15, 35])
def test_the_first_interval_of_every_start_is_left_out(begins, starts, kind, tmp_path):
    """A training that goes on warms up again; it begins with its checkpoint, not with the last line of the log."""
    lines, _ = lines_of([[30.0] * 10, [0.5] * 10, [0.6] * 10], 2048, kind)
    text = ""
    for start in range(starts):
        text += "2026-01-01 00:00:00 | INFO | fairseq_cli.train | num. shared model params: 7 (num. trained: 7)\n"
        first = begins * start
        text += re.sub(r"(num_updates\W+)(\d+)", lambda found, first=first: f"{found[1]}{int(found[2]) + first}", lines)
    (tmp_path / "train.log").write_text(text)
    found = logs.read(tmp_path / "train.log")
    assert found.seconds_per_update == pytest.approx(0.55, rel=1e-3)
    assert found.updates == 30 + begins * (starts - 1)


# ---- costs in turn ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_every_row_is_measured_at_every_place_of_a_round(rows):
    names = [(str(i),) for i in range(rows)]
    orders = [costs.in_turn(names, i + 1) for i in range(rows)]
    assert all(sorted(order) == names for order in orders)
    for site in zip(*orders):
        assert sorted(site) == names
    assert orders[0] == names == costs.in_turn(names, rows + 1)


def test_the_load_before_and_after_is_kept(command, toy, monkeypatch):  # noqa: F811
    loads = iter([(0.25, 0, 0), (1.75, 0, 0)])
    monkeypatch.setattr(os, "getloadavg", lambda: next(loads))
    command("cost", "table7", "--scale", "small", "--rounds", "1")
    assert (content(toy)["cost"]["load_before"], content(toy)["cost"]["load_after"]) == (0.25, 1.75)


def fails(toy, condition):  # noqa: F811
    """The second training of average does what `condition` says."""
    script = toy / "examples" / "toy" / "train.sh"
    script.write_text(TRAIN.replace("mkdir -p", f"if [[ $* == *'--seed 2'*average* ]]; then {condition}; fi\nmkdir -p"))


@pytest.mark.parametrize(
    "condition, status, said",
    [
        ("exit 3", 1, "reproduce: round 2, average: train.sh ended with status 3 "),
        ("kill -INT $PPID; sleep 30", 130, "reproduce: interrupted; "),
    ],
)
def test_rounds_that_were_complete_are_kept(condition, status, said, command, toy):  # noqa: F811
    fails(toy, condition)
    found, printed, errors = command("cost", "table7", "--scale", "small", "--rounds", "4")
    assert found == status and errors.startswith(said) and errors.count("\n") == 1
    assert errors.endswith("1 of 4 rounds are complete\n")
    cost = content(toy)["cost"]
    assert cost["rounds"] == 1 and [row["rounds"] for row in cost["rows"]] == [[0.4]] * 3
    assert "A: 0.400 s/update (1.00 of softmax)" in printed


def test_fewer_rounds_than_are_kept_do_not_replace_them(command, toy):  # noqa: F811
    command("cost", "table7", "--scale", "small", "--rounds", "2")
    fails(toy, "exit 3")
    status, _, errors = command("cost", "table7", "--scale", "small", "--rounds", "4")
    path = toy / "results" / "table7.json"
    assert status == 1 and errors.endswith(f"reproduce: {path} keeps the costs of 2 rounds that it has\n")
    assert content(toy)["cost"]["rounds"] == 2
    assert command("cost", "table7", "--scale", "small", "--rounds", "1")[0] == 0  # all that were asked for
    assert content(toy)["cost"]["rounds"] == 1


def test_a_first_round_that_fails_keeps_nothing(command, toy):  # noqa: F811
    (toy / "examples" / "toy" / "train.sh").write_text("exit 3\n")
    status, _, errors = command("cost", "table7", "--scale", "small", "--rounds", "2")
    assert status == 1 and errors.endswith("0 of 2 rounds are complete\n")
    assert not (toy / "results").exists()


AXES = {"model": ["b", "c"], "attention": ["softmax", "A"]}


@pytest.mark.parametrize(
    "axes, row, label, expected",
    [
        (AXES, ("c", "A"), "softmax", ("c", "softmax")),
        (AXES, ("c", "softmax"), "A", ("c", "A")),
        (AXES, ("c", "A"), "B", None),
        (dict(reversed(AXES.items())), ("A", "c"), "softmax", ("softmax", "c")),
        ({"heads": ["4", "8"]}, ("8",), "softmax", None),
    ],
)
def test_the_row_that_differs_in_the_attention_alone(axes, row, label, expected):
    assert tables.with_label(axes, row, label) == expected


# ---- grids -----------------------------------------------------------------------------------------------------------

ATTENTIONS = ["softmax", "A", "B"]


@pytest.mark.parametrize(
    "name, axes",
    [
        ("table2", {"model": ["vanilla", "transformer-xl"], "attention": None}),
        ("table8", {"heads": ["2", "4", "8"], "attention": ATTENTIONS}),
        ("table10", {"head-size": ["32", "64"], "attention": ATTENTIONS}),
    ],
)
@pytest.mark.parametrize("scale", ["small", "tiny"])
def test_a_table_has_a_small_grid(scale, name, axes):
    full, grid = (TABLES[name].grid(s) for s in ("full", scale))
    assert {axis: list(points) for axis, points in grid.axes.items()} == {
        axis: labels or list(full.axes[axis]) for axis, labels in axes.items()
    }
    assert set(grid.metrics) == set(full.metrics) - ({"valid"} if name == "table10" else set())  # trained on


HEADS = {"--decoder-attention-heads", "--head-dim"}
OTHER_TEXT = {"--train-subset", "--valid-subset", "--validate-interval"}


@pytest.mark.parametrize(
    "name, differ",
    [
        ("table1", set()),
        ("table8", HEADS),
        ("table9", {"--tokens-per-sample", "--max-update", "--warmup-updates"}),
        ("table10", {*HEADS, "--tokens-per-sample", "--dropout", "--lr", "--warmup-updates", *OTHER_TEXT}),
    ],
)
def test_small_tables_have_the_model_and_the_training_of_table_7(name, differ):
    def trained(table):
        run = next(run for run in sweep.runs(table.grid("small")) if "softmax" in run.labels.values())
        return sweep.canonical(run.train)

    ours, theirs = trained(TABLES[name]), trained(TABLES["table7"])
    assert {flag for flag in ours.keys() | theirs.keys() if ours.get(flag) != theirs.get(flag)} <= differ


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("scale", ["small", "tiny"])
def test_what_has_no_small_grid_says_why(name, scale, capsys, tmp_path):
    if "small" in TABLES[name].scales():
        assert name not in tables.FULL_ALONE
        return
    try:
        status = reproduce.main(["run", name, "--scale", scale, "--out", str(tmp_path)])
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr().err
    assert status == 2 and said.count("\n") == 1 and ".toml" not in said
    assert f"--scale {scale}: {name} has full alone: " in said and len(said.partition("alone: ")[2]) > 30


@pytest.mark.parametrize("name", TABLES)
def test_a_published_cell_has_a_number_for_every_metric(name):
    cells = TABLES[name].published()
    for labels, cell in cells.items():
        if not labels.startswith("MNLI/"):  # the matched and the mismatched set
            assert len(cell.split("/")) == len(TABLES[name].published_metrics()), labels


@pytest.mark.parametrize(
    "name, expected",
    [
        ("table4", ("valid", "test")),
        ("table5", ("test",)),
        ("table6", ("EM", "F1")),
        ("low_rank_tables_mnli", ("accuracy",)),
        ("low_rank_tables_squad", ("F1", "EM")),
    ],
)
def test_published_numbers_are_called_what_they_are(name, expected):
    assert TABLES[name].published_metrics() == expected


# ---- estimates -------------------------------------------------------------------------------------------------------


def estimate_of(name, *labels):
    grid = TABLES[name].grid("full")
    return estimates.estimate(sweep.runs(grid)[tables.rows(grid).index(labels)])


def test_what_starting_kernels_take_is_by_hand():
    """16 layers of 2 ms, 8 batches an update."""
    found = estimate_of("table1", "baevski", "B")
    assert found.bound == estimates.STARTING
    assert found.gpu_hours == pytest.approx(16 * 0.002 * 8 * 286_000 / 3600)


def test_what_arithmetic_takes_is_by_hand():
    """16 layers of 8 heads of 512 at d 1024, n 512; the output's first band are 20,000 words."""
    found = estimate_of("table10", "512", "softmax")
    weights = 16 * (4 * 1024 * 4096 + 2 * 1024 * 4096) + 20_000 * 1024
    operations = 6 * weights + 2 * 6 * 16 * 4096 * 512
    assert found.bound == estimates.ARITHMETIC
    assert found.gpu_hours == pytest.approx(operations * 8 * 4608 * 286_000 / (0.3 * 989e12) / 3600, rel=0.01)


@pytest.fixture(scope="module")
def whole():
    """The list, by table, where nothing was run."""
    nowhere = Path("nowhere")
    return {name: listing.of_table(table, nowhere, nowhere) for name, table in TABLES.items()}


def test_few_estimates_are_of_arithmetic(whole):
    """The head of the list says how many, for they alone depend on the GPU's peak."""
    bounds = [estimates.estimate(run).bound for t in TABLES.values() for run in sweep.runs(t.grid("full"))]
    text = listing.text(list(whole.values()))
    said = re.search(r"\((\d+) of (\d+) rows\)", " ".join(text.split()))
    assert (int(said[1]), int(said[2])) == (bounds.count(estimates.ARITHMETIC), len(bounds))
    starred = sum(bool(re.search(r" [\d.e+]+\* ", line)) for line in text.splitlines())
    assert starred == bounds.count(estimates.ARITHMETIC)


@pytest.mark.parametrize(
    "loss, full",
    [
        (lambda logits, target: F.nll_loss(F.log_softmax(logits, -1, dtype=torch.float32), target), True),
        (lambda logits, target: F.cross_entropy(logits, target), False),
    ],
    ids=["fairseq's cross entropy", "its adaptive softmax"],
)
def test_the_memory_of_the_output_is_what_autograd_keeps_and_makes(loss, full):
    words, kept = 50_000, {}

    def keep(tensor):
        if tensor.numel() == words:
            kept[tensor.data_ptr()] = tensor
        return tensor

    hidden = torch.randn(1, 4, dtype=torch.bfloat16, requires_grad=True)
    logits = F.linear(hidden, torch.randn(words, 4, dtype=torch.bfloat16))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = loss(logits, torch.tensor([7]))
    (log_softmax,) = kept.values()
    made = log_softmax.element_size()  # its gradient has its type
    model = estimates.Size(1, 4, 4, 1, None, ((words, 4),), full_softmax=full)
    assert log_softmax.element_size() + made + logits.element_size() == estimates.of_a_word(model, {})
    value.backward()
    smoothed = {"--criterion": ["label_smoothed_cross_entropy"]}
    assert estimates.of_a_word(model, smoothed) == (12 if full else 6)


@pytest.mark.parametrize("name", TABLES)
def test_models_that_must_be_pretrained_cost_it(name):
    grid = TABLES[name].grid("full")
    found = [estimates.pretraining(run) for run in sweep.runs(grid)]
    if not name.startswith("low_rank_tables"):
        assert found == [None] * len(found)
        return
    labels = tables.rows(grid)
    assert len({model.arch for model in found}) == len(found) == 14
    # 24 layers of 2 ms, 16 batches an update, then 64
    smallest = found[labels.index(("d 512, h 8, d_k 32",))]
    assert smallest.gpu_hours == pytest.approx(24 * 0.002 * (16 * 450_000 + 64 * 50_000) / 3600)
    largest = found[labels.index(("d 512, h 32",))]
    assert largest.gpu_hours > smallest.gpu_hours
    assert all(model.gpu_hours > 50 * estimates.estimate(run).gpu_hours for model, run in zip(found, sweep.runs(grid)))


def test_pretraining_ends_where_its_rows_begin(plain):
    run = sweep.runs(TABLES["low_rank_tables_mnli"].grid("full"))[1]
    found = estimates.pretraining(run)
    first, second = (recipes.parse(recipes.dry_run(line)[0]) for line in found.commands)
    assert first.arch == second.arch == found.arch
    assert second.finetune_from_model == f"{first.save_dir}/checkpoint_last.pt"
    begun = sweep.canonical(run.train)["--finetune-from-model"][0].replace("{root}", str(ROOT))
    assert begun == f"{second.save_dir}/checkpoint_last.pt"


@pytest.fixture
def plain(monkeypatch):
    for name in ("ARCHIVES", "DATA", "DRY_RUN", "GPUS", "MODEL", "PRECISION", "SAVE", "VARIANT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


# ---- the list --------------------------------------------------------------------------------------------------------

NOTED = {"table5", "table6", "low_rank_figure_1", "low_rank_tables_mnli", "low_rank_tables_squad"}


def test_the_list_is_of_120_columns_and_says_what_a_table_begins_with(whole):
    text = listing.text(list(whole.values()))
    assert max(map(len, text.splitlines())) <= 120
    assert {name for name, table in whole.items() if table["note"]} == NOTED
    for row in whole["low_rank_tables_squad"]["rows"]:
        arch, hours = row["pretraining"]["arch"], row["pretraining"]["gpu_hours"]
        assert re.search(rf" {hours:.0f} +--arch {arch}\n", text)
    for other in OTHERS:
        assert other.what in " ".join(text.split())


def test_the_list_for_programs_has_all_that_the_text_has(command, toy):  # noqa: F811
    status, printed, _ = command("list", "--json")
    found = json.loads(printed)
    assert status == 0 and [table["table"] for table in found["tables"]] == ["table7"]
    assert [other["commands"] for other in found["others"]] == [list(other.commands) for other in OTHERS]
    assert all(other["state"] and other["cost"] for other in found["others"])


def listed(toy):  # noqa: F811
    table = tables.table("table7")
    found = listing.of_table(table, toy / "runs", toy / "results")
    return {"/".join(row["labels"]): row for row in found["rows"]}, listing.text([found])


def test_the_list_knows_what_another_table_has(command, toy):  # noqa: F811
    """Which `run` would take over, and not train."""
    grids = toy / "examples" / "grids"
    for folder in (grids, grids / "small"):
        (folder / "mixhead_table_8.toml").write_text((folder / "mixhead_table_7.toml").read_text())
    command("run", "table7", "--scale", "small", "--seeds", "2", "--only", "A")
    found = listing.of_table(tables.table("table8"), toy / "runs", toy / "results")
    assert {row["labels"][0]: row["done"].get("small") for row in found["rows"]} == {
        "softmax": 0, "A": 2, "average": 0, "B": None
    }  # fmt: skip


GRID = tables.table("table4").grid("small")


@pytest.mark.parametrize(
    "only, expected",
    [
        ([], [(heads, row) for heads in ("4", "32", "64") for row in ("softmax", "A", "B")]),
        (["4,A"], [("4", "A")]),
        (["4,A", "64,B"], [("4", "A"), ("64", "B")]),
        (["64,B", "4,A"], [("4", "A"), ("64", "B")]),
        (["4,64,B"], [("4", "B"), ("64", "B")]),
        (["4", "A"], [("4", "softmax"), ("4", "A"), ("4", "B"), ("32", "A"), ("64", "A")]),
    ],
)
def test_rows_are_chosen_by_their_labels(only, expected):
    """Labels in one --only are of one row; each --only adds rows."""
    assert tables.chosen(GRID, only) == expected


def test_tables_of_the_papers_size_have_their_runs_in_common():
    """Of the model with adaptive inputs, whose trainings take a day each."""
    known = {}
    for name in ("table1", "table7", "table8", "table9", "table10"):
        for pair in identity.pairs(tables.table(name).grid("full"), 1):
            run = (pair.bare.digest, str(identity.evaluations(pair.bare)))
            known.setdefault(run, []).append((name, *pair.labels))
    assert [sites for sites in known.values() if len(sites) > 1] == [
        *([("table1", "baevski", row), ("table10", "128", row)] for row in ("softmax", "A", "B")),
        *([("table7", row), ("table8", "8", row), ("table9", "512", row), ("table10", "64", row)]
          for row in ("softmax", "A", "B")),
    ]  # fmt: skip


def line_of(row, text):
    return next(line.split() for line in text.splitlines() if line.startswith(f"  {row} "))


def test_the_list_says_what_is_done_begun_and_running(command, toy):  # noqa: F811
    script = toy / "examples" / "toy" / "train.sh"
    script.write_text(TRAIN.replace("mkdir -p", "echo begun\n[[ $* != *average* ]] || exit 3\nmkdir -p"))
    command("run", "table7", "--scale", "small", "--seeds", "1")
    rows, text = listed(toy)
    assert {label: row["unfinished"] for label, row in rows.items() if row["unfinished"]} == {
        "average": {"small": listing.BEGUN}
    }
    assert line_of("average", text)[2:5] == ["0/3", "0/3", "b"]
    assert line_of("A", text)[2:4] == ["0/3", "1/3"] and line_of("B", text)[2:4] == ["0/3", "-"]
    (folder,) = (toy / "runs" / "table7-small").glob("1_average-*")
    with (folder / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert line_of("average", listed(toy)[1])[4] == "r"
    assert line_of("average", listed(toy)[1])[4] == "b"


def test_the_list_has_the_median_of_the_minutes_of_a_small_run(command, toy):  # noqa: F811
    command("run", "table7", "--scale", "small", "--seeds", "3")
    path = toy / "results" / "table7.json"
    found = json.loads(path.read_text())
    seconds = {"softmax": [40, 400, 20], "A": [None] * 3, "average": [3] * 3}  # of an update, by seed
    for run in found["scales"]["small"]["runs"]:
        run["seconds_per_update"] = seconds[run["labels"][0]][run["seed"] - 1]
    path.write_text(json.dumps(found))
    rows, text = listed(toy)
    assert {label: row["small_minutes"] for label, row in rows.items()} == {
        "softmax": 20, "A": None, "average": 1.5, "B": None,
    }  # fmt: skip
    assert line_of("softmax", text)[4] == "20" and line_of("A", text)[4] == "-"


# ---- what is no grid -------------------------------------------------------------------------------------------------

COUNTS = {  # millions, what A and B add; WikiText-103 where nothing is said
    "vanilla Transformer, 6 layers": "156M; A adds 384, B 3,456",
    "vanilla Transformer, 16 layers, WikiText-2": "67M; A adds 1,024, B 9,216",
    "adaptive inputs, WikiText-103": "247M; A adds 1,024, B 17,408",
    "adaptive inputs, LM1B": "330M; A adds 1,024, B 17,408",
    "Transformer-XL, WikiText-103 / WikiText-2": "151M / 40M; A adds 1,600, B 8,160",
    "Transformer-XL, LM1B": "294M; A adds 1,152, B 19,584",
    "Synthesizer": "248M; A adds 1,024, B 17,408",
    "Fixhead, head size 256 / 512": "314M / 448M",
}


@pytest.mark.parametrize("model", COUNTS)
def test_counts_of_parameters_are_listed_and_tested(model):
    (other,) = (other for other in OTHERS if "Parameters" in other.what and model in other.what)
    assert (other.published, other.state) == (COUNTS[model], "tested")


COMMANDS = list(dict.fromkeys((other.what, line) for other in OTHERS for line in other.commands))


def takes(line, monkeypatch):
    """Parses a line as its program does; fails where the program or a flag is not there."""
    words = shlex.split(re.sub(r"^(?:[A-Z]+=\S+ )+", "", line))
    if words[1:3] == ["-m", "pytest"]:
        path, flag, word = words[3:]
        assert flag == "-k" and re.search(rf"(?m)^def test_\w*{word}", (ROOT / path).read_text())
    elif words[1:3] == ["-m", "mixhead_plugin.analysis"]:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"mixhead_plugin.analysis.{words[3]}").add_arguments(parser)
        parser.parse_args(words[4:])
    elif words[0].endswith("run.py"):
        assert os.access(ROOT / words[0], os.X_OK) and not words[1:]
    elif words[0] == "examples/sweep.py":
        monkeypatch.setattr(sys, "argv", words)
        assert sweep.runs(sweep.grid_of(*sweep.arguments()))
    elif words[0].endswith("prepare.sh"):
        recipes.script(line, DRY_RUN=1)  # ends after the command line was read
    else:
        assert [recipes.parse(words) for words in recipes.dry_run(line)]


@pytest.mark.parametrize("what, line", COMMANDS, ids=[f"{what}: {line}"[:90] for what, line in COMMANDS])
def test_every_command_of_what_is_no_grid_is_taken(what, line, plain):
    takes(line, plain)


@pytest.mark.parametrize(
    "line",
    [
        ".venv/bin/python -m pytest tests/models/test_transformer_xl.py -k as_many_heads",
        ".venv/bin/python -m mixhead_plugin.analysis prune x.pt --metrics bleu",
        "examples/iwslt14_de_en/prepare.sh --concat-tokens 240",
        "examples/iwslt14_de_en/train.sh --head-mixin none",
    ],
)
def test_a_command_that_nothing_takes_would_be_found(line, plain):
    with pytest.raises((AssertionError, SystemExit)):
        takes(line, plain)


def test_what_is_no_grid_has_a_state_and_a_cost():
    states = {other.what: other.state for other in OTHERS}
    assert set(states.values()) == {"tested", "done", "not run"}
    assert len(states) == len(OTHERS) and all(other.cost for other in OTHERS)
    (probe,) = (other for other in OTHERS if "position" in other.what)
    assert probe.state == "done" and probe.cost == "30 minutes on a CPU, measured"
    (joined,) = (other for other in OTHERS if "240 tokens" in other.what)
    # two trainings of 50,000 updates of one batch, 6 + 6 layers
    assert joined.gpu_hours == pytest.approx(2 * 12 * 0.002 * 50_000 / 3600)
