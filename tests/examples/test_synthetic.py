"""examples/synthetic.py pairs runs by seed, and its recipes run in a sweep."""

import json
import logging
import subprocess
import sys

import pytest
import synthetic
import torch
from nearest_neighbour.run import TASK
from recipes import EXAMPLES, ROOT
from studies import grids
from studies.fairseq_logs import Progress
from studies.runs import runs
from synthetic import Setting, run, share_of_rate, train

QUICK = TASK._replace(steps=2)


def setting(attention, seed, rate=0.01, factor=1.0):
    return Setting(attention, 8, 16, rate, factor, QUICK.steps, seed)


def error(*chosen, which="test"):
    return run(QUICK, setting(*chosen), which)["mean squared error"]


def test_a_seed_gives_the_same_run_again_and_the_same_data_and_weights_to_every_attention():
    assert error("B", 3) == error("B", 3)
    assert len({error("B", 3), error("B", 4), error("B", 3, which="valid")}) == 3
    # without a rate nothing is learned: a mixing that starts as the identity gives what softmax
    # gives
    assert (
        error("softmax", 3, 0.0)
        == error("A", 3, 0.0)
        == error("B", 3, 0.0)
        != error("average", 3, 0.0)
    )


def test_an_attention_that_no_table_has_is_no_control_of_softmax():
    with pytest.raises(KeyError):
        synthetic.attention("fixhead", 16, 2)


def test_the_older_name_of_the_flag_chooses_the_attention():
    for words in (["--attention", "A"], ["--arm", "A"]):
        assert synthetic.command_line(TASK).parse_args(["train", *words]).attention == "A"
    assert synthetic.command_line(TASK).parse_args(["train"]).attention == "B"


def test_the_factor_acts_on_the_mixing_alone():
    parts = {
        f: dict(train(QUICK, setting("A", 3, 0.1, f)).attention.named_parameters())
        for f in (0.0, 1.0)
    }
    assert torch.equal(parts[0.0]["head_mixing.weight"], torch.eye(2))
    assert not torch.equal(parts[1.0]["head_mixing.weight"], torch.eye(2))
    start = train(QUICK, setting("A", 3, 0.0)).attention.q_proj.weight
    assert not torch.equal(parts[0.0]["q_proj.weight"], start)


# Steps -> the factor on the rate in each of them.
SHARES = {
    2: [1, 1],
    7: [1, 1, 1, 1, 1, 1, 5 / 7],
    10: [1, 1, 1, 1, 1, 1, 1, 1, 1, 1 / 2],
    20: [1 / 2, *[1] * 16, 3 / 4, 1 / 2, 1 / 4],
    40: [1 / 4, 1 / 2, 3 / 4, *[1] * 30, 7 / 8, 3 / 4, 5 / 8, 1 / 2, 3 / 8, 1 / 4, 1 / 8],
}


@pytest.mark.parametrize("steps", SHARES)
def test_the_rate_warms_up_over_a_tenth_of_the_steps_and_falls_over_the_last_fifth(steps):
    usual = setting("B", 3)._replace(steps=steps)
    shares = [share_of_rate(usual, step) for step in range(steps)]
    assert shares == pytest.approx(SHARES[steps])


def test_the_rate_can_have_a_warm_up_and_a_decay_of_its_own():
    constant = setting("B", 3)._replace(steps=8, warmup_steps=4, decay_steps=0)
    assert [share_of_rate(constant, step) for step in range(8)] == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    falling = constant._replace(decay_steps=2)
    assert [share_of_rate(falling, step) for step in range(8)] == [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.5]


def test_a_validation_does_not_change_the_training_that_it_watches(caplog):
    caplog.set_level(logging.INFO)
    watched = setting("B", 3)._replace(steps=4, valid_interval=2)
    alone = watched._replace(valid_interval=None)
    weights = train(QUICK, watched).state_dict()
    for name, weight in train(QUICK, alone).state_dict().items():
        assert torch.equal(weights[name], weight), name


def test_a_training_ends_at_the_first_validation_loss_that_is_small_enough(caplog):
    caplog.set_level(logging.INFO)
    long = setting("softmax", 3, 0.03)._replace(steps=12, valid_interval=3)
    train(QUICK, long)
    losses = validations(caplog)
    assert list(losses) == [3, 6, 9, 12]

    caplog.clear()
    ended = train(QUICK, long._replace(stop_at=losses[6]))
    assert validations(caplog) == {3: losses[3], 6: losses[6]}
    # the validation loss is that of the finished model, on the set of `evaluate --gen-subset valid`
    measured = synthetic.evaluate(QUICK, long, ended, "valid")
    assert measured["mean squared error"] == losses[6]


def validations(caplog):
    """Return the validation losses by update, as scripts/sweep.py reads them from the log."""
    progress = Progress([])
    for record in caplog.records:
        line = (
            f"2026-11-26 03:00:00,000 | {record.levelname} | {record.name} | {record.getMessage()}"
        )
        progress.read(line, 0.0)
    return {point["update"]: point["valid_loss"] for point in progress.all()}


@pytest.mark.slow
@pytest.mark.parametrize("example, last", [("recall", "accuracy"), ("nearest_neighbour", "")])
def test_a_sweep_trains_and_evaluates_what_the_module_does(example, last, tmp_path):
    content = f"""
example = "{example}"
evaluate = "--gen-subset valid {last and "--last " + last}"
train = "--steps 2 --valid-interval 1 --head-size 8"
[axes.attention]
B = "--arm B --mixing-lr-scale 0.1"
"""
    (tmp_path / "toy.toml").write_text(content)
    sweep = [sys.executable, ROOT / "scripts" / "sweep.py", tmp_path / "toy.toml"]
    subprocess.run([*sweep, "--seeds", "3-3", "--out", tmp_path], check=True, timeout=300)
    (file,) = tmp_path.glob("*/run.json")
    record = json.loads(file.read_text())
    task = __import__(f"{example}.run", fromlist=["TASK"]).TASK
    expected = run(task, Setting("B", 8, task.size, task.rate, 0.1, 2, 3))
    assert record["metrics"]["result"] == pytest.approx(
        expected[last or next(iter(expected))], abs=1e-6
    )
    assert record["measures"]["result"] == (last or next(iter(expected)))
    assert [point["update"] for point in record["points"]] == [1, 2]
    if not last:
        # the loss is the endpoint's on the same set
        assert record["points"][-1]["valid_loss"] == pytest.approx(
            record["metrics"]["result"], abs=1e-6
        )


GRIDS = [
    path
    for name in ("recall", "nearest_neighbour")
    for path in sorted((EXAMPLES / "grids").glob(f"{name}*.toml"))
]


@pytest.mark.parametrize("path", GRIDS, ids=[path.stem for path in GRIDS])
def test_the_recipe_takes_every_run_of_a_grid_and_no_two_are_the_same(path, tmp_path, monkeypatch):
    grid = grids.read_grid(path)
    settings = []
    task = __import__(f"{grid.example}.run", fromlist=["TASK"]).TASK
    monkeypatch.setenv("SAVE", str(tmp_path))
    monkeypatch.setattr(
        synthetic, "train", lambda task, setting: settings.append(setting) or torch.nn.Identity()
    )
    found = runs(grid, [101])
    for each in found:
        synthetic.main(task, ["train", *each.train])
    assert len(set(settings)) == len(found) and {setting.seed for setting in settings} == {101}


def test_a_trained_model_is_evaluated_and_what_is_none_is_said_in_one_line(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("SAVE", str(tmp_path))
    with pytest.raises(SystemExit, match=r"model\.pt: no such file; train.sh writes it into SAVE"):
        synthetic.main(TASK, ["evaluate"])
    synthetic.main(TASK, "train --steps 2 --arm A --mixing-lr-scale 0.1 --seed 3".split())
    synthetic.main(TASK, ["evaluate", "--gen-subset", "valid"])
    expected = run(QUICK, Setting("A", 8, TASK.size, TASK.rate, 0.1, 2, 3), "valid")
    assert capsys.readouterr().out == "".join(
        f"{name} = {value:.6f}\n" for name, value in expected.items()
    )
    with pytest.raises(SystemExit, match="--last loss: must be one of mean squared error"):
        synthetic.main(TASK, ["evaluate", "--last", "loss"])
