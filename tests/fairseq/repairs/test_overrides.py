"""An override of a checkpoint's config takes effect, or is refused or named."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils, options
from fairseq.data import Dictionary
from fairseq.dataclass.configs import GenerationConfig
from fairseq.models.transformer import TransformerModel
from fairseq.optim.sgd import SGD
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf

import mixhead_plugin
from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.repairs.overrides import DICTS, known_names, refuse_unknown, why_unread

mixhead_plugin.register()


@pytest.mark.parametrize(
    "overrides, refused",
    [
        ({"zzz": 3}, "'zzz': unknown; must be a flag of the model or the task"),
        ({"dropout": 0.1, "head_mixng": "none"}, "'head_mixng': unknown; did you mean head_mixing"),
        ({"task": {"dta": "x"}}, "'task.dta': unknown; did you mean data"),
        (
            {"model": {"zzz": {"a": 1}}},
            "'model.zzz': unknown; must be a flag of the model or the task",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
@pytest.mark.parametrize("flag", ["--model-overrides", "arg_overrides"])
def test_an_unknown_name_is_refused(flag, overrides, refused, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fairseq-generate", flag, "{...}"])
    with pytest.raises(OptionError) as error:
        refuse_unknown(overrides)
    assert str(error.value).startswith(f"{flag} {refused}")


def test_all_that_reads_a_checkpoint_calls_the_check(translation_checkpoint, translation_data):
    path = str(translation_checkpoint)
    readers = [
        lambda: checkpoint_utils.load_checkpoint_to_cpu(path, {"zzz": 3}),
        lambda: checkpoint_utils.load_model_ensemble_and_task([path], arg_overrides={"zzz": 3}),
        lambda: TransformerModel.from_pretrained(
            str(translation_checkpoint.parent),
            translation_checkpoint.name,
            str(translation_data),
            zzz=3,
        ),
    ]
    for read in readers:
        with pytest.raises(OptionError, match=r"^arg_overrides 'zzz': unknown; "):
            read()


def test_the_flags_of_every_command_and_the_keywords_of_the_hub_are_known():
    names = set()
    for parser in (
        options.get_training_parser(),
        options.get_generation_parser(interactive=True),
        options.get_eval_lm_parser(),
        options.get_validation_parser(),  # fairseq-validate takes all its flags for overrides
    ):
        names |= {action.dest for action in parser._actions}
    hub = (
        "data bpe bpe_codes bpe_merges bpe_vocab sentencepiece_model tokenizer "
        "moses_no_dash_splits generation_args"
    )
    names |= set(hub.split())
    assert names - {"help"} - known_names() == set()


def test_every_field_of_a_checkpoint_is_known(translation_checkpoint, text_checkpoint):
    def names(part):
        fields = vars(part) if isinstance(part, Namespace) else part
        for name, value in fields.items():
            yield name
            if isinstance(value, Namespace) or hasattr(value, "keys"):
                yield from names(value)

    for path in (translation_checkpoint, text_checkpoint):
        state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
        saved = set(names(state["cfg"]))
        assert len(saved) > 300 and saved - known_names() == set()


SAVED = {
    "common": {"seed": 1},
    "task": {"_name": "translation", "data": "bin"},
    "bpe": None,
    "model": Namespace(_name="transformer", dropout=0.1),
}
LANGUAGE_MODEL = {
    **SAVED,
    "model": {"_name": "transformer_lm", "dropout": 0.1, "decoder": {"layers": 2}},
}
NO_FIELD = "no part of the checkpoint reads this field"


@pytest.mark.parametrize(
    "cfg, name, value, reason",
    [
        (SAVED, "dropout", 0.3, ""),
        (SAVED, "data", "elsewhere", ""),
        (SAVED, "attention_impl", "reference", NO_FIELD),
        (LANGUAGE_MODEL, "layers", 3, ""),
        (LANGUAGE_MODEL, "mem_len", 3, NO_FIELD),
        (
            {**SAVED, "model": Namespace(_name="lstm")},
            "mem_len",
            3,
            "",
        ),  # who may read more than it declares
        (SAVED, "task", "translation", ""),
        (SAVED, "task", "translation_lev", "the checkpoint keeps its task translation"),
        (SAVED, "arch", "transformer_tiny", "the checkpoint keeps its model transformer"),
        (SAVED, "task", {"data": "elsewhere"}, ""),
        (
            SAVED,
            "model",
            {"dropout": 0.3},
            "the model of this checkpoint takes fields without its name",
        ),
    ],
)
def test_an_override_that_changes_nothing_is_named(cfg, name, value, reason):
    assert why_unread(cfg, name, value) == reason


def test_an_override_that_changes_nothing_is_logged(translation_checkpoint, caplog):
    checkpoint_utils.load_checkpoint_to_cpu(
        str(translation_checkpoint), {"dropout": 0.2, "mem_len": 3}
    )
    assert caplog.messages == [
        "arg_overrides 'mem_len': changes nothing, because no part of the checkpoint reads this "
        "field"
    ]


@pytest.mark.parametrize("text", ["{", "x=3", "[1]", "", "__import__('os')"])
@pytest.mark.parametrize("option", DICTS)
def test_a_text_that_is_no_dict_is_refused(option, text):
    parser = (
        options.get_training_parser()
        if option == "optimizer_overrides"
        else options.get_generation_parser()
    )
    flag = "--" + option.replace("_", "-")
    with pytest.raises(OptionError) as error:
        options.parse_args_and_arch(
            parser, ["data", "--arch=transformer", "--path=x.pt", flag, text], parse_known=True
        )
    assert str(error.value) == f"{flag} {text}: must be a dict like {DICTS[option][1]}"


def test_an_unknown_name_for_the_optimizer_is_refused():
    flags = Namespace(lr=[0.1], momentum=0.0, weight_decay=0.0)
    optimizer = SGD(flags, [torch.nn.Parameter(torch.zeros(2))])
    with pytest.raises(OptionError) as error:
        optimizer.load_state_dict(optimizer.state_dict(), {"weight_decy": 0.1})
    assert (
        str(error.value)
        == "--optimizer-overrides 'weight_decy': unknown; did you mean weight_decay?"
    )
    optimizer.load_state_dict(optimizer.state_dict(), {"weight_decay": 0.1})
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_an_unknown_name_for_a_generation_is_refused():
    task = SimpleNamespace(cfg=SimpleNamespace(eval_bleu_args='{"beem": 5}'))
    with pytest.raises(OptionError, match=r"^--eval-bleu-args 'beem': unknown; did you mean beam"):
        FairseqTask.build_generator(task, [], Namespace(beem=5))
    with pytest.raises(OptionError, match=r"^generation: 'lenpn': unknown; did you mean lenpen"):
        FairseqTask.build_generator(task, [], {**vars(GenerationConfig()), "lenpn": 1})


def test_a_program_may_ask_for_a_generation_by_a_dataclass_or_a_config():
    task = SimpleNamespace(target_dictionary=Dictionary())
    wanted = GenerationConfig(score_reference=True)
    for args in (wanted, OmegaConf.structured(wanted)):
        assert isinstance(FairseqTask.build_generator(task, [], args), SequenceScorer)
