"""fairseq's parsers take the commands of every recipe's README.

recipe.sh keeps its promises.
"""

import re
import shlex
from collections import OrderedDict
from dataclasses import fields

import pytest
import sweep
import torch
from common import average as averaging
from common.average import average, last_checkpoints
from fairseq.dataclass.configs import DistributedTrainingConfig
from fairseq.distributed import utils as distributed_utils
from omegaconf import OmegaConf
from recipes import EXAMPLES, READMES, ROOT, commands_of, dry_run, parse, refusal, script
from studies.commands import grid_of
from studies.runs import runs

pytestmark = pytest.mark.usefixtures("plain_environment")
# they train without fairseq; test_synthetic.py runs them
SYNTHETIC = {"recall", "nearest_neighbour"}
RECIPES = sorted({path.parent.name for path in EXAMPLES.glob("*/train.sh")} - SYNTHETIC)

# Programs that start a script on many GPUs. What the script reads of them is tested below;
# tests/cluster has a SLURM.
LAUNCHER = re.compile(
    r"(?:torchrun(?: -\S+(?: \d+)?)*|sbatch(?: -\S+)* examples/slurm\.sbatch) (?=examples/)"
)
# of many commands
LONG = ("glue", "iwslt14_de_en", "lm1b", "pretraining", "squad", "wikitext103", "wikitext2")


def dry_runs(lines):
    """Run lines of shell dry in one shell.

    Return the status of each and the fairseq commands that it prints.
    """
    whole = "\n".join(f"(\n{line}\n); echo ends: $?" for line in lines)
    found = []
    commands = []
    for printed in script(whole, DRY_RUN=1).stdout.splitlines():
        if printed.startswith("ends: "):
            found.append((int(printed.removeprefix("ends: ")), commands))
            commands = []
        elif printed.startswith("fairseq-"):
            commands.append(shlex.split(printed))
    return found


def taken(command):
    try:
        return parse(command)
    except SystemExit:
        return None


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=str(path.relative_to(ROOT)),
            marks=pytest.mark.slow if path.parent.name in LONG else (),
        )
        for path in READMES
        if commands_of(path.read_text()) and path.parent.name not in SYNTHETIC
    ],
)
def test_fairseq_takes_every_command_of_a_readme(path, capfd):
    commands = list(
        dict.fromkeys(LAUNCHER.sub("", command) for command in commands_of(path.read_text()))
    )
    scripts = [command for command in commands if "sweep.py" not in command]
    # test_sweep.py checks the commands of its runs
    for command in set(commands).difference(scripts):
        args, extra = sweep.arguments(shlex.split(command)[1:])
        assert runs(grid_of(ROOT / args.grid, extra), args.seeds, args.only)
    for command, (status, found) in zip(scripts, dry_runs(scripts), strict=True):
        assert status == 0 and (found or "prepare.sh" in command) and all(map(taken, found)), (
            command
        )
    if not (path.parent / "train.sh").exists():
        return
    assert all(
        f"{path.parent.name}/{name}.sh" in " ".join(scripts)
        for name in ("prepare", "train", "evaluate")
    )
    # In tables, flags alone are added to one of the scripts.
    tables = r"(?m)(?<=`)(?:[A-Z]+=\S+ )*--[^`\n]+ [^`\n]+(?=`.*\|$)"
    for flags in dict.fromkeys(re.findall(tables, path.read_text())):
        variables, _, words = flags.partition("--")
        found = dry_runs(
            f"{variables}{path.parent}/{name}.sh --{words}"
            for name in ("train", "evaluate", "prepare")
        )
        assert any(status == 0 and all(map(taken, commands)) for status, commands in found), flags


# ---- recipe.sh ---------------------------------------------------------------------------------


def flag(command, name):
    """Return the last value of a flag, the one that counts."""
    return command[len(command) - 1 - command[::-1].index(name) + 1]


GPUS = (0, 1, 2, 4, 8)


def trainings(line):
    """Return train.sh's command for each number of GPUs."""
    lines = [f"GPUS={gpus} {line}" for gpus in GPUS]
    found = {}
    for gpus, (_, commands) in zip(GPUS, dry_runs(lines)):
        (found[gpus],) = commands
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_tokens_of_an_update_do_not_depend_on_the_gpus(recipe):
    found = {}
    for gpus, command in trainings(f"examples/{recipe}/train.sh").items():
        assert flag(command, "--distributed-world-size") == str(max(1, gpus))
        assert ("--cpu" in command, "--fp16" in command) == (gpus == 0, gpus > 0)
        found[gpus] = (
            max(1, gpus) * int(flag(command, "--max-tokens")) * int(flag(command, "--update-freq"))
        )
    assert all(found[1] <= number < found[1] + max(1, gpus) for gpus, number in found.items())


@pytest.mark.parametrize("recipe, rows", [("wikitext103", 60), ("wikitext2", 32), ("lm1b", 224)])
def test_the_rows_of_a_text_with_memory_are_shared_and_rounded_up(recipe, rows):
    """Check the number of rows.

    Fewer of them, with more windows an update, would be another training.
    """
    for gpus, command in trainings(f"MODEL=transformer-xl examples/{recipe}/train.sh").items():
        assert "--update-freq" not in command and "--max-tokens" not in command
        assert int(flag(command, "--batch-size")) == -(-rows // max(1, gpus))


def test_a_number_of_gpus_that_does_not_divide_an_update_is_refused():
    line = "GPUS=3 examples/wikitext2/train.sh"
    message = refusal(script(line, check=False, DRY_RUN=1))
    assert message.startswith(
        "train: error: 3 workers cannot share the 8 batches of an update evenly"
    )
    assert dry_run(f"{line} --update-freq 5")


def test_flags_of_the_user_win():
    (command,) = dry_run(
        "examples/wikitext103/train.sh --max-tokens 7 --lr 0.5 --arch l2_transformer_lm_wiki103_512"
    )
    args = parse(command)
    assert (args.max_tokens, args.lr, args.attention_normalizer) == (7, [0.5], "l2")
    assert args.save_dir == str(
        ROOT / "checkpoints" / "wikitext103" / "l2_transformer_lm_wiki103_512"
    )
    (command,) = dry_run("examples/wikitext103/evaluate.sh --context-window 9", CHECKPOINT="a.pt")
    assert parse(command).context_window == 9


def test_paths_are_taken_from_where_the_user_stands(tmp_path):
    environment = {"DATA": "my data", "SAVE": "my save", "DRY_RUN": 1}
    words = script(f"{EXAMPLES}/wikitext2/train.sh", cwd=tmp_path, **environment).stdout
    assert f"{tmp_path}/my\\ data/lines" in words and f"--save-dir {tmp_path}/my\\ save" in words
    words = script(
        f"AVERAGE=3 {EXAMPLES}/wikitext2/evaluate.sh", cwd=tmp_path, **environment
    ).stdout
    assert f"--path {tmp_path}/my\\ save/average_last_3.pt" in words


@pytest.mark.parametrize(
    "line, message",
    [
        (
            "GPUS=1 DRY_RUN=1 examples/wikitext2/train.sh --cpu",
            "--cpu: this machine has GPUs; give GPUS=0 instead",
        ),
        (
            "GPUS=08 DRY_RUN=1 examples/wikitext2/train.sh",
            "GPUS=08: must be a number such as 0, 1 or 8",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(line, message):
    step = re.search(r"(\w+)\.sh", line)[1]
    result = script(line, check=False, DATA="/nowhere")
    assert refusal(result) == f"{step}: error: {message}"
    assert len(result.stderr.splitlines()) == 1


def test_a_set_or_checkpoint_that_is_not_there_is_refused_before_fairseq_starts(tmp_path):
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "test.idx").touch()
    line = f"DATA={tmp_path} SAVE={tmp_path} examples/wikitext2/evaluate.sh"
    for model in ("vanilla", "masked"):  # each has an evaluation of its own
        (said,) = script(f"MODEL={model} {line}", check=False).stderr.splitlines()
        assert said.startswith(f"evaluate: error: SAVE={tmp_path}: has no checkpoint_best.pt; ")
    message = refusal(script(f"CHECKPOINT=LICENSE {line} --gen-subset nonsense", check=False))
    assert message == f"evaluate: error: --gen-subset nonsense: {tmp_path}/lines has test"


# ---- many processes ----------------------------------------------------------------------------


def ranks(command, monkeypatch, gpus):
    """Return the distributed configuration that fairseq infers from a command.

    The machine has GPUs.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    args = vars(parse(command))  # the whole configuration takes seconds
    cfg = OmegaConf.create(
        {f.name: args[f.name] for f in fields(DistributedTrainingConfig) if f.name in args}
    )
    if cfg.distributed_init_method is None:  # as in fairseq's call_main
        distributed_utils.infer_init_method(cfg)
    return cfg


def test_torchrun_gives_every_process_its_rank(monkeypatch):
    for rank, local in ((0, 0), (13, 5)):
        environment = {
            "WORLD_SIZE": 16,
            "RANK": rank,
            "LOCAL_RANK": local,
            "MASTER_ADDR": "first",
            "MASTER_PORT": 1,
        }
        (command,) = dry_run("MODEL=vanilla examples/wikitext103/train.sh", GPUS=8, **environment)
        cfg = ranks(command, monkeypatch, 8)
        assert (cfg.distributed_world_size, cfg.distributed_rank, cfg.device_id) == (
            16,
            rank,
            local,
        )
        assert cfg.distributed_init_method == "env://" and cfg.distributed_no_spawn
        assert flag(command, "--update-freq") == "2"


@pytest.mark.parametrize("per_node", [1, 4])
def test_fairseq_finds_its_place_under_slurm(per_node, monkeypatch, tmp_path):
    """Start one task on each of two machines, or one for each of eight GPUs.

    fairseq starts the four processes of a machine.
    """
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho first\necho second\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    tasks = 2 * per_node
    for task in (0, tasks - 1):
        environment = {
            "SLURM_JOB_ID": 123,
            "SLURM_STEP_NODELIST": "nodes",
            "SLURM_NNODES": 2,
            "SLURM_STEP_NUM_NODES": 2,
            "SLURM_NTASKS": tasks,
            "SLURM_STEP_NUM_TASKS": tasks,
            "SLURM_NTASKS_PER_NODE": per_node,
            "SLURM_NODEID": task // per_node,
            "SLURM_PROCID": task,
            "SLURM_LOCALID": task % per_node,
        }
        (command,) = dry_run("examples/wikitext103/train.sh", GPUS=4, **environment)
        assert flag(command, "--update-freq") == "1"
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        cfg = ranks(command, monkeypatch, 4)
        assert cfg.distributed_init_method == "tcp://first:10123"
        assert cfg.distributed_world_size == 8
        if per_node == 1:
            assert (cfg.distributed_rank, cfg.distributed_num_procs, cfg.distributed_no_spawn) == (
                4 * task,
                4,
                False,
            )
        else:
            assert (cfg.distributed_rank, cfg.device_id, cfg.distributed_no_spawn) == (
                task,
                task % 4,
                True,
            )


# ---- averaging ---------------------------------------------------------------------------------


def test_the_average_of_the_last_checkpoints(tmp_path, capsys):
    for epoch in (2, 9, 10):  # by number, not by name
        model = {
            "weight": torch.full((2,), float(epoch)),
            "half": torch.ones(1).half() * epoch,
            "steps": torch.tensor(epoch),
        }
        model = OrderedDict(model)
        model._metadata = {"flags": epoch}  # with which a model of the plugin was trained
        state = {"model": model, "cfg": {"model": {}}, "last_optimizer_state": {}}
        torch.save(state, tmp_path / f"checkpoint{epoch}.pt")
    for name in ("checkpoint_best.pt", "checkpoint_1_500.pt"):
        torch.save({"model": {}}, tmp_path / name)
    paths = last_checkpoints(tmp_path, 2)
    assert [path.name for path in paths] == ["checkpoint9.pt", "checkpoint10.pt"]
    average(paths, tmp_path / "average.pt")
    state = torch.load(tmp_path / "average.pt")
    assert state["cfg"] == {"model": {}} and "last_optimizer_state" not in state
    assert (
        state["model"]["weight"].tolist() == [9.5, 9.5]
        and state["model"]["weight"].dtype == torch.float32
    )
    assert (
        state["model"]["half"].tolist() == [9.5] and state["model"]["half"].dtype == torch.float16
    )
    assert state["model"]["steps"] == 10 and state["model"]._metadata == {"flags": 10}
    good = paths[1].read_bytes()
    torch.save(
        {"model": {"weight": torch.tensor([float("nan")] * 2)}, "cfg": {"model": {}}}, paths[1]
    )
    nan = paths[1].read_bytes()
    weight = torch.full((2,), 10.0).numpy().tobytes()
    rotten = good.replace(weight, b"\x01" + weight[1:])
    for content, reason in ((nan, "NaN"), (rotten, "has changed since it was written")):
        paths[1].write_bytes(content)
        with pytest.raises(SystemExit):
            average(paths[1:], tmp_path / "bad.pt")
        assert reason in capsys.readouterr().err and not (tmp_path / "bad.pt").exists()


@pytest.mark.parametrize("number", ["0", "-1", "two", "2.0", "²", ""])
def test_what_is_no_number_of_checkpoints_is_refused(number, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["average", str(tmp_path), "--", number])
    with pytest.raises(SystemExit):
        averaging.main()
    assert capsys.readouterr().err == (
        f"average: error: AVERAGE={number}: must be a number of checkpoints, at least 1\n"
    )
