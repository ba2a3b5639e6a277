"""What runs are known by: flags, labels, text, code, and whether a table has another one's."""

# ruff: noqa: F811 (fixtures of another file)

import json
import re
import shutil
import subprocess

import pytest
import torch
from test_reproduce import (  # noqa: F401 (two are fixtures)
    FULL,
    ROOT,
    SMALL,
    calls,
    command,
    content,
    reproduce,
    sweep,
    toy,
)
from test_reproduce_results import RUN, edit, grid, one_line, rendered, script, spectrum, trained  # noqa: F401 (a fixture)

from reproduction import (  # isort: skip (found where scripts/reproduce.py looks)
    identity, keeping, provenance, recipes, results, running, tables,
)  # fmt: skip

import mixhead_plugin

# ---- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [RUN, ["cost", *RUN[1:4]], ["spectrum", *RUN[1:4]], ["list"]])
@pytest.mark.parametrize("name", ["MODEL", "BREAKS", "VARIANT", "SELECT", "AVERAGE"])
def test_what_rows_set_themselves_is_refused_in_the_environment(name, words, command, toy, monkeypatch):
    monkeypatch.setenv(name, "x")
    status, _, errors = command(*words)
    assert status == 2 and f"{name}=x: set in the environment; the rows of a table set it themselves" in errors
    assert one_line(errors) and calls(toy) == [] and not (toy / "results").exists()


def test_an_empty_variable_is_none(command, toy, monkeypatch):
    monkeypatch.setenv("MODEL", "")
    assert command(*RUN, "--only", "A")[0] == 0 and len(calls(toy)) == 3


@pytest.mark.parametrize("name, value", [("DATA", "/somewhere"), ("GPUS", "0")])
def test_the_machines_own_variables_are_no_identity(name, value, command, toy, monkeypatch):
    monkeypatch.setenv(name, value)
    command(*RUN, "--only", "A")
    (run,) = content(toy)["runs"]
    (bare,) = sweep.runs(tables.table("table7").grid("small")._replace(axes={"attention": {"A": sweep.Point(
        "--seed 1 --head-mixing position-independent"
    )}}))  # fmt: skip
    assert run["digest"] == bare.digest


def test_runs_of_another_precision_are_other_runs(command, toy, monkeypatch):
    command(*RUN, "--only", "A")
    (own,) = content(toy)["runs"]
    before = (toy / "results" / "table7.json").read_text()
    calls(toy)
    monkeypatch.setenv("PRECISION", "bf16")
    for words in (RUN, ["cost", *RUN[1:4]], ["spectrum", *RUN[1:4]]):
        status, _, errors = command(*words)
        assert status == 2 and calls(toy) == []
        assert "has runs of the machine's own precision, not of PRECISION=bf16; --results" in one_line(errors)
    assert (toy / "results" / "table7.json").read_text() == before

    (toy / "results").rename(toy / "of the machine")
    assert command(*RUN, "--only", "A")[0] == 0 and trained(toy) == ["position-independent"]  # the same --out
    (other,) = content(toy)["runs"]
    assert other["train"]["PRECISION"] == ["bf16"] and other["digest"] != own["digest"]
    assert command(*RUN, "--only", "A")[0] == 0 and trained(toy) == []
    monkeypatch.delenv("PRECISION")
    status, _, errors = command(*RUN)
    assert status == 2 and "has runs of PRECISION=bf16, not of the machine's own precision" in one_line(errors)


# ---- all flags -------------------------------------------------------------------------------------------------------

DRY = '    echo fairseq-train "$(dirname "$0")"'
ON_GPUS = """    n=${GPUS:-4}
    if ((n > 0)); then flags="--fp16 --distributed-world-size $n --batch-size $((64 / n))"
    else flags="--cpu --distributed-world-size 1 --batch-size 64"; fi
    flags+=" --restore-file /secret/old.pt"
    echo fairseq-train "$(dirname "$0")" --user-dir /secret/plugin --save-dir "$SAVE" $flags"""


def test_the_flags_are_those_that_were_run(command, toy):
    """On a machine of four GPUs."""
    script(toy, DRY, ON_GPUS)
    command(*RUN, "--only", "A")
    (run,) = content(toy)["runs"]
    assert run["flags"] == {
        "--arch": ["toy"],
        "--batch-size": ["16"],
        "--distributed-world-size": ["4"],
        "--fp16": [],
        "--head-mixing": ["position-independent"],
        "--max-tokens": ["40"],
        "--max-update": ["30"],
        "--restore-file": ["old.pt"],
        "--seed": ["1"],
        "--tokens-per-sample": ["8"],
        "--update-freq": ["2"],
    }


@pytest.mark.parametrize("gpus", ["0", "1", "2", "8"])
def test_another_number_of_gpus_is_the_same_recipe(gpus, command, toy, monkeypatch):
    script(toy, DRY, ON_GPUS)
    command(*RUN, "--only", "A")
    calls(toy)
    monkeypatch.setenv("GPUS", gpus)
    monkeypatch.setattr(sweep, "visible_gpus", lambda: [])
    status, _, errors = command(*RUN, "--only", "A")
    assert (status, errors) == (0, "") and calls(toy) == []


def test_no_absolute_path_gets_into_the_results(command, toy, monkeypatch):
    monkeypatch.setenv("DATA", str(toy / "text"))
    (toy / "text" / "words").mkdir(parents=True)
    data = '"$DATA/words" --bpe-codes "$DATA/codes" --finetune-from-model /secret/model.pt'
    script(toy, DRY, ON_GPUS.replace('"$(dirname "$0")"', data))
    grid(toy, 'test = ""', "test = \"--results-path {save}/x --model-overrides {'a':'/secret/b'}\"")
    grid(toy, "--head-mixing average", "--head-mixing average --load /secret/c --plugin {root}/d")
    assert command(*RUN)[0] == 0
    command("cost", "table7", "--scale", "small", "--rounds", "1")
    text = (toy / "results" / "table7.json").read_text()
    assert not re.findall(r'[^"]*(?<![\w.}])/\w[^"]*', text) and "secret" not in text
    flags = content(toy)["runs"][2]["flags"]
    assert flags["--bpe-codes"] == ["{data}/codes"] and flags["--finetune-from-model"] == ["model.pt"]
    assert flags["--load"] == ["c"] and flags["--plugin"] == ["{root}/d"]
    calls(toy)
    assert command(*RUN)[0] == 0 and calls(toy) == []
    (toy / "runs").rename(toy / "lost")
    assert command(*RUN)[0] == 0 and calls(toy) == []


@pytest.mark.parametrize(
    "text, expected",
    [
        ("/a/b/c.pt", "c.pt"),
        ("/a", "a"),
        ("{'x': '/a/b', 'y': 1/2}", "{'x': 'b', 'y': 1/2}"),
        ("/a/b:/c/d", "d"),
        ("(0.9, 0.98)", "(0.9, 0.98)"),
        ("1/3", "1/3"),
        ("sub/folder", "sub/folder"),
        ("/top/of/it/x/y", "{root}/x/y"),
        ("/top/of/it", "{root}"),
        ("/top/of/itself/x", "x"),
    ],
)
def test_a_path_is_its_last_part(text, expected):
    assert recipes.without_paths(text, {"/top/of/it": "{root}"}) == expected


@pytest.mark.parametrize("where", ["in both", "in --out", "in results"])
@pytest.mark.parametrize(
    "old, new",
    [
        ("--max-tokens 40", "--max-tokens 80"),
        ("--arch toy", "--arch toy --dropout 0.3"),
        (" --update-freq 2", ""),
    ],
)
def test_what_is_of_another_recipe_is_not_done(old, new, where, command, toy):
    command(*RUN, "--only", "softmax,A")
    if where == "in results":
        (toy / "runs").rename(toy / "lost")
    if where == "in --out":
        (toy / "results").rename(toy / "lost")
    calls(toy)
    script(toy, old, new)
    flag = (old.split() + new.split())[-2]
    table = tables.table("table7")
    counts = running.states(table, "small", 1, toy / "runs", toy / "results")
    assert set(counts.values()) == {0}
    status, _, errors = command(*RUN, "--only", "A")
    assert status == 0 and trained(toy) == ["position-independent"]
    said = errors.splitlines()
    if where != "in results":
        assert re.fullmatch(
            rf"reproduce: 1_A-(\w+): of other flags than .*/train.sh has now \({flag}\); is 1_A-\1.1 .*", said[0]
        )
        assert len(list((toy / "runs" / "table7-small").glob("1_A-*.1/checkpoints"))) == 1
    if where != "in --out":
        expected = f"2 runs of other flags than the scripts of examples/toy have now ({flag}) leave the results"
        assert said[-1] == f"reproduce: table7, small: {expected}"
    assert [run["labels"] for run in content(toy)["runs"]] == [["A"]]
    assert command(*RUN, "--only", "A")[0] == 0 and calls(toy) == []


@pytest.mark.parametrize(
    "flags",
    ["--log-interval 7", "--num-workers 3", "--save-dir /other", "--user-dir /other", "--bf16", "--cpu",
     "--no-epoch-checkpoints", "--distributed-port 5"],
)  # fmt: skip
def test_flags_without_effect_do_not_count(flags, command, toy):
    command(*RUN, "--only", "A")
    calls(toy)
    script(toy, "--arch toy", f"--arch toy {flags}")
    status, _, errors = command(*RUN, "--only", "A")
    assert (status, errors) == (0, "") and calls(toy) == []


def test_entries_from_before_flags_were_kept_are_done(command, toy):
    command(*RUN, "--only", "A")
    (toy / "runs").rename(toy / "lost")
    edit(toy, lambda part: part["runs"][0].pop("flags"))
    calls(toy)
    script(toy, "--max-tokens 40", "--max-tokens 80")
    status, _, errors = command(*RUN, "--only", "A")
    assert (status, errors) == (0, "") and calls(toy) == []
    assert [run["labels"] for run in content(toy)["runs"]] == [["A"]]


def test_the_flags_of_the_evaluations_are_kept(command, toy, monkeypatch):
    monkeypatch.setenv("DATA", str(toy / "text"))
    evaluation(toy, "--beam 5", '--beam 5 --codes "$DATA/codes" --model /secret/model.pt --cpu')
    command(*RUN, "--only", "A")
    own = {"--beam": ["5"], "--codes": ["{data}/codes"], "--model": ["model.pt"], "--remove-bpe": []}
    assert content(toy)["runs"][0]["evaluation_flags"] == {"test": own, "valid": {**own, "--gen-subset": ["valid"]}}


@pytest.mark.parametrize(
    "table, label, flag", [("table6", "softmax", "--batch-size"), ("table1", "vanilla,B", "--context-window"),
                           ("table4", "4,B", "--beam"), ("table5", "RTE,B", "--batch-size")]
)  # fmt: skip
def test_an_evaluation_is_what_its_script_prints_on_any_machine(table, label, flag, toy, monkeypatch):
    """The real ones; fairseq reads nothing of what they print."""
    monkeypatch.setattr(sweep, "EXAMPLES", ROOT / "examples")
    pair = identity.pairs(tables.table(table).grid("full"), 1, [label])[0]
    found = {}
    for gpus in ("0", "4"):
        monkeypatch.setenv("GPUS", gpus)
        recipes.of_evaluation.cache_clear()
        found[gpus] = {metric: recipes.evaluation_flags(pair.run, metric) for metric in pair.run.evaluate}
    assert found["0"] == found["4"] and str(ROOT) not in json.dumps(found)
    for metric, flags in found["0"].items():
        assert flags[flag] and not recipes.changed(None, pair.bare, found["0"])
        assert recipes.changed(None, pair.bare, {metric: {**flags, flag: ["7000"]}}) == [flag]


def evaluation(toy, old, new):
    path = toy / "examples" / "toy" / "evaluate.sh"
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("where", ["in both", "in --out", "in results"])
@pytest.mark.parametrize("old, new", [("--beam 5", "--beam 4"), ("--beam 5", "--beam 5 --lenpen 2"), ("--beam 5 ", "")])
def test_what_was_evaluated_in_another_way_is_evaluated_again(old, new, where, command, toy):
    command(*RUN, "--only", "A")
    if where == "in results":
        (toy / "runs").rename(toy / "lost")
    if where == "in --out":
        (toy / "results").rename(toy / "lost")
    calls(toy)
    evaluation(toy, old, new)
    evaluation(toy, "value=90", "value=80")
    assert set(running.states(tables.table("table7"), "small", 1, toy / "runs", toy / "results").values()) == {0}
    status, _, errors = command(*RUN, "--only", "A")
    made = [call.split()[0] for call in calls(toy)]
    assert status == 0 and made == ["train"] * (where == "in results") + ["evaluate"] * 2
    if where != "in --out":
        flag = "--lenpen" if "--lenpen" in new else "--beam"
        expected = f"1 runs of other flags than the scripts of examples/toy have now ({flag}) leave the results"
        assert one_line(errors) == f"reproduce: table7, small: {expected}\n"
    (run,) = content(toy)["runs"]
    assert run["values"] == {"valid": 85.1, "test": 80.1}
    assert command(*RUN, "--only", "A")[0] == 0 and calls(toy) == []


@pytest.mark.parametrize("flags", ["--path /x", "--results-path /x", "--cpu", "--fp16", "--user-dir /x"])
def test_evaluations_of_another_machine_are_the_same(flags, command, toy):
    command(*RUN, "--only", "A")
    calls(toy)
    evaluation(toy, "--beam 5", f"--beam 5 {flags}")
    status, _, errors = command(*RUN, "--only", "A")
    assert (status, errors) == (0, "") and calls(toy) == []


def test_evaluations_from_before_their_flags_were_kept_are_done(command, toy):
    command(*RUN, "--only", "A")
    edit(toy, lambda part: part["runs"][0].pop("evaluation_flags"))
    (path,) = (toy / "runs" / "table7-small").glob("*/about.json")
    about = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in about.items() if name != "evaluation_flags"}))
    calls(toy)
    evaluation(toy, "--beam 5", "--beam 4")
    status, _, errors = command(*RUN, "--only", "A")
    assert (status, errors) == (0, "") and calls(toy) == []


@pytest.mark.parametrize("table, label", [("table6", "softmax"), ("table1", "vanilla,B"), ("table4", "4,B")])
def test_a_recipe_is_what_its_script_prints_on_any_number_of_gpus(table, label, toy, monkeypatch):
    """The real ones; fairseq reads nothing of what they print."""
    monkeypatch.setattr(sweep, "EXAMPLES", ROOT / "examples")
    grid = tables.table(table).grid("full")
    (pair,) = identity.pairs(grid, 1, [label])
    batches = set()
    for gpus in ("0", "1", "2", "4"):
        found = recipes.flags_of(pair.run, {"GPUS": gpus})
        assert found["--arch"] and not recipes.changed(found, pair.bare)
        assert recipes.changed({**found, "--lr": ["7"]}, pair.bare) == ["--lr"]
        batches.add((*found.get("--batch-size", ()), *found.get("--max-tokens", ()), *found.get("--update-freq", ())))
    assert len(batches) > 1


def test_a_training_does_not_go_on_with_another_recipe(command, toy):
    script(
        toy, "mkdir -p", '[[ -e $(dirname "$0")/whole ]] || { mkdir -p "$SAVE"; touch "$SAVE/half"; exit 1; }\nmkdir -p'
    )
    assert command(*RUN, "--only", "A")[0] == 1
    (toy / "examples" / "toy" / "whole").touch()
    script(toy, "--max-tokens 40", "--max-tokens 80")
    status, _, errors = command(*RUN, "--only", "A")
    assert status == 0 and "(--max-tokens); is 1_A-" in one_line(errors)
    halves = {path.parents[1].suffix for path in (toy / "runs" / "table7-small").glob("*/checkpoints/half")}
    assert halves == {".1"}


def test_the_committed_results_are_of_the_recipes_as_they_are():
    for name in tables.tables():
        for scale, part in (results.read(ROOT / "results", name) or {"scales": {}})["scales"].items():
            assert part["runs"]
            seeds = max(run["seed"] for run in part["runs"])
            pairs = {pair.bare.digest: pair for pair in identity.pairs(tables.table(name).grid(scale), seeds)}
            for run in part["runs"]:
                assert run["digest"] in pairs, (name, scale, run["labels"], run["seed"])
                assert recipes.changed(run.get("flags"), pairs[run["digest"]].bare) == []


# ---- other labels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"softmax =": "none =", "A =": "mixed ="}, {"none": 100, "mixed": 90, "average": 120}),
        ({"softmax =": "A =", "A =": "softmax ="}, {"A": 100, "softmax": 90, "average": 120}),
        ({"[axes.attention]": "[axes.mixing]"}, {"softmax": 100, "A": 90, "average": 120}),
    ],
)
def test_rows_with_other_labels_keep_their_runs(changes, expected, command, toy):
    command(*RUN)
    command("cost", "table7", "--scale", "small", "--rounds", "1")
    costs = {row["digest"]: row["seconds_per_update"] for row in content(toy)["cost"]["rows"]}
    edit(toy, lambda part: part["cost"]["rows"][1].update(seconds_per_update=7.5))
    (toy / "runs").rename(toy / "lost")
    calls(toy)
    for path in (toy / "examples" / "grids").rglob("*.toml"):
        head, _, _ = path.read_text().partition("[published]")
        lines = [
            next((line.replace(old, new) for old, new in changes.items() if line.startswith(old)), line)
            for line in head.splitlines()
        ]
        path.write_text("\n".join(lines) + "\n")
    status, _, errors = command(*RUN)
    assert (status, errors) == (0, "") and calls(toy) == []
    part = content(toy)
    assert {run["labels"][0]: int(run["values"]["test"]) for run in part["runs"]} == expected
    assert [run["labels"] for run in part["runs"]] == [[label] for label in next(iter(part["axes"].values()))]
    mixed = next(label for label, value in expected.items() if value == 90)
    assert [row["labels"] for row in part["cost"]["rows"] if row["seconds_per_update"] == 7.5] == [[mixed]]
    assert len(costs) == len(part["cost"]["rows"])
    (study,) = results.studies(toy / "results")
    assert {row[0]: int(study.values(row, "test")[1]) for row in study.rows} == expected


# ---- what tables share -----------------------------------------------------------------------------------------------


@pytest.fixture
def table8(toy):
    """With two rows of table 7 under other names."""
    for text, path in ((FULL, "mixhead_table_8.toml"), (SMALL, "small/mixhead_table_8.toml")):
        text = text.replace("softmax =", '"8" =').replace("A =", "a =").replace("B =", "b =")
        (toy / "examples" / "grids" / path).write_text(text)
    return lambda: json.loads((toy / "results" / "table8.json").read_text())["scales"]["small"]["runs"]


def test_more_seeds_are_taken_too(command, toy, table8):
    eight = ["run", "table8", "--scale", "small", "--only", "8,a", "--seeds"]
    for seeds in ("1", "2", "3"):
        command("run", "table7", "--scale", "small", "--seeds", seeds)
        calls(toy)
        status, printed, _ = command(*eight, seeds)
        assert status == 0 and calls(toy) == [] and printed.startswith("2 runs are of the same flags")
        assert [(run["labels"][0], run["seed"]) for run in table8()] == [
            (label, seed) for label in ("8", "a") for seed in range(1, int(seeds) + 1)
        ]


def test_runs_of_another_recipe_are_not_taken(command, toy, table8):
    command(*RUN, "--only", "softmax")
    script(toy, "--max-tokens 40", "--max-tokens 80")
    calls(toy)
    status, printed, errors = command("run", "table8", "--scale", "small", "--only", "8", "--seeds", "1")
    assert (status, errors) == (0, "") and trained(toy) == ["none"] and "same flags" not in printed


def test_a_spectrum_is_of_the_run_in_every_table(command, toy, table8, spectrum):
    command(*RUN)
    command("run", "table8", "--scale", "small", "--only", "8", "--seeds", "1")
    assert command("spectrum", "table7", "--scale", "small")[0] == 0
    expected = {
        f"--seed 1 --head-mixing {mixing}": len(f"--seed 1 --head-mixing {mixing}\n")
        for mixing in ("none", "position-independent", "average")
    }
    ranks = [run["spectrum"]["places"]["decoder-self"]["mean_effective_rank"] for run in content(toy)["runs"]]
    assert ranks == list(expected.values()) and rendered(toy)
    (taken,) = table8()
    assert taken["labels"] == ["8"] and taken["spectrum"] == content(toy)["runs"][0]["spectrum"]

    edit(toy, lambda part: part["runs"][0].pop("spectrum"), "table8")  # as one that was measured elsewhere
    command("run", "table8", "--scale", "small", "--only", "8,a", "--seeds", "1")
    assert [run["labels"][0] for run in table8() if "spectrum" in run] == ["8", "a"]


def test_another_training_of_the_same_flags_is_not_that_run(command, toy, table8, spectrum):
    command(*RUN, "--only", "softmax")
    command("run", "table8", "--scale", "small", "--only", "8", "--seeds", "1")
    assert command("spectrum", "table7", "--scale", "small")[0] == 0
    edit(toy, lambda part: part["runs"][0].pop("spectrum"), "table8")
    edit(toy, lambda part: part["runs"][0].update(wall_seconds=1e6))
    keeping.share(toy / "results", tables.table("table7"), "small")
    (own,), (taken,) = content(toy)["runs"], table8()
    assert own["wall_seconds"] == 1e6 != taken["wall_seconds"]
    assert "spectrum" in own and "spectrum" not in taken


@pytest.mark.parametrize("values", [{"valid": 101.0, "test": 101.5}, {"valid": 106.0}])
def test_a_spectrum_is_of_the_training_that_the_numbers_are_of(values, command, toy, spectrum):
    """The results may have the run from elsewhere."""
    command(*RUN, "--only", "softmax,A")
    edit(toy, lambda part: part["runs"][0].update(values=values))
    status, _, errors = command("spectrum", "table7", "--scale", "small")
    assert status == 0 and ["spectrum" in run for run in content(toy)["runs"]] == [False, True]
    (folder,) = (toy / "runs" / "table7-small").glob("1_softmax-*")
    has = f"{toy}/results/table7.json has other numbers of this run"
    assert one_line(errors) == f"reproduce: {folder}: {has}; its spectrum is left out\n"


def test_spectra_are_made_of_what_is_in_the_results_and_once(command, toy, spectrum):
    command(*RUN, "--only", "softmax,A")
    (toy / "results").rename(toy / "aside")
    status, printed, errors = command("spectrum", "table7", "--scale", "small")
    assert (status, printed) == (1, "") and not (toy / "results").exists()
    assert errors.count(f"{toy}/results/table7.json has not this run; its spectrum is left out\n") == 2
    (toy / "aside").rename(toy / "results")
    assert command("spectrum", "table7", "--scale", "small")[:2] == (0, "seed_1: softmax, A\n")
    before = (toy / "results" / "table7.json").read_text()
    (toy / "python").unlink()
    assert command("spectrum", "table7", "--scale", "small")[:2] == (0, "seed_1: softmax, A: done before\n")
    assert (toy / "results" / "table7.json").read_text() == before


@pytest.mark.parametrize("written", ["", "{", "[]", '{"models": {"0": 1}}', '{"length": 8, "models": {"0": {}}}', None])
def test_a_spectrum_that_cannot_be_read_is_one_line(written, command, toy, spectrum):
    python = toy / "python"
    made = f'text.write_text("""{written}""")' if written is not None else "pass"
    head, _, _ = python.read_text().partition("(folder / ")
    python.write_text(f'{head}text = folder / "spectrum.json"\n{made}\n')
    command(*RUN, "--only", "A")
    status, _, errors = command("spectrum", "table7", "--scale", "small")
    assert status == 2 and "/spectrum/seed_1/spectrum.json: cannot be read: " in one_line(errors)
    assert "spectrum" not in content(toy)["runs"][0]


# ---- where a run is from ---------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(toy, monkeypatch):
    """A function that moves the code to another commit."""

    def at(commit):
        found = {"cpu": "a CPU", "versions": {"python": "3"}, "commit": commit, "date": f"day of {commit}"}
        monkeypatch.setattr(provenance, "about", lambda: dict(found))
        monkeypatch.setattr(provenance, "commit", lambda: commit)

    return at


def test_a_commit_has_a_plus_where_the_code_of_a_result_differs(tmp_path, monkeypatch):
    def git(*words):
        who = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True, text=True)

    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    assert provenance.commit() is None
    git("init", "-q")
    names = ("mixhead_plugin/x.py", "examples/toy/train.sh", "examples/README.md", "results/table7.json")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    own = git("rev-parse", "HEAD").stdout[:12]
    assert provenance.commit() == own
    for name, mark in zip(names, ("+", "+", "", "")):
        (tmp_path / name).write_text("two")
        assert provenance.commit() == own + mark
        git("checkout", "-q", ".")
    (tmp_path / "mixhead_plugin" / "new.py").touch()
    assert provenance.commit() == f"{own}+"


def test_versions_are_of_the_python_that_trains():
    found = provenance.versions()
    assert found["python"].count(".") == 2 and found["torch"] == torch.__version__
    assert found["mixhead_plugin"] == mixhead_plugin.__version__ and "fairseq-fixed" in found
    assert provenance.processor()


def test_a_training_is_of_the_commits_of_all_its_starts(command, toy, checkout):
    script(toy, "mkdir -p", '[[ -e $(dirname "$0")/whole ]] || exit 1\nmkdir -p')
    for commit in ("one", "two", "one"):
        checkout(commit)
        assert command(*RUN, "--only", "A")[0] == 1
    (toy / "examples" / "toy" / "whole").touch()
    checkout("three")
    command(*RUN, "--only", "A")
    (run,) = content(toy)["runs"]
    assert run["commit"] == "one, two, three" and run["date"] == "day of three" and "evaluated_at" not in run
    (path,) = (toy / "runs" / "table7-small").glob("*/about.json")
    starts = json.loads(path.read_text())["starts"]
    assert [start["commit"] for start in starts] == ["one", "two", "one", "three"]
    assert [start.get("load") is None for start in starts] == [True, True, True, False] and run["load"] >= 0


def test_an_evaluation_at_another_commit_is_said(command, toy, checkout):
    checkout("one")
    command(*RUN, "--only", "A")
    grid(toy, 'test = ""', 'test = ""\nother = "--other"')
    checkout("two")
    command(*RUN, "--only", "A")
    (run,) = content(toy)["runs"]
    assert (run["commit"], run["evaluated_at"]) == ("one", "two") and run["values"].keys() == {"valid", "test", "other"}


def test_a_run_is_of_its_text_and_its_threads(command, toy, monkeypatch):
    data = toy / "prepared"
    data.mkdir()
    script(toy, DRY, f"    echo fairseq-train {data}")
    found = []
    for words in ("a b", "b a", "b a"):
        (data / "train.bin").write_text(words)
        (data / "preprocess.log").write_text(f"run {len(found)}")  # has the time
        monkeypatch.setenv("OMP_NUM_THREADS", "1" if found else "2")
        command(*RUN, "--only", "A", "--again")
        found.append(content(toy)["runs"][0])
        shutil.rmtree(toy / "runs")
    assert found[0]["data"] != found[1]["data"] == found[2]["data"] and len(found[0]["data"]) == 12
    assert [run["threads"] for run in found] == [2, 1, 1]


def test_a_folder_without_prepared_text_has_no_checksum(command, toy):
    command(*RUN, "--only", "A")
    assert content(toy)["runs"][0]["data"] is None


@pytest.fixture
def text(toy):
    """A function that makes the toy's text another one."""
    data = toy / "prepared"
    data.mkdir()
    script(toy, DRY, f"    echo fairseq-train {data}")

    def write(words):
        (data / "train.bin").write_text(words)

    return write


def refused(toy, command, *words, what):
    """The command trains nothing, changes nothing, and says which runs cannot be compared."""
    calls(toy)
    path = toy / "results" / "table7.json"
    before = path.read_text() if path.exists() else None
    status, _, errors = command(*words)
    assert status == 2 and calls(toy) == [] and (path.read_text() if path.exists() else None) == before
    assert f"/runs/table7-small and the results: their runs would be of different {what}: " in one_line(errors)
    assert "; --out FOLDER --results FOLDER keep them apart" in errors


def test_runs_of_another_text_are_not_compared(command, toy, text):
    text("a")
    command(*RUN, "--only", "softmax")
    text("b")
    refused(toy, command, *RUN, what="texts (SHA-256)")
    assert command(*RUN, "--only", "softmax")[0] == 0  # as it was
    (toy / "results").rename(toy / "aside")
    refused(toy, command, *RUN, what="texts (SHA-256)")  # --out has them, too
    (toy / "runs").rename(toy / "out aside")
    assert command(*RUN)[0] == 0
    (toy / "aside" / "table7.json").replace(toy / "results" / "table7.json")
    refused(toy, command, *RUN, "--only", "A", what="texts (SHA-256)")  # done, with a base of another text
    assert command(*RUN)[0] == 0 and len({run["data"] for run in content(toy)["runs"]}) == 1  # all are replaced


@pytest.mark.parametrize("digest", [None, "0123456789ab"])
def test_results_of_labels_that_the_grid_had_before_are_compared_by_their_flags(digest, command, toy, text):
    text("a")
    command(*RUN, "--only", "softmax,A")

    def renamed(part):
        part["axes"]["attention"] = ["before", "A"]
        part["runs"][0].update({"labels": ["before"], "digest": digest or part["runs"][0]["digest"]})

    edit(toy, renamed)
    edit(toy, lambda part: part["runs"].pop(1))
    shutil.rmtree(toy / "runs")
    text("b")
    if digest is None:
        refused(toy, command, *RUN, "--only", "A", what="texts (SHA-256)")
    else:  # of a row that the grid has no more
        status, _, errors = command(*RUN, "--only", "A")
        assert status == 0 and "1 runs of other flags" in errors
        assert [run["labels"] for run in content(toy)["runs"]] == [["A"]]


def test_a_run_that_was_begun_goes_on_with_its_text(command, toy, text):
    text("a")
    script(toy, "mkdir -p", '[[ -e $(dirname "$0")/whole ]] || exit 1\nmkdir -p')
    assert command(*RUN, "--only", "A")[0] == 1
    text("b")
    refused(toy, command, *RUN, "--only", "A", what="texts (SHA-256)")
    text("a")
    (toy / "examples" / "toy" / "whole").touch()
    assert command(*RUN, "--only", "A")[0] == 0


def test_results_of_another_text_are_not_taken_from_another_table(command, toy, text):
    text("a")
    command(*RUN, "--only", "A")
    grids = toy / "examples" / "grids"
    for whole, path in ((FULL, "mixhead_table_8.toml"), (SMALL, "small/mixhead_table_8.toml")):
        (grids / path).write_text(whole)
    shutil.rmtree(toy / "runs")
    text("b")
    calls(toy)
    status, _, errors = command("run", "table8", *RUN[2:])
    assert status == 2 and calls(toy) == [] and "of different texts" in one_line(errors)
    assert not (toy / "results" / "table8.json").exists()


def test_runs_in_another_precision_of_the_machine_are_not_compared(command, toy, monkeypatch):
    script(toy, DRY, ON_GPUS)
    command(*RUN, "--only", "softmax")
    monkeypatch.setenv("GPUS", "0")
    refused(toy, command, *RUN, what="precisions")
    monkeypatch.setenv("GPUS", "2")
    assert command(*RUN)[0] == 0


@pytest.mark.parametrize("apart", [True, False])
def test_rows_whose_recipe_takes_another_text_are_not_compared_with_the_others(apart, command, toy):
    """As the tasks of GLUE are; rows of one folder are, also where they are not side by side in the table."""
    axes = '[axes.task]\n1 = "--task 1"\n2 = "--task 2"\n[axes.attention]'
    for whole, name in ((FULL, "mixhead_table_7.toml"), (SMALL, "small/mixhead_table_7.toml")):
        rows = whole.partition("[published]")[0].replace("[axes.attention]", axes)
        (toy / "examples" / "grids" / name).write_text(rows)
    folder = '$(dirname "$0")' + ("/$task" if apart else "")
    script(toy, DRY, f'    task=1; [[ $* != *"--task 2"* ]] || task=2\n    echo fairseq-train "{folder}"')
    for task in ("1", "2"):
        (toy / "examples" / "toy" / task).mkdir()
        (toy / "examples" / "toy" / task / "train.bin").write_text(task)
    assert command(*RUN, "--only", "1")[0] == 0
    if apart:
        shutil.rmtree(toy / "examples" / "toy" / "1")  # of rows that are not to be trained none is needed here
    (toy / "examples" / "toy" / "2" / "train.bin").write_text("another")
    calls(toy)
    status, _, errors = command(*RUN, "--only", "2")
    if apart:
        assert (status, errors) == (0, "") and len(content(toy)["runs"]) == 6
    else:
        assert status == 2 and calls(toy) == [] and "of different texts" in one_line(errors)


@pytest.mark.parametrize(
    "new, reason",
    [
        ("    echo fairseq-train {toy}/nowhere", "{toy}/nowhere: no such folder; examples/toy/prepare.sh makes it"),
        ("    echo no GPU is free >&2; exit 3; :", "examples/toy/train.sh: no GPU is free"),
        ("    exit 4; :", "examples/toy/train.sh: ended with status 4"),
    ],
)
def test_what_cannot_begin_is_said_once_and_before_any_training(new, reason, command, toy):
    script(toy, DRY, new.replace("{toy}", str(toy)))
    status, printed, errors = command(*RUN)
    assert (status, printed, calls(toy)) == (2, "", [])
    assert one_line(errors) == f"reproduce: error: {reason.replace('{toy}', str(toy))}\n"


def test_costs_of_other_flags_than_the_scripts_have_leave_the_results(command, toy):
    command("cost", "table7", "--scale", "small", "--rounds", "1")
    command(*RUN, "--only", "A")
    assert "cost" in content(toy)
    script(toy, "--max-tokens 40", "--max-tokens 80")
    _, _, errors = command(*RUN, "--only", "A")
    assert "reproduce: table7, small: costs of other flags leave the results\n" in errors and "cost" not in content(toy)


def test_what_was_written_down_before_starts_were_listed_is_read(command, toy, checkout):
    checkout("one")
    command(*RUN, "--only", "A")
    (path,) = (toy / "runs" / "table7-small").glob("*/about.json")
    old = {"load": 2.19, "cpu": "an old CPU", "versions": {"python": "2"}, "commit": "zero", "date": "long ago"}
    path.write_text(json.dumps(old))
    checkout("two")
    command(*RUN, "--only", "A")
    (run,) = content(toy)["runs"]
    assert {name: run[name] for name in ("load", "versions", "commit", "date")} == {
        name: old[name] for name in ("load", "versions", "commit", "date")
    }
    assert run["device"] == "an old CPU" and run["flags"] is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"starts": 3}', '{"starts": [1]}', "null"])
def test_a_broken_about_is_none(text, tmp_path):
    (tmp_path / "about.json").write_text(text)
    assert provenance.read(tmp_path) == provenance.History()


def test_a_working_tree_that_differs_is_said_before_the_training(command, toy, checkout):
    checkout("abc+")
    _, _, errors = command(*RUN, "--only", "A")
    assert one_line(errors).startswith("reproduce: the code is not as in commit abc: ")
    assert content(toy)["runs"][0]["commit"] == "abc+"
    assert command(*RUN, "--only", "A")[2] == ""  # nothing begins
    assert command("run", "table7", "--scale", "tiny", "--seeds", "1")[2] == ""
