"""Every repair, and every hook of fairseq, does something: without it, a test fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mixhead_plugin.fairseq import hooks
from mixhead_plugin.fairseq.repairs import REPAIRS
from mixhead_plugin.fairseq.replace import replacements
from tests.commands import ROOT

CHECKPOINTS = "tests/fairseq/repairs/test_checkpoint_files.py"
IMPORT = "tests/fairseq/repairs/test_import.py"
TRANSFORMER_XL = "tests/fairseq/models/test_transformer_xl.py"
LEARNING_RATE = "tests/fairseq/test_learning_rate.py"
BEFORE_TRAINING = "tests/fairseq/models/test_before_training.py"
ATOMIC_CHECKPOINTS = "tests/fairseq/repairs/test_atomic_checkpoints.py"
DIVERGED_MODELS = "tests/fairseq/repairs/test_diverged_models.py"
EPOCHS = "tests/fairseq/repairs/test_epochs.py"
NAN_DETECTOR = "tests/fairseq/repairs/test_nan_detector.py"
NUMPY_FLOAT = "tests/fairseq/repairs/test_numpy_float.py"
RESTORE_FILE = "tests/fairseq/repairs/test_restore_file.py"
SAVE_DIR = "tests/fairseq/repairs/test_save_dir.py"
SIGNALS = "tests/fairseq/repairs/test_signals.py"
STORE_EMA = "tests/fairseq/repairs/test_store_ema.py"
VALIDATIONS = "tests/fairseq/repairs/test_validations.py"
WORKERS = "tests/fairseq/repairs/test_workers.py"
PREEMPTION = "tests/robustness/test_preemption.py"
DATA = "tests/fairseq/repairs/test_data_files.py"
SHARED_EPOCH = "tests/fairseq/repairs/test_shared_epoch.py"
WRONG_NAMES = "tests/fairseq/repairs/test_wrong_names.py"
OVERRIDES = "tests/fairseq/repairs/test_overrides.py"
FAMILY_CHECKPOINTS = "tests/fairseq/models/test_checkpoints.py"
FAMILIES = "tests/fairseq/models/test_families.py"
RECIPE_ARCHITECTURES = "tests/fairseq/models/test_recipe_architectures.py"
SYNTHESIZER = "tests/fairseq/models/test_synthesizer.py"

# A test that fails without the repair. Somebody who adds a repair adds its line, and sees that the
# test fails by `scripts/test.sh --all tests/fairseq/repairs/test_needed.py -k NAME`.
PROOFS = {
    "safe_globals": (CHECKPOINTS, "test_a_good_checkpoint_and_one_with_arithmetic_load"),
    "numpy_long": (IMPORT, "test_importing_repairs_once_in_any_order"),
    "numpy_float": (NUMPY_FLOAT, "test_a_model_with_a_crf_layer_computes_its_loss"),
    "truncated_bptt": (TRANSFORMER_XL, "test_batches_say_which_window_of_their_text_they_are"),
    "hydra_help": (IMPORT, "test_hydra_starts_where_argparse_reads_help_at_once"),
    "batch_buckets": (DATA, "test_buckets_hold_equally_many_sentences"),
    "broadcast_metadata": (
        FAMILY_CHECKPOINTS,
        "test_a_checkpoint_that_went_to_other_workers_is_refused_in_the_same_words",
    ),
    "checkpoint_files": (CHECKPOINTS, "test_the_check_refuses"),
    "checksums": (CHECKPOINTS, "test_a_changed_byte_is_refused_or_changes_nothing"),
    "atomic_checkpoints": (
        ATOMIC_CHECKPOINTS,
        "test_a_passing_error_is_tried_again_from_the_beginning",
    ),
    "save_dir": (SAVE_DIR, "test_checking_a_folder_leaves_it_as_it_was"),
    "one_training": (PREEMPTION, "test_a_second_training_in_a_folder_is_refused"),
    "diverged_models": (
        DIVERGED_MODELS,
        "test_a_frozen_mixing_that_is_nan_is_neither_loaded_nor_saved",
    ),
    "binarized_data": (DATA, "test_every_command_calls_the_check[train]"),
    "fasta_index": (DATA, "test_a_fasta_file_is_indexed_without_a_shell"),
    "dictionaries": (DATA, "test_a_dictionary_that_cannot_be_right_is_refused_in_one_line"),
    "epoch_batches": (EPOCHS, "test_a_resumed_epoch_has_the_batches_of_the_first"),
    "shared_epoch": (SHARED_EPOCH, "test_each_sentence_is_seen_once"),
    "worker_epoch": (EPOCHS, "test_data_workers_know_the_epoch"),
    "end_of_epoch": (VALIDATIONS, "test_a_checkpoint_has_the_counts_of_patience"),
    "next_training": (
        VALIDATIONS,
        "test_a_worse_training_in_the_same_process_has_its_own_best_checkpoint",
    ),
    "signals": (PREEMPTION, "test_a_signal_saves_and_the_same_command_goes_on"),
    "validation_threads": (EPOCHS, "test_a_validation_that_stops_early_leaves_no_thread"),
    "nan_detector": (NAN_DETECTOR, "test_the_search_for_nan_ends_where_an_encoder_returns_a_dict"),
    "orphaned_workers": (SIGNALS, "test_sigint_ends_a_worker_that_ignores_it"),
    "store_ema": (STORE_EMA, "test_the_average_begins_from_the_weights_of_the_checkpoint"),
    "restore_file": (RESTORE_FILE, "test_a_checkpoint_that_is_not_there_is_not_forgotten"),
    "wrong_names": (WRONG_NAMES, "test_an_unknown_architecture_is_one_line_with_near_names"),
    "unknown_fields": (BEFORE_TRAINING, "test_a_field_that_nothing_reads_is_refused_by_name"),
    "overrides": (OVERRIDES, "test_all_that_reads_a_checkpoint_calls_the_check"),
    "dropped_scales": (
        BEFORE_TRAINING,
        "test_a_scale_that_fairseqs_language_model_drops_is_refused",
    ),
    "no_worker": (WORKERS, "test_workers_without_gpus_are_refused_not_forgotten"),
    "torchrun_workers": (WORKERS, "test_workers_of_torchrun_or_srun_do_not_train_apart"),
    "longer_inputs": (SYNTHESIZER, "test_evaluation_refuses_what_it_would_leave_out"),
}

# The same for the functions of `fairseq/hooks.py`.
HOOKS = {
    "complete_own_architecture": (
        FAMILIES,
        "test_a_users_own_language_model_has_the_family_on_the_command_line",
    ),
    "give_yaml_its_architecture": (
        RECIPE_ARCHITECTURES,
        "test_a_yaml_file_gets_the_architecture_that_the_command_line_gets[transformer_lm_gpt]",
    ),
    "scale_marked_steps": (
        LEARNING_RATE,
        "test_fairseqs_trainer_scales_the_steps_of_its_optimizer",
    ),
    "check_training": (BEFORE_TRAINING, "test_guided_alignment_gets_a_distribution_or_is_refused"),
    "warn_of_alignment": (
        BEFORE_TRAINING,
        "test_printed_weights_that_are_no_probabilities_are_warned_of",
    ),
    "check_origin": (
        FAMILY_CHECKPOINTS,
        "test_fairseqs_own_model_refuses_weights_that_it_would_read_in_another_way",
    ),
}

# Appended to the file of a repair, so that it does nothing.
NOTHING = """

for _value in list(globals().values()):
    if callable(_value) and hasattr(_value, "replaces"):
        del _value.replaces


def apply():
    pass
"""


def test_every_repair_has_a_test_that_needs_it():
    assert list(PROOFS) == list(REPAIRS)


def test_every_hook_has_a_test_that_needs_it():
    assert list(HOOKS) == [function.__name__ for function in replacements(hooks)]


@pytest.mark.slow
@pytest.mark.parametrize("name", REPAIRS)
def test_the_test_of_a_repair_fails_without_it(name, tmp_path):
    file = Path(REPAIRS[name].module.__file__).relative_to(ROOT / "mixhead_plugin" / "fairseq")
    fails_with(file, NOTHING, "::".join(PROOFS[name]), tmp_path / "checkout")


@pytest.mark.slow
@pytest.mark.parametrize("name", HOOKS)
def test_the_test_of_a_hook_fails_without_it(name, tmp_path):
    unmarked = f"\n\ndel {name}.replaces\n"
    fails_with("hooks.py", unmarked, "::".join(HOOKS[name]), tmp_path / "checkout")


def fails_with(file, text, node, copy):
    """Check that a test passes in a copy of the checkout, and fails with `text` in a file.

    Args:
        file: the file of fairseq's side that gets `text` at its end
        node: the test, as pytest names it
        copy: a folder to be made
    """
    for folder in ("mixhead_plugin", "tests", "examples", "scripts"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    passed = run_in(copy, node)
    assert passed.returncode == 0, passed.stdout[-3000:]

    with (copy / "mixhead_plugin" / "fairseq" / file).open("a") as opened:
        opened.write(text)
    ended = run_in(copy, node)
    assert ended.returncode == 1, ended.stdout[-3000:]
    assert f"FAILED {node.partition('[')[0]}" in ended.stdout, ended.stdout[-3000:]


def run_in(copy, node):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-x", "-m", "not slow", node],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},  # before the installed one
        capture_output=True,
        text=True,
    )
