"""What is written of runs and when, where it cannot be written or read, several at a time, and how a command ends."""

# ruff: noqa: F811 (fixtures of another file)

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_reproduce import (  # noqa: F401 (two are fixtures)
    ROOT,
    calls,
    command,
    content,
    reproduce,
    sweep,
    toy,
)

from reproduction import (  # isort: skip (found where scripts/reproduce.py looks)
    identity, provenance, recipes, report, results, running, schema, spectra,
)  # fmt: skip

RUN = ["run", "table7", "--scale", "small", "--seeds", "1"]


def trained(toy):
    """The --head-mixing of what was trained since the last call."""
    return [call.rpartition(" ")[2] for call in calls(toy) if call.startswith("train ")]


def script(toy, old, new):
    path = toy / "examples" / "toy" / "train.sh"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def grid(toy, old, new, name="small/mixhead_table_7.toml"):
    path = toy / "examples" / "grids" / name
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


def edit(toy, change, table="table7"):
    """Of the table's file, by hand."""
    path = toy / "results" / f"{table}.json"
    found = json.loads(path.read_text())
    change(found["scales"]["small"])
    path.write_text(json.dumps(found))


def one_line(errors):
    assert errors.count("\n") == 1 and "Traceback" not in errors, errors
    return errors


# ---- the report and the figures --------------------------------------------------------------------------------------


@pytest.fixture
def drawn(toy, monkeypatch):
    found = []
    monkeypatch.setattr(
        reproduce, "draw", lambda folder, studies, again=False: found.append([(s.table, s.scale) for s in studies])
    )
    return found


def rendered(toy):
    return (toy / "results" / "README.md").read_text() == report.render(results.studies(toy / "results"))


@pytest.mark.parametrize(
    "how, expected",
    [("well", 0), ("exit 3", 1), ("kill -INT $PPID; sleep 30", 130), ("kill -TERM $PPID; sleep 30", 143)],
)
def test_the_report_follows_the_numbers_however_a_command_ends(how, expected, command, toy, drawn):
    if how != "well":
        script(toy, "mkdir -p", f"if [[ $* == *average* ]]; then {how}; fi\nmkdir -p")
    assert command(*RUN)[0] == expected
    assert rendered(toy) and drawn == [[("table7", "small")]]
    assert len(content(toy)["runs"]) == (3 if how == "well" else 2)


def test_the_report_follows_every_run(command, toy, monkeypatch):
    """Also of a command that is killed."""
    found = []
    own = running.Keeper.and_says
    monkeypatch.setattr(running.Keeper, "and_says", lambda *a: (own(*a), found.append(rendered(toy)))[0])
    command(*RUN)
    assert found == [True] * 3


def test_the_report_follows_costs(command, toy):
    command("cost", "table7", "--scale", "small", "--rounds", "1")
    assert rendered(toy)


def test_nothing_is_rendered_of_what_was_only_tried(command, toy, drawn):
    assert command("run", "table7", "--scale", "tiny", "--seeds", "1")[0] == 0
    assert drawn == [[("table7", "tiny")]] and not (toy / "results" / "README.md").exists()


def test_a_report_of_somebody_else_is_not_replaced(command, toy):
    (toy / "results").mkdir()
    path = toy / "results" / "README.md"
    path.write_text("# My own\n")
    status, _, errors = command(*RUN, "--only", "A")
    assert f"{path}: is no report of this program, and is not replaced; --results sets another folder" in errors
    assert status == 1 and path.read_text() == "# My own\n" and len(content(toy)["runs"]) == 1
    status, _, errors = command("report")
    assert status == 2 and one_line(errors) and path.read_text() == "# My own\n"


def test_a_dry_run_writes_nothing(command, toy, drawn, monkeypatch):
    monkeypatch.setenv("DRY_RUN", "1")
    assert command(*RUN)[0] == 0 and drawn == [] and not (toy / "results").exists()


# ---- trouble while runs are going on ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mended", [False, True])
def test_a_conflict_in_the_results_is_said_at_once_and_loses_nothing(mended, command, toy, monkeypatch):
    own = toy / "results" / "table7.json"
    wait = "for _ in {1..200}; do if grep -q {what} {where}; then break; fi; sleep 0.05; done"  # for the other thread
    kept = wait.replace("{what}", "seed").replace("{where}", f'"{own}"')
    told = wait.replace("{what}", "^said").replace("{where}", f'"{toy}/examples/toy/calls"')
    conflict = f'[[ $* != *independent* ]] || {{ {kept}; cp "{own}" "{toy}/good"; echo "<<<<<<< HEAD" > "{own}"; }}'
    repair = f'[[ $* != *average* ]] || {{ {told}; {f"""cp "{toy}/good" "{own}" """ if mended else ":"}; }}'
    script(toy, "mkdir -p", f"{conflict}\n{repair}\nmkdir -p")

    def said(message):
        with (toy / "examples" / "toy" / "calls").open("a") as file:
            file.write(f"said {message}\n")

    monkeypatch.setattr(running, "warn", said)
    status, printed, _ = command(*RUN)
    assert "[3/3]" in printed and status == (0 if mended else 1)
    made = calls(toy)
    told = [call for call in made if call.startswith("said")]
    assert len(told) == (1 if mended else 2)
    assert f"{own}: cannot be read: " in told[0] and "the runs go on" in told[0]
    assert any(call.startswith("evaluate") for call in made[made.index(told[0]) :])  # average is evaluated after it
    if not mended:
        assert f"not in {own}: 1_A, 1_average; " in told[-1] and own.read_text() == "<<<<<<< HEAD\n"
        (toy / "good").replace(own)
        assert command(*RUN)[0] == 0 and calls(toy) == []
    assert [run["labels"] for run in content(toy)["runs"]] == [["softmax"], ["A"], ["average"]] and rendered(toy)


@pytest.mark.parametrize("before, writes", [(0, 0), (0, 1), (0, 2), (2, 1), (0, 100)])
@pytest.mark.parametrize(
    "file, said",
    [
        ("table7.json", ["table7.json: 1_softmax, 1_A, 1_average"]),
        ("README.md", ["README.md: cannot be written: No space left on device"]),
    ],
)
def test_a_full_disk_is_one_line_and_loses_nothing(file, said, before, writes, command, toy, monkeypatch):
    """It is full for some writings, after `before` others; the last run's may be among them."""
    free = iter([True] * before + [False] * writes)
    replace = Path.replace

    def full(path, target):
        if Path(target).name == file and not next(free, True):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", full)
    status, _, errors = command(*RUN)
    assert len(trained(toy)) == 3 and status == (1 if writes == 100 else 0)
    assert [line.split("results/")[1].split(";")[0] for line in errors.splitlines()] == [
        *[f"{file}: cannot be written: No space left on device"] * (writes > 0),
        *(said if writes == 100 else []),
    ]
    assert not list((toy / "results").glob("*.unfinished"))
    monkeypatch.setattr(Path, "replace", replace)
    assert command(*RUN)[0] == 0 and calls(toy) == []
    assert len(content(toy)["runs"]) == 3 and rendered(toy)


def test_trouble_before_anything_is_trained_ends_at_once(command, toy, monkeypatch):
    command(*RUN, "--only", "softmax")
    calls(toy)

    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(sweep, "write_text", full)
    status, _, errors = command(*RUN)
    assert status == 2 and calls(toy) == [] and "table7.json: cannot be written: No space left" in one_line(errors)


# ---- files that are not as they should be ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{", "[]", '{"table": "x"}'])
def test_other_files_may_lie_beside_the_tables(text, command, toy):
    (toy / "results").mkdir()
    (toy / "results" / "notes.json").write_text(text)
    for words in (RUN, ["cost", *RUN[1:4], "--rounds", "1"], ["report"]):
        status, _, errors = command(*words)
        assert (status, errors) == (0, "")
    assert (toy / "results" / "notes.json").read_text() == text


NAN = float("nan")
WRONG = [
    ("title", None), ("published", None), ("published", {"A": 1}), ("published_metrics", [1]),
    ("published", {"A": "x/y"}), ("published", {"A": "1..2"}), ("published", {"A": "1/"}),
    ("scales/small/axes", []), ("scales/small/axes", {}), ("scales/small/axes/attention", []),
    ("scales/small/axes/attention", "A"), ("scales/small/metrics", []), ("scales/small/metrics", [1]),
    ("scales/small/better", "more"), ("scales/small/measure", 3), ("scales/small/title", None),
    ("scales/small/runs", {}), ("scales/small/runs/0", []), ("scales/small/recipe", {}),
    ("scales/small/paper", {"updates": 1}), ("scales/small/paper/parameters", "x"), ("scales/small/about", 1),
    ("scales/small/axes/heads", ["four"]), ("scales/small/runs/0/labels", ["Z"]),
    ("scales/small/runs/0/values", {"test": 0}), ("scales/small/runs/0/threads", 0),
    ("scales/small/runs/0/data", 5),
    ("scales/small/runs/0/values", None), ("scales/small/runs/0/values", {"test": None}),
    ("scales/small/runs/0/values", {"test": NAN}), ("scales/small/runs/0/values", {"test": True}),
    ("scales/small/runs/0/values", {"test": "90"}), ("scales/small/runs/0/labels", None),
    ("scales/small/runs/0/labels", []), ("scales/small/runs/0/labels", [1]),
    ("scales/small/runs/0/labels", ["A", "B"]), ("scales/small/runs/0/seed", "x"), ("scales/small/runs/0/seed", 0),
    ("scales/small/runs/0/seed", None), ("scales/small/runs/0/seed", 1.5), ("scales/small/runs/0/digest", 1),
    ("scales/small/runs/0/evaluate", None), ("scales/small/runs/0/evaluate", {"test": None}),
    ("scales/small/runs/0/versions", "x"), ("scales/small/runs/0/versions", {"torch": None}),
    ("scales/small/runs/0/train", []), ("scales/small/runs/0/flags", {"--lr": 1}),
    ("scales/small/runs/0/commit", 5), ("scales/small/runs/0/device", {}), ("scales/small/runs/0/updates", "30"),
    ("scales/small/runs/0/valid_loss", NAN), ("scales/small/runs/0/wall_seconds", "x"),
    ("scales/small/runs/0/spectrum", {"length": 8, "windows": 1, "places": {}}),
    ("scales/small/runs/0/spectrum",
     {"length": 1, "windows": 1, "places": {"cross": {"mean_effective_rank": 1, "mean_cumulative": [1]}}}),
    ("scales/small/runs/0/spectrum",
     {"length": 3, "windows": 1, "places": {"decoder": {"mean_effective_rank": 1, "mean_cumulative": [1]}}}),
    ("scales/small/runs/0/spectrum", None), ("scales/small/runs/0/spectrum", {"length": 8}),
    ("scales/small/runs/0/spectrum", {"length": 8, "windows": 0, "places": {"decoder": {"mean_effective_rank": 1}}}),
    ("scales/small/runs/0/spectrum",
     {"length": 8, "windows": 1, "places": {"decoder": {"mean_effective_rank": NAN, "mean_cumulative": [1]}}}),
    ("scales/small/cost", {}), ("scales/small/cost", None), ("scales/small/cost/rows", None),
    ("scales/small/cost/rows/0", {}), ("scales/small/cost/rows/0/labels", None),
    ("scales/small/cost/rows/0/seconds_per_update", NAN), ("scales/small/cost/rows/0/time_ratios", []),
    ("scales/small/cost/rows/0/peak_memory_mib", None),
    ("scales/small/cost/load_before", None), ("scales/small/cost/load_after", "x"),
]  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A table's file that is as it should be; made once."""
    return tmp_path_factory.mktemp("good") / "table7.json"


@pytest.mark.parametrize("words", [RUN, ["report"], ["list"]], ids=lambda words: words[0])
@pytest.mark.parametrize("path, value", WRONG)
def test_a_malformed_file_is_one_line(path, value, words, command, toy, good):
    if not good.exists():
        command(*RUN)
        command("cost", "table7", "--scale", "small", "--rounds", "1")
        good.write_text((toy / "results" / "table7.json").read_text())
    (toy / "results").mkdir(exist_ok=True)
    found = json.loads(good.read_text())
    assert schema.wrong(found, "table7") == ""
    *before, last = [int(name) if name.isdecimal() else name for name in path.split("/")]
    inner = found
    for name in before:
        inner = inner[name]
    inner[last] = value
    text = json.dumps(found)
    (toy / "results" / "table7.json").write_text(text)
    calls(toy)
    status, _, errors = command(*words)
    where = path.replace("/0", "[0]").replace("/", ".").removesuffix(".attention")  # an axis is part of all
    assert status == 2 and f"results/table7.json: {where}" in one_line(errors)
    assert calls(toy) == [] and (toy / "results" / "table7.json").read_text() == text


def test_a_run_that_is_there_twice_is_one_line(command, toy):
    command(*RUN)
    edit(toy, lambda part: part["runs"][1].update(labels=["softmax"]))
    status, _, errors = command("report")
    assert status == 2 and "scales.small.runs[1]: softmax with seed 1 is there twice" in one_line(errors)


def test_the_loss_of_a_training_that_diverged_is_kept_as_none(command, toy):
    script(toy, "on 'valid' subset | loss 8.25", "on 'valid' subset | loss nan")
    assert command(*RUN, "--only", "A")[0] == 0 and "NaN" not in (toy / "results" / "table7.json").read_text()
    assert content(toy)["runs"][0]["valid_loss"] is None and command("report")[0] == 0


# ---- the paper's size ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus, forced, said", [([], None, True), (["0"], None, False), (["0"], "0", True)])
def test_the_papers_size_on_a_cpu_is_said_with_its_hours(gpus, forced, said, command, toy, monkeypatch):
    from reproduction import estimates

    hours = {"none": 30.25, "average": 1000.5}
    monkeypatch.setattr(sweep, "visible_gpus", lambda: gpus)
    if forced:
        monkeypatch.setenv("GPUS", forced)
    some = estimates.Estimate(*range(len(estimates.Estimate._fields)))
    monkeypatch.setattr(estimates, "estimate", lambda run: some._replace(gpu_hours=hours[run.train[-1]]))
    status, printed, errors = command("run", "table7", "--seeds", "2", "--only", "softmax,average")
    line = "no GPU here: 4 runs that take about 2,062 hours on an H100; --scale small is for such machines\n"
    assert (status, errors) == (0, "") and (line in printed) == said
    if said:
        assert printed.index(line) < printed.index("[1/4]")
    assert "no GPU" not in command("run", "table7", "--seeds", "2", "--only", "softmax,average")[1]  # all done


# ---- runs at a time, commands at a time ------------------------------------------------------------------------------


def test_two_runs_at_a_time_are_all_kept(command, toy):
    """Each waits until two are going on."""
    going = toy / "examples" / "toy" / "going"
    going.mkdir()
    wait = f"touch {going}/$$; until (($(ls {going} | wc -l) > 1)); do sleep 0.02; done"
    script(toy, "mkdir -p", f"{wait}\nmkdir -p")
    status, _, errors = command("run", "table7", "--scale", "small", "--seeds", "2", "--jobs", "2")
    assert (status, errors) == (0, "") and len(trained(toy)) == 6
    assert [(run["labels"][0], run["seed"]) for run in content(toy)["runs"]] == [
        (label, seed) for label in ("softmax", "A", "average") for seed in (1, 2)
    ]


DRIVER = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
import reproduce, sweep
from reproduction import provenance, running, tables
sweep.EXAMPLES = Path(sys.argv[2]) / "examples"
tables.MEASURES["toy"] = tables.PERPLEXITY
provenance.about, provenance.commit = lambda: {"cpu": "a CPU"}, lambda: None
reproduce.draw = lambda *arguments, **options: None
exec(sys.argv[3])
sys.exit(reproduce.main(sys.argv[4:]))
"""


def beside(toy, before, *words):
    """The command in a process of its own, after `before`."""
    where = ["--out", str(toy / "runs"), "--results", str(toy / "results")]
    started = [sys.executable, "-c", DRIVER, str(ROOT / "scripts"), str(toy), before, *words, *where]
    return subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_run_of_another_command_is_left_out(command, toy):
    folder = toy / "examples" / "toy"
    script(
        toy,
        "mkdir -p",
        f'[[ $* != *none* ]] || touch "{folder}/begun"\n'
        f"[[ $* != *none* ]] || for _ in {{1..3000}}; do [[ -e {folder}/go ]] && break; sleep 0.02; done\nmkdir -p",
    )
    first = beside(toy, "", *RUN, "--only", "softmax")
    try:
        until((folder / "begun").exists)
        status, _, errors = command(*RUN, "--only", "softmax,A")
        assert status == 1 and one_line(errors).startswith("reproduce: left out: 1_softmax: being run by another sweep")
        assert [run["labels"] for run in content(toy)["runs"]] == [["A"]]
        (folder / "go").touch()
        _, errors = first.communicate(timeout=60)
    finally:
        (folder / "go").touch()  # for what outlives the command
        first.kill()
    assert (first.returncode, errors) == (0, "")
    assert [run["labels"] for run in content(toy)["runs"]] == [["softmax"], ["A"]] and rendered(toy)
    assert sorted(trained(toy)) == ["none", "position-independent"]


def test_what_was_killed_before_it_was_written_is_kept_without_training(command, toy):
    kill = "running.Keeper.and_says = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)"
    killed = beside(toy, kill, *RUN, "--only", "A")
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL and len(calls(toy)) == 3
    assert not (toy / "results" / "table7.json").exists()
    status, printed, _ = command(*RUN, "--only", "A")
    assert status == 0 and calls(toy) == [] and "1 runs, 1 of them done before" in printed
    assert content(toy)["runs"][0]["values"] == {"valid": 95.1, "test": 90.1} and rendered(toy)


@pytest.mark.parametrize("words", [RUN, ["run", *RUN[1:], "--again"]])
def test_what_another_command_goes_on_with_is_not_of_the_recipe_of_now(words, command, toy, monkeypatch):
    monkeypatch.setattr(sweep, "PATIENCE", 0.1)
    command(*RUN, "--only", "softmax,A")
    (folder,) = (toy / "runs" / "table7-small").glob("1_softmax-*")
    script(toy, "--max-tokens 40", "--max-tokens 80")
    calls(toy)
    with (folder / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status, printed, errors = command(*words, "--only", "softmax,A")
    assert status == 1 and "1 runs, 0 of them done before" in printed and trained(toy) == ["position-independent"]
    others = "of other flags than examples/toy/train.sh has now (--max-tokens)"
    assert f"reproduce: left out: 1_softmax: {others}, being run by another sweep; its folder: {folder}\n" in errors
    assert [run["labels"] for run in content(toy)["runs"]] == [["A"]]
    assert command(*RUN, "--only", "softmax,A")[0] == 0 and trained(toy) == ["none"]


# ---- how a command ends ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["report"]])
def test_a_reader_that_has_enough_is_no_error(words, command, toy):
    command(*RUN, "--only", "A")
    with beside(toy, "", *words) as process:
        process.stdout.close()  # before anything is printed
        errors = process.stderr.read()
    assert (process.returncode, errors) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    "words, where",
    [
        (["list"], "reproduce.listing.of_table"),
        (["report"], "reproduce.keeping.write_report"),
        (["spectrum", *RUN[1:4]], "reproduce.spectra.groups"),
        (RUN, "reproduce.keeping.comparable"),
    ],
)
def test_an_interruption_is_one_line(words, where, command, toy):
    command(*RUN, "--only", "A")
    interrupted = beside(toy, f"{where} = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)", *words)
    _, errors = interrupted.communicate(timeout=60)
    assert (interrupted.returncode, errors) == (130, "reproduce: interrupted\n")


def test_an_interrupted_analysis_says_nothing_of_its_own(command, toy, spectrum):
    """Ctrl-C reaches every process of the command's group."""
    python = toy / "python"
    command(*RUN, "--only", "A")
    python.write_text(
        f"#!{sys.executable}\nimport os, pathlib, sys, time\n"
        f"pathlib.Path({str(toy / 'begun')!r}).write_text(str(os.getpid()))\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('Traceback', file=sys.stderr)\n"
    )
    before = f"os.setpgid(0, 0); provenance.python_of_the_recipes = lambda: {str(python)!r}"
    process = beside(toy, before, "spectrum", *RUN[1:4])
    try:
        until(lambda: (toy / "begun").exists() and (toy / "begun").read_text())
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)  # the analysis has its end of the pipe, too, as long as it lives
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, "reproduce: interrupted\n")


@pytest.mark.parametrize("file", [None, "/somewhere/file"])
def test_an_error_of_the_system_is_one_line(file, command, toy, monkeypatch):
    def fails(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO), *([file] if file else []))

    monkeypatch.setattr(reproduce.listing, "of_table", fails)
    status, printed, errors = command("list")
    assert (status, printed) == (2, "") and "Input/output error" in one_line(errors) and (file or "") in errors


def test_a_folder_that_cannot_be_locked_is_one_line(command, toy, monkeypatch):
    """As on a network's file system."""
    flock = fcntl.flock

    def refuses(file, how):
        if how == fcntl.LOCK_EX:  # without a limit: of the results
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return flock(file, how)

    command(*RUN, "--only", "A")
    monkeypatch.setattr(fcntl, "flock", refuses)
    status, _, errors = command("report")
    assert status == 2 and f"{toy}/results: cannot be locked: Bad file descriptor" in one_line(errors)


def test_a_folder_that_cannot_be_set_aside_is_one_line(command, toy, monkeypatch):
    command(*RUN, "--only", "A")
    script(toy, "--max-tokens 40", "--max-tokens 80")
    calls(toy)

    def refuses(path, target):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "rename", refuses)
    status, _, errors = command(*RUN, "--only", "A")
    assert status == 2 and "cannot be set aside: Permission denied" in one_line(errors) and calls(toy) == []


@pytest.mark.parametrize("name", ["cost", "spectrum"])
def test_what_has_no_dry_run_is_refused(name, command, toy, monkeypatch):
    command(*RUN, "--only", "A")
    calls(toy)
    monkeypatch.setenv("DRY_RUN", "1")
    status, _, errors = command(name, *RUN[1:4])
    assert (status, calls(toy)) == (2, []) and f"DRY_RUN=1: `{name}` has no dry run" in one_line(errors)


def test_a_dry_run_is_of_the_folders_that_are_run_in(command, toy, monkeypatch):
    for name in ("train", "evaluate"):
        path = toy / "examples" / "toy" / f"{name}.sh"
        says = f'echo "{name} $SAVE $*" >> {toy}/said\n'
        path.write_text(path.read_text().replace("bash\n", f"bash\n{says}[[ ! ${{DRY_RUN:-}} ]] || exit 0\n", 1))
    grid(toy, 'test = ""', 'test = "--results-path {save}/x --plugin {root}/y"')
    monkeypatch.setattr(recipes, "printed", lambda *arguments: ())  # asks the scripts too
    found = []
    for dry in ("1", ""):
        monkeypatch.setenv("DRY_RUN", dry)
        assert command(*RUN)[0] == 0
        found.append([line for line in (toy / "said").read_text().splitlines() if "/checkpoints" in line])
        (toy / "said").unlink()
        assert (toy / "runs" / "table7-small").exists() == (not dry)
    assert len(found[0]) == 9 and found[0] == found[1]


# ---- spectra ---------------------------------------------------------------------------------------------------------

SPECTRUM = """#!/usr/bin/env python3
import json, pathlib, sys
words = sys.argv[1:]
assert words[:3] == ["-m", "mixhead_plugin.analysis", "spectrum"]
labels = words[words.index("--labels") + 1].split(",")
paths = words[3 : words.index("--labels")]
assert len(labels) == len(paths)
models = {
    label: {"windows": 4, "places": {"decoder-self": {
        "mean_effective_rank": len((pathlib.Path(path).parent / "flags").read_text()), "mean_cumulative": [0.5, 1]}}}
    for label, path in zip(labels, paths)
}
folder = pathlib.Path(words[words.index("--output") + 1])
folder.mkdir(parents=True, exist_ok=True)
(folder / "spectrum.json").write_text(json.dumps({"length": 2, "models": models}))
"""


@pytest.fixture
def spectrum(toy, monkeypatch):
    """In place of the analysis: the rank of a model is the length of its flags."""
    path = toy / "python"
    path.write_text(SPECTRUM)
    path.chmod(0o755)
    monkeypatch.setattr(provenance, "python_of_the_recipes", lambda: str(path))


def test_ranks_are_compared_within_a_seed_and_the_other_axes():
    axes = {"tokens": ["32", "64"], "attention": ["softmax", "A"]}

    def pair(seed, *labels):
        run = sweep.Run("toy", {"seed": str(seed), **dict(zip(axes, labels))}, (), {})
        return identity.Pair(run, run), Path(f"{seed}-{'-'.join(labels)}")

    found = [pair(seed, *row) for seed in (1, 2) for row in (("32", "softmax"), ("32", "A"), ("64", "A"))]
    grouped = spectra.groups(found, axes)
    assert {name: [str(path) for _, path in group] for name, group in grouped.items()} == {
        "32_seed_1": ["1-32-softmax", "1-32-A"],
        "64_seed_1": ["1-64-A"],
        "32_seed_2": ["2-32-softmax", "2-32-A"],
        "64_seed_2": ["2-64-A"],
    }
    without = spectra.groups([pair(1, "32", "A"), pair(1, "64", "A")], axes)  # softmax is not trained yet
    assert [len(group) for group in without.values()] == [1, 1]
    by_tokens = spectra.groups([pair(1, "32", "A"), pair(1, "64", "A")], {"tokens": ["32", "64"], "mixing": ["A"]})
    assert len(by_tokens) == 2


def test_a_run_is_one_line_of_the_file(command, toy):
    command("run", "table7", "--scale", "small", "--seeds", "1")
    command("cost", "table7", "--scale", "small", "--rounds", "1")
    text = (toy / "results" / "table7.json").read_text()
    content = json.loads(text)
    part = content["scales"]["small"]
    lines = {line.strip().rstrip(",") for line in text.splitlines()}
    for entry in [*part["runs"], *part["cost"]["rows"]]:
        assert json.dumps(entry) in lines
    assert content["published"]["A"] == "21.20/20.48" and part["axes"]["attention"][0] == "softmax"
