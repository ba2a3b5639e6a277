"""The Synthesizer as a language model of fairseq."""

import copy
import re
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, build_model
from fairseq.sequence_generator import SequenceGenerator

from mixhead_plugin.errors import OptionError
from mixhead_plugin.models.synthesizer import SynthesizerOptions
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.modules.synthesizer import SYNTHESIZERS, SynthesizerAttention
from mixhead_plugin.options import FAMILIES
from tests.commands import LM_SIZES, PLUGIN, TRAINING, WHOLE_SETS, losses, run, train
from tests.criterions.cases import criterion, lm_batch
from tests.helpers import OWN, build, dictionary, shake, task, tokens
from tests.models.test_fairseq_features import dropout_names
from tests.models.test_recipe_architectures import yaml

ARCH = "mixhead_synthesizer_lm"
LONGEST = OWN["synthesizer_lm"]["max_target_positions"]

every_synthesizer = pytest.mark.parametrize("synthesizer", SYNTHESIZERS)


def attentions(model):
    return [m for m in model.modules() if isinstance(m, SynthesizerAttention)]


@every_synthesizer
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_every_synthesizer(family, synthesizer):
    model = build(f"{family}_synthesizer_lm", synthesizer=synthesizer)
    assert type(model) is ARCH_MODEL_REGISTRY[f"{family}_synthesizer_lm"]
    preset = FAMILIES[family]
    assert len(attentions(model)) == 2
    for attention in attentions(model):
        assert attention.synthesizer_kind == synthesizer
        assert attention.max_length == LONGEST
        assert attention.normalizer == preset.get("attention_normalizer", "softmax")
        assert attention.head_mixing_kind == preset.get("head_mixing", "none")
        assert attention.value_init_scale == preset.get("value_init_scale", 1.0)
        assert attention.head_dim == (32 if "head_dim" in preset else 4)
    model(tokens())[0].square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_weights_may_have_a_gain_by_distance():
    attention = attentions(build(ARCH, relative_gain=3, head_mixing="none"))[0].double().eval()
    x, future = torch.randn(6, 2, 16).double(), torch.full((6, 6), float("-inf")).double().triu(1)
    gain = torch.nn.init.normal_(attention.relative_gain.weight)  # [H, distances]
    gained, attention.relative_gain = attention(x, x, x, attn_mask=future, need_head_weights=True)[1], None
    plain = attention(x, x, x, attn_mask=future, need_head_weights=True)[1]  # [H, B, N, N]
    for t in range(6):
        for k in range(t + 1):
            expected = plain[..., t, k] * gain[:, max(k - t, -3) + 3, None]
            torch.testing.assert_close(gained[..., t, k], expected)


def test_sizes_come_from_their_flags_or_from_the_maximal_length():
    def shapes(**flags):
        return [tuple(p.shape) for n, p in build(ARCH, **flags).named_parameters() if "0.self_attn.synthesizer." in n]

    assert shapes() == [(64, 4), (16, 16), (16,)]
    factors = {"synthesizer": "factorized-dense"}
    assert [s for s in shapes(**factors) if 16 not in s] == [(8, 4), (8, 4)]
    assert [s for s in shapes(**factors, synthesizer_factor=10) if 16 not in s] == [(10, 4), (7, 4)]
    assert shapes(synthesizer="factorized-random") == [(4, 64, 8), (4, 64, 8)]
    assert shapes(synthesizer="factorized-random", synthesizer_rank=3) == [(4, 64, 3), (4, 64, 3)]


@pytest.mark.parametrize(
    "flags, length",
    [
        ({"max_target_positions": 40}, 40),
        ({"max_target_positions": None}, 32),
        ({"max_target_positions": None, "add_bos_token": True}, 33),
    ],
)
def test_the_maximal_length_is_that_of_the_tasks_blocks_unless_it_is_given(flags, length):
    model = build(ARCH, **flags)
    assert {attention.max_length for attention in attentions(model)} == {length} == {model.max_positions()}
    assert model(tokens(batch=1, length=length))[0].shape[1] == length
    with pytest.raises(OptionError, match=f"--tokens-per-sample: an input has {length + 1} tokens"):
        model(tokens(batch=1, length=length + 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_yaml_file_gets_the_family_and_the_tasks_length(family):
    cfg = yaml(f"{family}_synthesizer_lm", decoder_layers=1, synthesizer="factorized-random", synthesizer_rank=2)
    model = build_model(cfg, task())
    (attention,) = attentions(model)
    preset = FAMILIES[family]
    assert (attention.embed_dim, attention.num_heads, attention.max_length) == (512, 8, 48)
    assert attention.head_mixing_kind == preset.get("head_mixing", "none")
    assert attention.head_dim == (48 if "head_dim" in preset else 64)
    assert attention.synthesizer.query.shape == (8, 48, 2)


WRONG = [
    ({"synthesizer": "mean"}, "--synthesizer mean: must be one of dense, random, fixed-random"),
    (
        {"synthesizer_rank": 4},
        "--synthesizer-rank 4: has no effect with --synthesizer dense; leave it out, or use --synthesizer factorized-r",
    ),
    (
        {"synthesizer": "factorized-random", "synthesizer_factor": 4},
        "--synthesizer-factor 4: has no effect with --synthesizer factorized-random; leave it out, or use",
    ),
    ({"synthesizer": "factorized-random", "synthesizer_rank": 0}, "--synthesizer-rank 0: must be a whole number"),
    ({"synthesizer": "factorized-dense", "synthesizer_factor": -2}, "--synthesizer-factor -2: must be a whole number"),
    (
        {"synthesizer": "factorized-dense", "synthesizer_factor": 65},
        "--synthesizer-factor 65: must be at most the maximal length, 64",
    ),
    ({"max_target_positions": 0}, "--max-target-positions 0: must be at least 1"),
    (
        {"max_target_positions": 16, "sample_break_mode": "none"},
        "--max-target-positions 16: a synthesizer has scores for so many positions alone; must be at least 32, for",
    ),
    (
        {"max_target_positions": 32, "sample_break_mode": "complete", "add_bos_token": True},
        "--max-target-positions 32: a synthesizer has scores for so many positions alone; must be at least 33, for",
    ),
    ({"max_target_positions": None, "tokens_per_sample": None}, "--max-target-positions is missing"),
    ({"attention_scope": "cross"}, "--attention-scope cross: this model has no such attention, only decoder-self"),
    ({"attention_scope": "encoder"}, "--attention-scope encoder: this model has no such attention, only decoder-self"),
    ({"relative_position": "t5"}, "--relative-position t5: must be none, a synthesizer scores absolute positions"),
    (
        {"heads_per_layer": "decoder-self=4,3", "head_dim": 4},
        "--heads-per-layer decoder-self=4,3: must be left out, this model's layers have the same heads",
    ),
    ({"head_mixing": "best"}, "--head-mixing best: must be one of"),
    ({"decoder_attention_heads": 5}, "--decoder-attention-heads 5 does not divide --decoder-embed-dim 16"),
]


@pytest.mark.parametrize("flags, message", WRONG, ids=["-".join(flags) for flags, _ in WRONG])
def test_what_cannot_work_is_refused_in_one_line_that_names_the_flag(flags, message):
    with pytest.raises(OptionError) as error:
        ARCH_CONFIG_REGISTRY[ARCH](Namespace(**{**OWN["synthesizer_lm"], **flags}))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("synthesizer", [n for n, kind in SYNTHESIZERS.items() if kind.trained_bias])
def test_kernels_that_have_no_gradient_for_the_scores_are_refused(synthesizer, monkeypatch):
    monkeypatch.setattr("mixhead_plugin.options.implementation_problem", lambda impl: "")
    flags = {"synthesizer": synthesizer, "attention_impl": "triton"}
    with pytest.raises(OptionError, match=f"--attention-impl triton: .* {synthesizer} no gradient; .* of dense, fixed"):
        ARCH_CONFIG_REGISTRY[ARCH](Namespace(**OWN["synthesizer_lm"], **flags))


def test_short_sentences_may_be_shorter_than_the_tasks_blocks():
    flags = {"max_target_positions": 16, "sample_break_mode": "eos"}
    ARCH_CONFIG_REGISTRY[ARCH](Namespace(**{**OWN["synthesizer_lm"], **flags}))


def test_the_help_lists_every_value_of_the_table():
    options = SynthesizerOptions()
    assert all(value in options._get_help("synthesizer") for value in SYNTHESIZERS)
    for kind in filter(lambda kind: kind.own_size, SYNTHESIZERS.values()):
        assert kind.own_size.default_text in options._get_help(kind.own_size.option)


@every_synthesizer
def test_nothing_leaks_from_the_future_from_padding_or_from_other_sentences(synthesizer):
    model = shake(build(ARCH, synthesizer=synthesizer, attention_normalizer="sigsoftmax")).eval()
    batch = tokens(padded=True)
    together = model(batch)[0]
    for i, sentence in enumerate(batch):
        alone = sentence[sentence != 1][None]
        torch.testing.assert_close(model(alone)[0][0], together[i, : alone.shape[1]], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(alone[:, :4])[0][0], together[i, :4], rtol=1e-4, atol=1e-5)


def test_padding_on_the_left_is_refused_and_empty_rows_are_not():
    model = build(ARCH).eval()
    batch = tokens(padded=True)
    with pytest.raises(ValueError, match="padding on the right, here it is on the left"):
        model(batch.flip(1))
    batch[2] = 1  # --pad-to-fixed-bsz
    assert model(batch)[0][:2].isfinite().all()


@pytest.mark.parametrize("mixing", HEAD_MIXINGS)
@every_synthesizer
def test_generation_scores_its_hypotheses_as_the_full_pass_does_and_stops_in_time(synthesizer, mixing):
    model = shake(build(ARCH, synthesizer=synthesizer, head_mixing=mixing, max_target_positions=9)).eval()
    words = dictionary()
    generator = SequenceGenerator([model], words, beam_size=3, max_len_b=50, normalize_scores=False)
    prefix = tokens(batch=2, length=3)
    prefix[1, 2:] = words.pad()
    sample = {"net_input": {"src_tokens": prefix, "src_lengths": prefix.ne(words.pad()).sum(1)}}
    for hypotheses in generator.generate([model], sample, prefix_tokens=prefix, bos_token=words.eos()):
        for hypothesis in hypotheses:
            target = hypothesis["tokens"][None]
            assert target.shape[1] <= 9
            inputs = torch.cat([torch.tensor([[words.eos()]]), target[:, :-1]], 1)
            expected = model(inputs)[0].log_softmax(-1).gather(2, target[..., None])[0, :, 0]
            torch.testing.assert_close(hypothesis["positional_scores"], expected, rtol=1e-4, atol=1e-4)


@every_synthesizer
def test_checkpointed_activations_and_both_penalties_give_the_same_gradients(synthesizer):
    gradients = []
    for checkpointing in (False, True):
        flags = dict(synthesizer=synthesizer, checkpoint_activations=checkpointing, attention_dropout=0.2)
        model = shake(build(ARCH, **flags)).train()
        torch.manual_seed(5)
        sample = lm_batch()
        regularized = criterion("orthogonal_cross_entropy", orthogonal_weight=0.3, rank_weight=0.01)
        loss, _, logged = regularized(model, sample)
        assert logged["orthogonal_loss"] > 0 and logged["rank_loss"] > 0
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@pytest.mark.parametrize("synthesizer", [n for n, kind in SYNTHESIZERS.items() if n != "fixed-random"])
def test_the_rank_penalty_reaches_the_scores(synthesizer):
    model = build("sigsoftmax_synthesizer_lm", synthesizer=synthesizer)
    sample, gradients = lm_batch(), []
    for weight in (0.0, 1.0):
        model.zero_grad()
        criterion("orthogonal_cross_entropy", orthogonal_weight=0.0, rank_weight=weight)(model, sample)[0].backward()
        gradients.append([p.grad.clone() for p in attentions(model)[0].synthesizer.parameters()])
    assert all(not torch.allclose(a, b) for a, b in zip(*gradients))


def test_dropout_modules_have_their_stock_names():
    assert dropout_names(build(ARCH)) == dropout_names(build("transformer_lm"))


def test_adaptive_inputs_and_softmax_work():
    cuts = {"adaptive_input_cutoff": "10,20", "adaptive_softmax_cutoff": "10,20"}
    model = shake(build("mixhead_synthesizer_lm_wiki103", **cuts))
    loss, _, _ = criterion("orthogonal_adaptive_loss")(model.train(), lm_batch())
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@every_synthesizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_are_finite_and_close(synthesizer, dtype):
    model = shake(build(ARCH, synthesizer=synthesizer, attention_normalizer="sigsoftmax")).eval()
    sentences = tokens(padded=True)
    real = sentences.ne(1)
    expected = model(sentences)[0][real]
    out = model.to(dtype)(sentences)[0][real]
    assert out.dtype == dtype
    assert (out.float() - expected).abs().max() <= 64 * torch.finfo(dtype).eps * expected.abs().max()


def test_quantisation_noise_acts_in_training_alone():
    model = build(ARCH, quant_noise_pq=0.5, quant_noise_pq_block_size=4)
    sentences = tokens()
    assert not torch.equal(model.train()(sentences)[0], model(sentences)[0])
    assert torch.equal(model.eval()(sentences)[0], model(sentences)[0])


def test_torchscript_exports_the_decoder():
    model = shake(build(ARCH)).eval()
    sentences = tokens(padded=True)
    torch.testing.assert_close(torch.jit.script(model.decoder)(sentences)[0], model(sentences)[0])


@every_synthesizer
@pytest.mark.parametrize("mixing", ["none", "position-wise"])
def test_a_checkpoint_comes_back_as_it_was(synthesizer, mixing):
    flags = {"synthesizer": synthesizer, "head_mixing": mixing}
    trained = shake(build(ARCH, seed=2, **flags)).eval()
    model = build(ARCH, seed=3, **flags).eval()
    model.load_state_dict(copy.deepcopy(trained.state_dict()), strict=True)
    sentences = tokens(padded=True)
    assert torch.equal(model(sentences)[0], trained(sentences)[0])


@every_synthesizer
def test_models_can_be_pickled_and_copied(synthesizer, tmp_path):
    model = shake(build(ARCH, synthesizer=synthesizer)).eval()
    torch.save(model, tmp_path / "whole.pt")
    sentences = tokens()
    for other in (torch.load(tmp_path / "whole.pt", weights_only=False), copy.deepcopy(model)):
        assert torch.equal(other(sentences)[0], model(sentences)[0])


@every_synthesizer
def test_mixing_that_a_checkpoint_lacks_starts_as_the_identity(synthesizer):
    trained = build(ARCH, seed=2, synthesizer=synthesizer, head_mixing="none").eval()
    model = build(ARCH, seed=3, synthesizer=synthesizer).eval()
    model.load_state_dict(copy.deepcopy(trained.state_dict()), strict=True)
    sentences = tokens()
    torch.testing.assert_close(model(sentences)[0], trained(sentences)[0])


STOCK = "transformer_lm"
LM = "mixhead_transformer_lm"
REFUSED = [
    (STOCK, {}, ARCH, {}, "has scores of queries and keys, this model --synthesizer dense; use an archit.*transformer"),
    (LM, {}, ARCH, {"synthesizer": "random"}, "has scores of queries and keys, this model --synthesizer random; use"),
    (
        ARCH,
        {},
        LM,
        {},
        "trained with --synthesizer dense, this model has scores of queries and keys; use an arch.*_syn",
    ),
    (ARCH, {}, ARCH, {"synthesizer": "random"}, "trained with --synthesizer dense, this model has .*random; use --syn"),
    (
        ARCH,
        {"synthesizer": "factorized-dense"},
        ARCH,
        {},
        "with --synthesizer factorized-dense, this model has .*dense",
    ),
    (ARCH, {"synthesizer": "factorized-random"}, ARCH, {}, "with --synthesizer factorized-random, this model has"),
]


@pytest.mark.parametrize("form", [lambda state: state, dict], ids=["recorded", "tensors alone"])
@pytest.mark.parametrize("trained, flags, arch, other, message", REFUSED)
def test_a_checkpoint_of_another_attention_is_refused_by_flag(trained, flags, arch, other, message, form):
    state = form(build(trained, **flags).state_dict())
    with pytest.raises(OptionError, match=message) as error:
        build(arch, **other).load_state_dict(state)
    assert str(error.value).startswith("checkpoint of another family: its decoder.layers.0.self_attn ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags, other, message",
    [
        (
            {"synthesizer": "random"},
            {"synthesizer": "fixed-random"},
            "with --synthesizer random, .* use --synthesizer random",
        ),
        ({}, {"max_target_positions": 48}, "with --max-target-positions 64, this model has 48; use --max-target-posi"),
        (
            {"synthesizer": "factorized-random"},
            {"synthesizer": "factorized-random", "synthesizer_rank": 3},
            "with --synthesizer-rank 8, this model has 3; use --synthesizer-rank 8",
        ),
        (
            {"synthesizer": "factorized-dense", "synthesizer_factor": 5},
            {"synthesizer": "factorized-dense"},
            "with --synthesizer-factor 5, this model has 8; use --synthesizer-factor 5",
        ),
        ({"attention_normalizer": "l2"}, {}, "with --attention-normalizer l2, this model has softmax; use"),
    ],
)
def test_what_tensors_do_not_tell_the_record_does(flags, other, message):
    state = build(ARCH, **flags).state_dict()
    with pytest.raises(OptionError, match=message):
        build(ARCH, **other).load_state_dict(state)


def test_evaluation_refuses_what_it_would_leave_out():
    """fairseq-eval-lm skips inputs that are too long, with a warning alone, and prints a perplexity."""
    asked = task()
    asked.args = SimpleNamespace(tokens_per_sample=1024)
    asked.eval_lm_dataloader = lambda dataset, context_window=0: ("batches", context_window)
    build_model(Namespace(arch=ARCH, **OWN["synthesizer_lm"]), asked)
    short = SimpleNamespace(sizes=np.array([3, LONGEST]))
    assert asked.eval_lm_dataloader(short, context_window=2) == ("batches", 2)
    with pytest.raises(
        OptionError, match=f"--tokens-per-sample 1024: .* input of {LONGEST + 1} tokens, .* {LONGEST}; "
    ):
        asked.eval_lm_dataloader(dataset=SimpleNamespace(sizes=np.array([3, LONGEST + 1])))


# fairseq's commands

LM_TASK = ["--task", "language_modeling", "--tokens-per-sample", "16", "--sample-break-mode", "none"]
FLAGS = [*LM_TASK, *LM_SIZES, "--criterion", "orthogonal_cross_entropy", "--orthogonal-weight", "0.5"]


@pytest.fixture(scope="module")
def trained(text_data, tmp_path_factory):
    save = tmp_path_factory.mktemp("synthesizer")
    return save / "checkpoint_last.pt", train(text_data, ARCH, save, *FLAGS, "--dropout", "0.2", updates=6)


def perplexity(data, path, *flags):
    arguments = [data, "--user-dir", PLUGIN, "--path", path, *flags, "--max-tokens", "400", *WHOLE_SETS]
    result = run("fairseq-eval-lm", *arguments, check=False)
    found = re.search(r"Perplexity: ([\d.]+)", result.stdout + result.stderr)
    return result if found is None else float(found[1])


def test_training_and_evaluation_have_the_same_loss(text_data, trained):
    path, result = trained
    assert '"orthogonal_loss"' in result.stdout + result.stderr
    state = torch.load(path, weights_only=True)
    found = perplexity(text_data, path, "--tokens-per-sample", "16", "--gen-subset", "valid")
    assert found == pytest.approx(2 ** state["extra_state"]["val_loss"], rel=2e-3)


@pytest.mark.slow
def test_evaluation_in_blocks_that_are_too_long_ends_with_one_line(text_data, trained):
    result = perplexity(text_data, trained[0])
    assert result.returncode != 0
    last = result.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"fairseq-eval-lm: error: --tokens-per-sample 1024: .* --synthesizer has scores for 16; .*", last
    )


@pytest.mark.slow
def test_generation_continues_a_text(text_data, trained):
    arguments = [text_data, "--user-dir", PLUGIN, "--task", "language_modeling", "--path", trained[0], *WHOLE_SETS]
    arguments += ["--beam", "2", "--prefix-size", "1", "--sample-break-mode", "eos", "--max-tokens", "400"]
    output = run("fairseq-generate", *arguments).stdout
    assert len(re.findall(r"^H-", output, re.M)) == 15


@pytest.mark.slow
def test_interactive_continues_what_is_typed(text_data, trained):
    arguments = [text_data, "--user-dir", PLUGIN, "--task", "language_modeling", "--path", trained[0], "--beam", "2"]
    output = run("fairseq-interactive", *arguments, stdin="dog sees\nwoman\n").stdout
    assert [line.split("\t")[2].split()[0] for line in re.findall(r"^H-.*$", output, re.M)] == ["dog", "woman"]


@pytest.mark.slow
def test_hydra_takes_the_model_by_name(text_data, tmp_path):
    sizes = [f"+model.{flag[2:].replace('-', '_')}" for flag in LM_SIZES]
    overrides = [f"common.user_dir={PLUGIN}", f"task.data={text_data}", f"checkpoint.save_dir={tmp_path}/save"]
    overrides += ["common.cpu=true", "optimization.max_update=2", "dataset.max_tokens=400", "dataset.num_workers=0"]
    overrides += ["dataset.required_batch_size_multiple=1"]
    overrides += [
        "+model._name=l2_synthesizer_lm",
        "+model.synthesizer=factorized-random",
        "+model.synthesizer_rank=2",
    ]
    overrides += ["task=language_modeling", "task.tokens_per_sample=16", "criterion=cross_entropy", "optimizer=adam"]
    overrides += ["lr_scheduler=fixed", "optimization.lr=[0.01]", f"hydra.run.dir={tmp_path}/out", *sizes]
    run("fairseq-hydra-train", *overrides)
    state = torch.load(tmp_path / "save" / "checkpoint_last.pt", weights_only=True)["model"]
    assert state["decoder.layers.1.self_attn.synthesizer.query"].shape == (4, 16, 2)
    assert perplexity(text_data, tmp_path / "save" / "checkpoint_last.pt", "--tokens-per-sample", "16") > 1


@pytest.mark.slow
@pytest.mark.parametrize("arch", [ARCH, "mixhead_synthesizer_lm_wiki103"])
def test_a_wrong_flag_ends_the_command_with_one_line(arch, text_data, tmp_path):
    result = train(text_data, arch, tmp_path / "save", *LM_TASK, "--synthesizer-rank", "2", check=False)
    assert result.returncode != 0
    assert result.stderr.startswith(
        "fairseq-train: error: --synthesizer-rank 2: has no effect with --synthesizer dense"
    )
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "save").exists()


@pytest.mark.slow
@pytest.mark.parametrize("synthesizer", ["dense", "fixed-random"])
def test_training_goes_on_where_it_stopped(synthesizer, text_data, trained, tmp_path):
    flags = [*FLAGS, "--dropout", "0.2", "--attention-dropout", "0.2", "--max-tokens", "64", "--mixing-lr-scale", "4"]
    flags += ["--synthesizer", synthesizer]
    whole = losses(train(text_data, ARCH, tmp_path / "whole", *flags, updates=6))
    first = losses(train(text_data, ARCH, tmp_path / "parts", *flags, updates=3))
    second = losses(train(text_data, ARCH, tmp_path / "parts", *flags, updates=6, fresh=True))
    assert first + second == whole


@pytest.mark.slow
def test_validate_gives_the_loss_of_training(text_data, trained):
    arguments = [text_data, "--user-dir", PLUGIN, "--path", trained[0], "--task", "language_modeling"]
    arguments += ["--tokens-per-sample", "16", "--max-tokens", "400", "--log-format", "json", *WHOLE_SETS]
    output = run("fairseq-validate", *arguments)
    logged = re.findall(r'"valid_loss": "([\d.]+)"', output.stdout + output.stderr)
    state = torch.load(trained[0], weights_only=True)
    assert float(logged[-1]) == pytest.approx(state["extra_state"]["val_loss"], abs=2e-3)


@pytest.mark.slow
def test_two_workers_end_with_the_parameters_of_one_with_twice_the_update_freq(text_data, tmp_path):
    # fairseq's pytorch_ddp wants a GPU for each worker
    flags = [*FLAGS, "--dropout", "0", "--ddp-backend", "legacy_ddp", "--max-tokens", "64"]
    train(text_data, ARCH, tmp_path / "one", *flags, "--update-freq", "2", updates=4)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = str(Path(sys.executable).parent / "fairseq-train")
    command = [program, text_data, "--user-dir", PLUGIN, "--arch", ARCH, "--max-update", "4", *TRAINING, *flags]
    command += ["--save-dir", tmp_path / "two", "--distributed-world-size", "2", "--distributed-backend", "gloo"]
    command += ["--distributed-no-spawn", "--distributed-init-method", f"tcp://localhost:{port}", "--distributed-rank"]
    workers = [
        subprocess.Popen([*map(str, command), str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in (0, 1)
    ]
    outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    expected, found = (
        torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True)["model"] for name in ("one", "two")
    )
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
def test_adaptive_inputs_train(text_data, tmp_path):
    flags = [*LM_TASK, *LM_SIZES, "--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp"]
    flags += ["--adaptive-input-cutoff", "5,10", "--adaptive-softmax-cutoff", "5,10"]
    assert len(losses(train(text_data, "sigsoftmax_synthesizer_lm_wiki103", tmp_path, *flags))) == 3
