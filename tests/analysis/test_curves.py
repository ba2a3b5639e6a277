"""Test learning curves from the logs of fairseq-train."""

import json

import pytest

from mixhead_plugin.analysis.logs import read_line, read_log
from mixhead_plugin.errors import OptionError

INNER = '{"epoch": 1, "update": 0.5, "loss": "4.5", "ppl": "22.63", "wps": "0", "num_updates": "10", "lr": "0.01"}'
TRAIN = '{"epoch": 1, "train_loss": "4.4", "train_ppl": "21.1", "train_num_updates": "20", "train_wall": "3"}'
VALID = '{"epoch": 1, "valid_loss": "4.0", "valid_ppl": "16", "valid_num_updates": "20", "valid_best_loss": "4.0"}'


def inner(updates, loss):
    return json.dumps({"epoch": 1, "update": 1.0, "loss": str(loss), "ppl": str(2**loss), "num_updates": str(updates)})


def valid(updates, loss):
    return json.dumps({"epoch": 1, "valid_loss": str(loss), "valid_num_updates": str(updates)})


@pytest.fixture
def run_of(tmp_path):
    def read(lines):
        (tmp_path / "log").write_text("\n".join(lines))
        return read_log(tmp_path / "log")

    return read


def test_lines_are_known_by_their_keys():
    assert read_line(INNER) == ("train_inner", 10, {"loss": 4.5, "ppl": 22.63, "wps": 0.0, "lr": 0.01})
    assert read_line(TRAIN)[:2] == ("train", 20)
    assert read_line(VALID) == ("valid", 20, {"loss": 4.0, "ppl": 16.0, "best_loss": 4.0})
    assert read_line(VALID.replace("valid_", "test1_"))[0] == "test1"
    entry = read_line('{"loss": "inf", "ppl": null, "clip": [1], "note": "x", "num_updates": "5"}')
    assert entry.values == {"loss": float("inf")}


def test_what_stands_around_in_a_captured_log_is_passed_over():
    prefix = "2026-01-02 03:04:05 | INFO | train_inner | "
    assert read_line(prefix + INNER + "\n") == read_line(INNER)
    others = ["", "epoch 001", INNER[:-20], '{"a": 1}', "[1]", "{}", "Namespace(x={'num_updates': 3})"]
    others += ['{"num_updates": null, "loss": "3"}', '{"num_updates": "x", "loss": "3"}', '{"num_updates": "inf"}']
    assert [read_line(line) for line in others] == [None] * len(others)


def test_after_an_interruption_the_last_wins_and_the_rest_of_the_first_goes(run_of):
    lines = [inner(5, 4), inner(10, 3), valid(10, 3.5), inner(15, 9), valid(20, 9), inner(20, 9)]
    lines += [inner(12, 2.5), inner(17, 2)]  # went on from update 10, at other places of the log
    run = run_of(lines)
    assert run["train_inner"]["loss"] == {5: 4.0, 10: 3.0, 12: 2.5, 17: 2.0}
    assert run["valid"]["loss"] == {10: 3.5}


def test_the_same_update_in_several_series_is_no_interruption(run_of):
    run = run_of([inner(20, 4), VALID, VALID.replace("valid_", "test_"), TRAIN, inner(20, 4)])
    assert {series: metrics["loss"] for series, metrics in run.items()} == {
        "train_inner": {20: 4.0},
        "valid": {20: 4.0},
        "test": {20: 4.0},
        "train": {20: 4.4},
    }


@pytest.fixture
def logs(tmp_path):
    (tmp_path / "transformer").mkdir()
    transformer, mixhead = tmp_path / "transformer" / "train.log", tmp_path / "mixhead.log"
    transformer.write_text("\n".join([inner(5, 4), inner(10, 3), valid(10, 3.5), inner(12, 2)[:-9]]))
    mixhead.write_text("\n".join(["loading ...", f"x | INFO | {inner(5, 3.5)}", inner(10, float("inf")), VALID]))
    return transformer, mixhead


def test_runs_are_drawn_on_one_figure_and_written(logs, analysis, tmp_path):
    out = tmp_path / "out"
    status, printed, _ = analysis("curves", *logs, "--output", out)
    assert status == 0
    assert sorted(path.name for path in out.iterdir()) == ["curves.json", "curves.png", "curves.svg"]
    runs = json.loads((out / "curves.json").read_text())["runs"]
    assert runs["transformer"]["train_inner"]["loss"] == {"updates": [5, 10], "values": [4.0, 3.0]}
    assert runs["transformer"]["valid"]["loss"] == {"updates": [10], "values": [3.5]}
    assert runs["mixhead"]["train_inner"]["loss"] == {"updates": [5, 10], "values": [3.5, None]}
    assert printed.startswith("transformer: 10 updates\nmixhead: 20 updates\n")


LOGS = [b"", b"epoch 001: loss 4.5\n", bytes(range(256)), b"{" * 100_000, b'{"loss": NaN}', b'[{"a":' * 50_000]


def test_a_file_without_fairseq_s_json_is_refused(tmp_path):
    for content in LOGS:
        (tmp_path / "train.log").write_bytes(content)
        with pytest.raises(OptionError, match=r"train\.log: has no JSON of fairseq-train"):
            read_log(tmp_path / "train.log")
