"""Whatever is typed: a training that works or one line that names the flag; and no flag does nothing in silence."""

import re
from dataclasses import fields

import pytest
import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from hydra.core.utils import JobReturn, JobStatus

from mixhead_plugin import reporting
from mixhead_plugin.criterions.penalised import PenaltyOptions
from mixhead_plugin.models.families import FamilyModel
from mixhead_plugin.modules.synthesizer import SYNTHESIZERS
from mixhead_plugin.ops import api
from mixhead_plugin.options import FAMILIES, OPTION_NAMES, SCOPES, AttentionOptions, OptionError, option_name
from mixhead_plugin.tasks.bert_pretraining import BertPretrainingConfig, BertPretrainingTask
from mixhead_plugin.tasks.squad import SquadTask, SquadTaskConfig
from tests.helpers import build, shake, tokens
from tests.models.test_bert import build as build_bert
from tests.robustness import flags
from tests.robustness.flags import KINDS, REFUSED, TRAINED, Server, draw, make_data, typed, verdict
from tests.xl import build_xl

# ---- random combinations ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("flags")) as running:
        yield running


@pytest.fixture(scope="module")
def data(server):
    return make_data(server.folder / "data", server)


def outcomes(seed, numbers, server, data):
    """How often draws ended in which way; prints the commands of those that failed."""
    counts, failed = {TRAINED: 0, REFUSED: 0}, []
    for drawn in (draw(seed, number) for number in numbers):
        found = verdict(drawn, server, data)
        if found in counts:
            counts[found] += 1
        else:
            failed.append(f"{drawn.name}: {found}\n{typed(drawn, data, server.folder / 'again')}")
    assert not failed, f"{len(failed)} of {len(numbers)}\n" + "\n".join(failed)
    return counts


@pytest.mark.slow
def test_a_few_combinations_train_or_are_refused(server, data):
    counts = outcomes(8, range(len(KINDS)), server, data)
    assert counts[TRAINED] > 1 and counts[REFUSED] > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_combinations_train_or_are_refused(seed, server, data):
    counts = outcomes(seed, range(80), server, data)
    assert min(counts.values()) >= 16


def test_draws_can_be_repeated():
    assert draw(3, 5) == draw(3, 5) != draw(3, 5 + len(KINDS))


def test_every_flag_model_and_criterion_of_the_plugin_is_drawn():
    assert {option_name(name) for name in OPTION_NAMES} == set(flags.ATTENTION) == set(flags.ODD_ATTENTION)
    drawn = {ARCH_MODEL_REGISTRY[f"{family}_{arch}"] for family in FAMILIES for k in KINDS.values() for arch in k[0]}
    ours = {model for model in MODEL_REGISTRY.values() if issubclass(model, FamilyModel)}
    assert {base for model in drawn for base in model.__mro__[1:] if issubclass(base, FamilyModel)} >= {
        base for model in ours for base in model.__mro__[1:] if issubclass(base, FamilyModel) and base not in ours
    }
    criteria = {name for name, kind in CRITERION_REGISTRY.items() if kind.__module__.startswith("mixhead_plugin.")}
    assert criteria <= {criterion for kind in KINDS.values() for criterion in kind.criteria}
    assert {f.name for f in fields(PenaltyOptions) if not f.name.startswith("_")} == {
        flag[2:].replace("-", "_") for flag in flags.PENALTY
    }


# ---- no flag does nothing --------------------------------------------------------------------------------------------

MODELS = {
    "transformer": build,
    "transformer_lm": build,
    "roberta_base": build,
    "bert_base": build_bert,
    "transformer_xl": build_xl,
    "synthesizer_lm": build,
}
PLACES = {"transformer": SCOPES["all"], "roberta_base": ("encoder-self",), "bert_base": ("encoder-self",)}

# As the tables of the random draws have them, of their types.
VALUES = {
    name: [convert(value) for value in flags.ATTENTION[option_name(name)]]
    for name, convert in {
        **dict.fromkeys(OPTION_NAMES, str),
        **dict.fromkeys(("head_dim", "relative_gain"), int),
        **dict.fromkeys(("value_init_scale", "mixing_lr_scale"), float),
    }.items()
}


def effect(model, family, monkeypatch, **values):
    """What a user could notice of a model: its parameters and their learning rates, its outputs, the code that ran."""
    sizes = {} if model == "transformer_xl" else {"dropout": 0.0}
    if model == "synthesizer_lm" and "synthesizer" not in values:
        values["synthesizer"] = "factorized-random"
    if family == "fixhead" and "head_dim" not in values:
        sizes["head_dim"] = 6
    built = MODELS[model](f"{family}_{model}", **sizes, **values)
    parameters = {name: p.detach().clone() for name, p in built.named_parameters()}
    rates = {name: getattr(p, "optim_overrides", None) for name, p in built.named_parameters() if p.requires_grad}
    ran = set()
    for name, implementation in api.IMPLEMENTATIONS.items():

        def run(*args, name=name, stock=implementation.run, **options):
            ran.add(name)
            return stock(*args, **options)

        monkeypatch.setitem(api.IMPLEMENTATIONS, name, implementation._replace(run=run))
    shake(built).eval()
    sentences = tokens(length=8)
    with torch.no_grad():
        output = built(sentences, None, sentences)[0] if model == "transformer" else built(sentences)[0]
    monkeypatch.undo()
    return {"parameters": parameters, "rates": rates, "output": output, "ran": ran}


def same(left, right):
    return (
        left["rates"] == right["rates"]
        and left["parameters"].keys() == right["parameters"].keys()
        and all(torch.equal(value, right["parameters"][name]) for name, value in left["parameters"].items())
        and left["output"].shape == right["output"].shape
        and torch.equal(left["output"], right["output"])
        and left["ran"] == right["ran"]
    )


def is_the_default(model, family, name, value):
    """Whether the documentation says that this value is what the model does anyway."""
    default = FAMILIES[family].get(name, AttentionOptions.__dataclass_fields__[name].default)
    if name == "head_dim":
        return family != "fixhead" and value == (5 if model == "transformer_xl" else 4)
    if name == "attention_scope":  # the README's table: which attentions of the model it covers
        places = PLACES.get(model, ("decoder-self",))
        return all(place in SCOPES[value] for place in places)
    return value == default


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", OPTION_NAMES)
def test_every_value_of_a_flag_changes_something_or_is_refused(name, model, family, monkeypatch):
    plain = effect(model, family, monkeypatch)
    for value in VALUES[name]:
        try:
            found = effect(model, family, monkeypatch, **{name: value})
        except OptionError as refused:
            assert option_name(name) in str(refused)
            continue
        if name == "attention_impl" and value != "auto":
            assert found["ran"] == {value}
        elif is_the_default(model, family, name, value):
            assert same(plain, found), (value, "documented as the default")
        else:
            assert not same(plain, found), f"{option_name(name)} {value}"


@pytest.mark.parametrize("option", ["synthesizer_rank", "synthesizer_factor"])
@pytest.mark.parametrize("name", SYNTHESIZERS)
def test_a_size_of_a_synthesizer_changes_it_or_is_refused(name, option):
    def shapes(**values):
        return [p.shape for p in build("mixhead_synthesizer_lm", synthesizer=name, **values).parameters()]

    own = SYNTHESIZERS[name].own_size
    if own is not None and own.option == option:
        assert shapes(**{option: 1}) != shapes(**{option: 2})
    else:
        with pytest.raises(OptionError, match=f"{option_name(option)} 1: has no effect with --synthesizer {name}"):
            shapes(**{option: 1})


def test_every_synthesizer_is_another_model():
    models = [build("mixhead_synthesizer_lm", synthesizer=name) for name in SYNTHESIZERS]
    contents = [
        {(key, tensor.shape, tensor.requires_grad) for key, tensor in m.state_dict(keep_vars=True).items()}
        for m in models
    ]
    assert all(left != right for i, left in enumerate(contents) for right in contents[:i])


def test_the_epsilon_of_layer_norms_changes_the_output():
    small, large = (build_bert(layer_norm_eps=eps).eval()(tokens())[0] for eps in (1e-12, 0.1))
    assert not torch.equal(small, large)


# By flag of a task a value that is not its default; `data` and what fairseq's own flags set are no flags of theirs.
PAIRS = {
    "tokens_per_sample": 16,
    "lines_per_document": 2,
    "short_prob": 0.9,
    "mask_prob": 0.5,
    "leave_unmasked_prob": 0.5,
    "random_token_prob": 0.5,
}
QUESTIONS = {
    "cased": True,
    "max_seq_length": 44,
    "doc_stride": 8,
    "max_query_length": 8,
    "max_answer_length": 1,
    "max_positions": 60,
}
ONLY_IN_VALIDATION = {"nbest_file", "n_best_size"}  # the first is refused in training; the second is for the first


def task_flags(config):
    """Those that are not other flags of fairseq's."""
    return {
        f.name
        for f in fields(config)
        if f.name != "data" and not f.name.startswith("_") and not str(f.default).startswith("${")
    }


def pairs_seen(data, **values):
    """The task's examples of a training."""
    config = BertPretrainingConfig(data=str(data / "documents"), seed=1, **{"tokens_per_sample": 24, **values})
    task = BertPretrainingTask.setup_task(config)
    task.load_dataset("train")
    examples = task.datasets["train"]
    return [{key: torch.as_tensor(value).tolist() for key, value in examples[i].items()} for i in range(len(examples))]


def test_every_flag_of_bert_pretraining_changes_the_examples(data):
    assert set(PAIRS) == task_flags(BertPretrainingConfig)
    plain = pairs_seen(data)
    assert plain == pairs_seen(data)
    for name, value in PAIRS.items():
        assert pairs_seen(data, **{name: value}) != plain, name


def windows_seen(data, **values):
    """The task's windows, what it decodes from random scores, and how long they may be."""
    usual = {"max_seq_length": 48, "doc_stride": 16, "max_query_length": 24, "max_positions": 64}
    config = SquadTaskConfig(data=str(data / "squad"), train_subset="train", seed=1, **{**usual, **values})
    task = SquadTask.setup_task(config)
    windows = task.load_dataset("train")
    sample = windows.collater([windows[i] for i in range(len(windows))])
    shape = sample["net_input"]["src_tokens"].shape
    answers = task.decode(sample, torch.randn(*shape, 2, generator=torch.Generator().manual_seed(1)))
    return sample["net_input"]["src_tokens"].tolist(), answers.tolist(), task.max_positions()


def test_every_flag_of_squad_changes_windows_or_answers(data):
    assert set(QUESTIONS) | ONLY_IN_VALIDATION == task_flags(SquadTaskConfig)
    plain = windows_seen(data)
    assert plain == windows_seen(data)
    for name, value in QUESTIONS.items():
        assert windows_seen(data, **{name: value}) != plain, name


# ---- what fairseq says of its own flags ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, line",
    [
        (Exception("The dataset is empty. This could indicate that"), "data: no batch is left; .*--max-tokens"),
        (
            Exception("AdaptiveLoss is not compatible with the PyTorch version of DistributedDataParallel."),
            "--criterion adaptive_loss: needs --ddp-backend legacy_ddp",
        ),
        (
            ValueError("Cannot use a fixed learning rate schedule with tri-stage lr. Consider --lr-scheduler=fixed"),
            "--lr: must be one number with --lr-scheduler tri_stage",
        ),
        (ValueError("Unsupported optimizer: FairseqAdagrad"), "--optimizer adagrad: does not go with --memory-effic"),
        (ImportError("\n\nPlease install the fairscale package:"), ".*--zero-sharding os: need the package fairscale"),
        (
            ImportError("No FSDP. Please install fairscale with: pip"),
            "--ddp-backend fully_sharded, .*fairscale",
        ),
        (ImportError("Please install apex to use LAMB optimizer"), "--optimizer lamb: needs the package apex"),
        (ValueError("--cpu-offload requires --ddp-backend=fully_sharded"), "--cpu-offload: needs --ddp-backend"),
    ],
)
def test_flags_that_fairseq_refuses_are_named_in_one_line(error, line):
    found = reporting.one_line(error)
    assert re.match(line, found) and "\n" not in found


# ---- fairseq-hydra-train ---------------------------------------------------------------------------------------------


def failed_job(error):
    job = JobReturn(overrides=[], status=JobStatus.FAILED)
    job.return_value = error
    return job


def test_hydra_shows_a_refusal_as_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fairseq-hydra-train"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as end:
        failed_job(OptionError("--head-dim 0: must be more")).return_value  # noqa: B018
    assert end.value.code == 1
    assert capsys.readouterr().err == "fairseq-hydra-train: error: --head-dim 0: must be more\n"


def test_hydra_shows_everything_where_that_is_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit):
        failed_job(OptionError("--head-dim 0: must be more")).return_value  # noqa: B018
    *trace, last = capsys.readouterr().err.splitlines()
    assert "OptionError" in trace[-1] and last.endswith(": error: --head-dim 0: must be more")


def test_hydra_keeps_its_way_with_what_is_not_known(capsys):
    with pytest.raises(KeyError):
        failed_job(KeyError("what")).return_value  # noqa: B018
    assert "Error executing job" in capsys.readouterr().err


def test_hydra_jobs_that_end_well_give_their_value():
    job = JobReturn(status=JobStatus.COMPLETED)
    job.return_value = 3.0
    assert job.return_value == 3.0
