from argparse import Namespace

import pytest
from fairseq.models import ARCH_CONFIG_REGISTRY

from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.ops import IMPLEMENTATIONS, NORMALIZERS, implementation_problem, triton
from mixhead_plugin.options import OPTION_NAMES, SCOPES, AttentionOptions
from tests.helpers import TINY, build

WRONG = [
    ("mixhead_transformer", {"attention_normalizer": "max"}, "--attention-normalizer max: must be one of softmax"),
    ("mixhead_transformer", {"head_mixing": "a"}, "--head-mixing a: must be one of none, position-independent"),
    ("mixhead_transformer", {"attention_scope": "x"}, "--attention-scope x: must be one of all, self"),
    ("mixhead_transformer", {"attention_impl": "x"}, "--attention-impl x: must be one of auto, reference"),
    ("mixhead_transformer", {"head_dim": 0}, "--head-dim 0: must be a whole number of at least 1"),
    ("mixhead_transformer", {"head_dim": -3}, "--head-dim -3: must be a whole number of at least 1"),
    ("mixhead_transformer", {"head_dim": 2.5}, "--head-dim 2.5: must be a whole number of at least 1"),
    ("mixhead_transformer", {"head_dim": "8"}, "--head-dim 8: must be a whole number of at least 1"),
    ("mixhead_transformer_lm", {"head_mixing": "random", "decoder_attention_heads": 1}, "--head-mixing random: has no"),
    ("mixhead_transformer", {"head_dim": 5, "quant_noise_pq": 0.1}, "--head-dim 5: 4 heads of it are no multiple of"),
    ("mixhead_transformer", {"value_init_scale": 0.0}, "--value-init-scale 0.0: must be a number greater"),
    ("mixhead_transformer", {"mixing_lr_scale": -1.0}, "--mixing-lr-scale -1.0: must be a number greater than 0"),
    ("mixhead_transformer", {"mixing_lr_scale": 2.0, "head_mixing": "random"}, "--mixing-lr-scale 2.0: has no effect"),
    (
        "sigsoftmax_transformer_lm",
        {"mixing_lr_scale": 2.0},
        "--mixing-lr-scale 2.0: has no effect with --head-mixing none",
    ),
    ("mixhead_transformer", {"mixing_lr_scale": 2.0, "fp16": True}, "--mixing-lr-scale 2.0: with --fp16 needs"),
    (
        "mixhead_transformer",
        {"mixing_lr_scale": 2.0, "ddp_backend": "fully_sharded"},
        "--mixing-lr-scale 2.0: needs another --ddp-backend than fully_sharded",
    ),
    (
        "mixhead_transformer",
        {"mixing_lr_scale": 2.0, "zero_sharding": "os"},
        "--mixing-lr-scale 2.0: needs another --zero-sharding than os",
    ),
    (
        "mixhead_transformer",
        {"mixing_lr_scale": 2.0, "optimizer": "composite"},
        "--mixing-lr-scale 2.0: needs another --optimizer than composite",
    ),
    (
        "mixhead_transformer",
        {"mixing_lr_scale": 2.0, "fp16": True, "memory_efficient_fp16": True},
        "--mixing-lr-scale 2.0: needs --fp16 --fp16-no-flatten-grads instead of --memory-efficient-fp16",
    ),
    (
        "mixhead_transformer",
        {"mixing_lr_scale": 2.0, "memory_efficient_bf16": True},
        "--mixing-lr-scale 2.0: needs --bf16 instead of --memory-efficient-bf16",
    ),
    ("mixhead_transformer", {"value_init_scale": float("nan")}, "--value-init-scale nan"),
    (
        "mixhead_transformer",
        {"encoder_attention_heads": 5},
        "--encoder-attention-heads 5 does not divide --encoder-embed-dim 16: must divide it, or --head-dim must be set",
    ),
    ("mixhead_transformer_lm", {"decoder_attention_heads": 5}, "--decoder-attention-heads 5 does not divide"),
    ("mixhead_roberta_base", {"encoder_attention_heads": 5}, "--encoder-attention-heads 5 does not divide"),
    ("mixhead_transformer", {"encoder_attention_heads": 0}, "--encoder-attention-heads 0: must be at least 1"),
    (
        "mixhead_transformer",
        {"decoder_attention_heads": 5, "head_dim": 4, "attention_scope": "encoder"},
        "--decoder-attention-heads 5 of the decoder-self attention, which --attention-scope encoder leaves as it is, "
        "does not divide --decoder-embed-dim 16: must divide it",
    ),
    ("fixhead_transformer", {}, "--head-dim is missing: family fixhead"),
    ("fixhead_roberta_base", {"tokens_per_sample": None}, "--head-dim is missing: family fixhead"),
    ("mixhead_transformer_lm", {"attention_scope": "cross"}, "--attention-scope cross: this model has no such"),
    ("mixhead_transformer_lm", {"attention_scope": "encoder"}, "--attention-scope encoder: this model has no such"),
    ("mixhead_roberta_base", {"attention_scope": "decoder"}, "--attention-scope decoder: this model has no such"),
    ("mixhead_transformer", {"value_init_scale": float("inf")}, "--value-init-scale inf"),
    (
        "mixhead_transformer",
        {"no_cross_attention": True, "cross_self_attention": True, "attention_scope": "cross"},
        "--attention-scope cross: this model has no such",
    ),
    (
        "mixhead_transformer",
        {"head_mixing": "none", "attention_scope": "self"},
        "--attention-scope self: has no effect",
    ),
    ("mixhead_transformer_lm", {"scale_heads": True, "head_dim": 5}, "--scale-heads: needs --head-dim 4"),
    (
        "mixhead_transformer",
        {"encoder_xformers_att_config": "{}"},
        "--encoder-xformers-att-config {}: must be left out",
    ),
]


@pytest.mark.parametrize("arch, flags, message", WRONG, ids=[f"{a}-{'-'.join(f) or 'bare'}" for a, f, _ in WRONG])
def test_what_cannot_work_is_refused_in_one_line_that_names_the_flag(arch, flags, message):
    tiny = next(tiny for name, tiny in TINY.items() if name.split("_base")[0] in arch)
    with pytest.raises(OptionError) as error:
        ARCH_CONFIG_REGISTRY[arch](Namespace(**{**tiny, **flags}))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("impl", [i for i in IMPLEMENTATIONS if implementation_problem(i)])
def test_an_implementation_that_cannot_run_is_refused_with_the_reason(impl):
    with pytest.raises(OptionError, match=f"--attention-impl {impl}: .*; usable here: auto, reference"):
        ARCH_CONFIG_REGISTRY["mixhead_transformer"](Namespace(attention_impl=impl))


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"attention_normalizer": "relu2"}, "has no kernel for normalizer 'relu2', only for softmax, sigsoftmax, l2"),
        ({"head_dim": 300}, "has no kernel for head size 300, only up to 256"),
        ({"encoder_attention_heads": 128, "encoder_embed_dim": 512}, "mixes at most 64 heads, not 128"),
        ({"relative_position": "t5"}, "has no kernel for --relative-position t5"),
        ({"relative_gain": 4}, "has no kernel for --relative-gain"),
        (
            {"heads_per_layer": "cross=4:3,4", "head_dim": 4},
            "has no kernel for other numbers of mixed heads than of source heads",
        ),
    ],
)
def test_what_has_no_kernel_is_refused_before_the_first_batch(monkeypatch, flags, message):
    monkeypatch.setattr(triton, "machine_problem", lambda: "")
    arguments = {**TINY["transformer"], "head_mixing": "position-wise", "attention_impl": "triton", **flags}
    with pytest.raises(OptionError) as error:
        ARCH_CONFIG_REGISTRY["mixhead_transformer"](Namespace(**arguments))
    assert str(error.value) == f"--attention-impl triton: {message}; must be auto, blockwise or reference"
    with pytest.raises(OptionError, match="--attention-impl triton: needs a GPU, --cpu takes none"):
        ARCH_CONFIG_REGISTRY["mixhead_transformer"](Namespace(attention_impl="triton", cpu=True))
    fine = {**TINY["transformer"], "head_mixing": "position-wise", "attention_impl": "triton", "head_dim": 256}
    ARCH_CONFIG_REGISTRY["mixhead_transformer"](Namespace(**fine))


@pytest.mark.parametrize(
    "files, message",
    [
        (None, "no such folder"),
        ([], "has no dict.* file; run fairseq-preprocess first"),
        (["dict.txt"], "has no train.* file"),
        (["dict.txt", "train.bin"], "has no valid.* file"),
        (["dict.txt", "train.bin", "valid.bin"], None),
        (["label/dict.txt", "input0/train.bin", "input0/valid.bin"], None),
    ],
)
def test_missing_data_is_named_before_anything_is_built(tmp_path, monkeypatch, files, message):
    data = tmp_path / "data"
    if files is not None:
        data.mkdir()
        for file in files:
            (data / file).parent.mkdir(exist_ok=True)
            (data / file).touch()
    args = Namespace(data=str(data), train_subset="train", valid_subset="valid")
    monkeypatch.setattr("sys.argv", ["fairseq-train", str(data)])
    if message is None:
        ARCH_CONFIG_REGISTRY["mixhead_transformer"](args)
    else:
        with pytest.raises(OptionError, match=rf"data .*data: {message}"):
            ARCH_CONFIG_REGISTRY["mixhead_transformer"](args)


@pytest.mark.parametrize("shard, message", [("train.bin", None), ("valid.bin", "data .*second: has no train")])
def test_further_shards_need_the_training_set_alone(tmp_path, monkeypatch, shard, message):
    for file in ("first/dict.txt", "first/train.bin", "first/valid.bin", f"second/{shard}"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    data = f"{tmp_path}/first:{tmp_path}/second"
    monkeypatch.setattr("sys.argv", ["fairseq-train", data])
    args = Namespace(data=data, train_subset="train", valid_subset="valid")
    if message is None:
        ARCH_CONFIG_REGISTRY["mixhead_transformer"](args)
    else:
        with pytest.raises(OptionError, match=message):
            ARCH_CONFIG_REGISTRY["mixhead_transformer"](args)


def test_a_language_model_under_fairseqs_default_task_is_told_which_it_needs():
    with pytest.raises(OptionError, match="--task translation: a language model needs one with --tokens-per-sample"):
        ARCH_CONFIG_REGISTRY["mixhead_transformer_lm"](Namespace(task="translation"))


def test_a_checkpoint_made_elsewhere_does_not_look_for_its_training_data():
    ARCH_CONFIG_REGISTRY["mixhead_transformer"](Namespace(data="/gone"))


def test_scaled_heads_care_for_the_head_size_of_decoder_self_attention_alone():
    flags = {"scale_heads": True, "head_dim": 7, "attention_scope": "cross"}
    assert build("mixhead_transformer", **flags).decoder.layers[0].c_attn is not None


def test_the_help_lists_every_value_of_the_tables():
    options = AttentionOptions()
    for name, table in (
        ("attention_normalizer", NORMALIZERS),
        ("head_mixing", HEAD_MIXINGS),
        ("attention_scope", SCOPES),
        ("attention_impl", IMPLEMENTATIONS),
    ):
        assert all(value in options._get_help(name) for value in table)
    assert "position-wise in family mixhead" in options._get_help("head_mixing")
    assert all(options._get_help(name) for name in OPTION_NAMES)
