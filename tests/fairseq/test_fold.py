"""A folded model is one of fairseq's own, with the outputs of the plugin's."""

import re
from argparse import Namespace

import pytest
import torch
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
from fairseq.models import build_model
from omegaconf import OmegaConf

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.fold import fold
from tests.commands import PLUGIN, SIZES, WHOLE_SETS, run, train
from tests.covering import each_once
from tests.fairseq.models.cases import forward, yaml
from tests.helpers import OWN, TINY, shake, task, tokens

TRACE = re.compile(b"mixhead|feature_mixing|orthogonal_")


def save(path, arch, **flags):
    """Write a checkpoint of a shaken model with what fairseq-train writes, and return the model."""
    sizes = next(sizes for name, sizes in {**OWN, **TINY}.items() if name.split("_base")[0] in arch)
    flags = {"head_mixing": "none", **sizes, **flags, "_name": f"mixhead_{arch}"}
    criterion = {
        "_name": "orthogonal_cross_entropy",
        "orthogonal_weight": 0.1,
        "sentence_avg": False,
    }
    by_dataclass = "_lm" in arch
    if by_dataclass:
        flags = OmegaConf.to_container(
            yaml(flags.pop("_name"), **flags), resolve=True, enum_to_str=True
        )
    else:
        flags |= {
            "arch": flags["_name"],
            "criterion": "orthogonal_cross_entropy",
            "user_dir": PLUGIN,
            "orthogonal_weight": 0.1,
        }
    cfg = {
        "model": flags if by_dataclass else Namespace(**flags),
        "criterion": criterion,
        "common": {"user_dir": PLUGIN},
    }
    model = shake(build_model(Namespace(**flags), task())).eval()
    history = {
        "criterion_name": "orthogonal_cross_entropy",
        "optimizer_name": "",
        "lr_scheduler_state": {},
    }
    state = {"cfg": cfg, "args": None, "model": model.state_dict(), "optimizer_history": [history]}
    torch.save(
        {
            **state,
            "extra_state": {"train_iterator": {}, "ema": {}},
            "last_optimizer_state": {"step": 3},
        },
        path,
    )
    return model


@each_once(
    arch=[*TINY, "transformer_lm_wiki2", "transformer_lm_gpt"],
    flags=[
        {"feature_mixing": "heads"},
        {"feature_mixing": "shared", "mixed_features": "qk", "attention_scope": "self"},
        {"feature_mixing": "output", "relative_gain": 0},
        {},
    ],
)
def test_outputs_are_equal_and_the_file_has_no_trace_of_the_plugin(arch, flags, tmp_path):
    if "scope" in str(flags) and arch != "transformer":
        flags = {**flags, "attention_scope": "all"}
    file = str(tmp_path / "in.pt")
    out = str(tmp_path / "out.pt")
    trained = save(file, arch, **flags)
    fold(file, out)
    assert not TRACE.search((tmp_path / "out.pt").read_bytes())
    state = load_checkpoint_to_cpu(out)
    folded = build_model(state["cfg"].model, task()).eval()
    assert not type(folded).__module__.startswith("mixhead_plugin")
    folded.load_state_dict(state["model"], strict=True)
    sentences = tokens(padded=True)
    with torch.no_grad():
        torch.testing.assert_close(
            forward(folded, sentences), forward(trained, sentences), rtol=1e-6, atol=1e-6
        )
    before = trained.state_dict()
    changed = {
        name.split(".")[-2] for name, x in folded.state_dict().items() if not x.equal(before[name])
    }
    expected = {
        "heads": {"q_proj", "k_proj", "v_proj"},
        "shared": {"q_proj", "k_proj"},
        "output": {"out_proj"},
    }
    assert changed == expected.get(flags.get("feature_mixing"), set())


@pytest.mark.parametrize(
    "arch, flags, named",
    [
        (
            "transformer",
            {"head_mixing": "position-wise"},
            "--head-mixing position-wise of encoder.layers.0.self_attn",
        ),
        (
            "transformer_lm",
            {"attention_gate": "head", "feature_mixing": "output"},
            "--attention-gate head of decoder",
        ),
        (
            "transformer_lm",
            {"attention_normalizer": "entmax15"},
            "--attention-normalizer entmax15 cannot",
        ),
        ("transformer_lm", {"attention_sink": "zero"}, "--attention-sink zero cannot"),
        ("transformer_lm", {"feature_mixing": "heads", "head_dim": 5}, "--head-dim 5 cannot"),
        ("transformer_lm", {"value_head_dim": 5}, "--value-head-dim 5 cannot"),
        ("synthesizer_lm", {"synthesizer": "random"}, "--arch mixhead_synthesizer_lm cannot"),
    ],
)
def test_what_cannot_fold_is_refused_in_one_line_that_names_the_part(arch, flags, named, tmp_path):
    save(tmp_path / "in.pt", arch, **flags)
    with pytest.raises(OptionError, match=named) as error:
        fold(str(tmp_path / "in.pt"), str(tmp_path / "out.pt"))
    assert "\n" not in str(error.value) and not (tmp_path / "out.pt").exists()


def test_a_missing_file_and_a_name_in_use_are_refused(tmp_path):
    used = tmp_path / "in.pt"
    unused = tmp_path / "out.pt"
    nowhere = tmp_path / "nowhere"
    used.touch()
    for given, out, named in (
        (unused, used, f"{unused}: no such file; must be a checkpoint"),
        (used, used, f"{used}: exists; must be the name of a new file"),
        (
            used,
            nowhere / "out.pt",
            f"{nowhere}/out.pt: {nowhere} is no folder; must be a new file in one that exists",
        ),
    ):
        with pytest.raises(OptionError) as error:
            fold(str(given), str(out))
        assert str(error.value) == named


HAND_MADE = {
    "no config": (
        lambda state: state.update(cfg=None),
        "has no config; must be a checkpoint that fairseq-train wrote",
    ),
    "a vector for a matrix": (
        lambda state: change_weights(state, lambda weight: weight[0].clone()),
        "its tensors are not those of --arch mixhead_transformer with its flags: ",
    ),
    "a size that the heads do not divide": (
        lambda state: change_weights(state, lambda weight: torch.eye(7)),
        "its tensors are not those of --arch mixhead_transformer with its flags: ",
    ),
    "sparse": (
        lambda state: change_weights(state, torch.Tensor.to_sparse),
        "its tensors are not those of --arch mixhead_transformer with its flags: ",
    ),
    "a part that is missing": (
        lambda state: state["model"].pop("encoder.layers.0.self_attn.feature_mixing.query"),
        "its tensors are not those of --arch mixhead_transformer with its flags: ",
    ),
}


def change_weights(state, change):
    for name in [name for name in state["model"] if name.endswith("q_proj.weight")]:
        state["model"][name] = change(state["model"][name])


@pytest.mark.parametrize("kind", HAND_MADE)
def test_a_file_that_was_made_by_hand_is_refused_in_one_line(kind, tmp_path):
    change, said = HAND_MADE[kind]
    save(tmp_path / "in.pt", "transformer", feature_mixing="heads")
    state = torch.load(tmp_path / "in.pt")
    change(state)
    torch.save(state, tmp_path / "made.pt")
    with pytest.raises(OptionError) as error:
        fold(str(tmp_path / "made.pt"), str(tmp_path / "out.pt"))
    assert str(error.value).startswith(f"{tmp_path}/made.pt: {said}") and "\n" not in str(
        error.value
    )
    assert not (tmp_path / "out.pt").exists()


def test_a_fault_of_the_plugin_is_not_said_to_be_one_of_the_file(monkeypatch, tmp_path):
    def faulty(*arguments):
        raise TypeError("a fault of the plugin")

    save(tmp_path / "in.pt", "transformer", feature_mixing="heads")
    monkeypatch.setattr("mixhead_plugin.fairseq.fold._fold_attention", faulty)
    with pytest.raises(TypeError, match="a fault of the plugin"):
        fold(str(tmp_path / "in.pt"), str(tmp_path / "out.pt"))


@pytest.mark.parametrize("criterion", [None, {"_name": "of_another_plugin"}])
def test_a_criterion_of_another_plugin_or_none_folds(criterion, tmp_path):
    save(tmp_path / "in.pt", "transformer", feature_mixing="heads")
    state = torch.load(tmp_path / "in.pt")
    state["cfg"]["criterion"] = criterion
    torch.save(state, tmp_path / "made.pt")
    fold(str(tmp_path / "made.pt"), str(tmp_path / "out.pt"))
    assert load_checkpoint_to_cpu(str(tmp_path / "out.pt"))["cfg"].model["arch"] == "transformer"


@pytest.fixture(scope="module")
def folded(translation_data, tmp_path_factory):
    """Return a checkpoint that was trained with --feature-mixing, and the folded one.

    `mixhead fold` has made the second of the first.
    """
    folder = tmp_path_factory.mktemp("fold")
    mixing = [
        "--head-mixing=none",
        "--feature-mixing=heads",
        "--criterion=orthogonal_cross_entropy",
    ]
    train(translation_data, "mixhead_transformer", folder, *SIZES, *mixing, updates=30)
    printed = run("mixhead", "fold", folder / "checkpoint_last.pt", folder / "folded.pt").stdout
    assert printed == f"wrote {folder / 'folded.pt'}\n"
    return folder


@pytest.mark.slow
def test_fairseq_alone_decodes_a_folded_model(translation_data, folded):
    found = []
    for file, plugin in (("checkpoint_last.pt", ["--user-dir", PLUGIN]), ("folded.pt", [])):
        result = run(
            "fairseq-generate",
            translation_data,
            *plugin,
            "--path",
            folded / file,
            "--beam=2",
            *WHOLE_SETS,
        )
        found.append(re.findall(r"^[HD]-\d+\t(\S+)\t(.*)$", result.stdout, re.M))
    assert len(found[0]) == 30
    assert [words for _, words in found[0]] == [words for _, words in found[1]]


@pytest.mark.slow
def test_ctranslate2_converts_a_folded_model(translation_data, folded, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    data = str(translation_data)
    ctranslate2.converters.FairseqConverter(str(folded / "folded.pt"), data).convert(
        str(tmp_path / "converted")
    )
    translator = ctranslate2.Translator(str(tmp_path / "converted"))
    result = translator.translate_batch([["hund", "katze", "sieht"]], beam_size=2)
    assert result[0].hypotheses[0]
