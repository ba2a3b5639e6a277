"""Test the criteria in fairseq's real commands."""

from tests.commands import LM_SIZES, PLUGIN, TRAINING, logged, refusal, train

LM = ["--task", "language_modeling", "--tokens-per-sample", "16", *LM_SIZES, "--dropout", "0"]
ORTHOGONAL = [
    "--criterion=orthogonal_cross_entropy",
    "--orthogonal-weight=0.5",
    "--rank-weight=0.001",
]


def test_penalties_are_in_the_json_logs_and_only_in_those_of_training(text_data, tmp_path):
    flags = [
        *LM,
        *ORTHOGONAL,
        "--ddp-backend=legacy_ddp",
        "--max-tokens=64",
        "--update-freq=2",
    ]
    result = train(text_data, "mixhead_transformer_lm", tmp_path, *flags, updates=4)
    output = result.stdout + result.stderr
    first, *others = logged(output)
    # mixing starts as the identity
    assert float(first["orthogonal_loss"]) == 0 < float(first["rank_loss"])
    assert all(float(log["orthogonal_loss"]) > 0 for log in others)
    assert all("ppl" in log for log in others)
    assert all(float(epoch["train_orthogonal_loss"]) > 0 for epoch in logged(output, "train"))
    validations = logged(output, "valid")
    assert validations and not any(
        "orthogonal" in key or "rank" in key for log in validations for key in log
    )


def test_what_cannot_be_regularized_ends_the_command_with_one_line(text_data, tmp_path):
    flags = ["--arch", "sigsoftmax_transformer_lm", "--save-dir", tmp_path / "save", *TRAINING, *LM]
    line = refusal(
        "fairseq-train",
        text_data,
        f"--user-dir={PLUGIN}",
        *flags,
        "--criterion=orthogonal_cross_entropy",
    )
    assert line.startswith("fairseq-train: error: --orthogonal-weight 0.0001: ")
    assert not list(tmp_path.glob("save/*.pt"))
