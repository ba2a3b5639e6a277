"""Whatever is typed: a training that works or one line that names the flag; and no flag does nothing in silence."""

import re
from dataclasses import fields

import pytest
import torch
from bert.pretraining_task import BertPretrainingConfig, BertPretrainingTask
from bert.squad_task import SquadTask, SquadTaskConfig
from fairseq import options
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY

from mixhead_plugin.criterions.regularized import PenaltyOptions
from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.models.families import FamilyModel
from mixhead_plugin.models.transformer_xl import TransformerXLConfig
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.modules.penalties import PENALTIES
from mixhead_plugin.modules.synthesizer import SYNTHESIZERS
from mixhead_plugin.ops import api
from mixhead_plugin.options import FAMILIES, OPTION_NAMES, SCOPES, AttentionOptions
from tests.criterions.cases import CASES, criterion
from tests.criterions.cases import model as regularized_model
from tests.helpers import VOCABULARY, build, shake, tokens
from tests.robustness import flags
from tests.robustness.flags import KINDS, REFUSED, TRAINED, Draw, Server, draw, make_data, typed, verdict
from tests.xl import build_xl, in_windows

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


ERROR = "fairseq-train: error: "


@pytest.mark.parametrize(
    "kind, drawn, line",
    [
        ("language_model", "--head-dim=0", "--head-dim 0: must be at least 1"),
        ("language_model", "--head-dim=eight", "argument --head-dim: invalid int value: 'eight'"),
        ("language_model", "--head-dim=4 --scale-heads", "--scale-heads: needs --head-dim 5, not 4"),
        ("translation", "--arch fixhead_transformer", "--head-dim is missing: family fixhead needs a head size"),
        ("squad", "--criterion orthogonal_squad", "--orthogonal-weight 0.0001: nothing to act on in this model"),
        ("squad", "--quant-noise-pq=0.1", "--quant-noise-pq-block-size 8: must divide 4, --quant-noise-pq"),
        ("language_model", "--arch l2_transformer_lm_wiki103", "--adaptive-input-cutoff 60000: must be at most 32"),
        ("masked_lm", "--max-positions=4", "data: no batch is left; must not be longer than --max-positions allows"),
        (
            "transformer_xl",
            "--heads-per-layer=decoder-self=0,2",
            "--heads-per-layer decoder-self=0,2: must be one number",
        ),
        (
            "transformer_xl",
            "--relative-position=t5",
            "--relative-position t5: must be none, Transformer-XL has its own",
        ),
    ],
)
def test_a_line_that_blames_what_was_drawn_is_a_refusal(kind, drawn, line):
    assert flags.refusal_problem(ERROR + line, Draw("", kind, tuple(drawn.split()))) == ""


@pytest.mark.parametrize(
    "kind, drawn, line",
    [
        # flags that every command has, or that are no more than a remedy
        ("language_model", "--head-dim=0", "--task language_modeling: must be another"),
        ("language_model", "--head-dim=0", "--max-update 3: must be more, or --head-dim left out"),
        ("squad", "--max-tokens=100", "--batch-size is missing: needs so many rows"),
        ("squad", "--max-tokens=100", "the data is missing"),
        ("translation", "--arch mixhead_transformer", "--head-dim is missing: family fixhead needs a head size"),
        ("squad", "--criterion squad", "--orthogonal-weight 0.0001: nothing to act on in this model"),
        ("masked_lm", "--seed=7", "data: no batch is left; must not be longer than --max-positions allows"),
        # what nobody would call odd
        ("language_model", "--arch fixhead_transformer_lm --head-dim=4", "--head-dim 4: must be a whole number"),
        ("language_model", "--bf16", "--bf16: must be left out"),
    ],
)
def test_a_line_that_blames_something_else_is_none(kind, drawn, line):
    assert flags.refusal_problem(ERROR + line, Draw("", kind, tuple(drawn.split()))) != ""


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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_numbers_of_the_plugins_flags_are_read_as_numbers(kind, family):
    numbers = {"head_dim": 4, "relative_gain": 2, "value_init_scale": 0.5, "mixing_lr_scale": 2.0}
    typed = [f"{option_name(name)}={value}" for name, value in numbers.items()]
    flags = [*kind.arguments, "--arch", f"{family}_{kind.architectures[0]}", "--head-mixing", "position-wise", *typed]
    args = options.parse_args_and_arch(options.get_training_parser(), ["data", *flags])
    assert {name: getattr(args, name) for name in numbers} == numbers


# ---- no flag does nothing --------------------------------------------------------------------------------------------

MODELS = {
    "transformer": build,
    "transformer_lm": build,
    "roberta_base": build,
    "bert_base": build,
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
        sites = PLACES.get(model, ("decoder-self",))
        return all(site in SCOPES[value] for site in sites)
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
    small, large = (build("mixhead_bert_base", layer_norm_eps=eps).eval()(tokens())[0] for eps in (1e-12, 0.1))
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


# ---- Transformer-XL's own flags --------------------------------------------------------------------------------------

XL_USUAL, XL_ODD = KINDS["transformer_xl"].usual[-1], KINDS["transformer_xl"].odd[-1]
PARAMETERS, TRAINING, TEXT, STEPS, SAVED = "parameters", "training", "text", "steps", "saved"
ALL_OF_IT = {PARAMETERS, TRAINING, TEXT, STEPS, SAVED}

# By flag what each value that is not the default changes.
XL_CHANGES = {
    **dict.fromkeys(("n_layer", "n_head", "d_model", "d_head", "d_inner", "div_val", "cutoffs"), ALL_OF_IT),
    "mem_len": {TRAINING, TEXT, STEPS, SAVED},
    "same_length": {TRAINING, TEXT, STEPS, SAVED},
    "clamp_len": {TRAINING, TEXT, STEPS},
    "dropout": {TRAINING, SAVED},
    "dropatt": {TRAINING, SAVED},
    "checkpoint_activations": {SAVED},  # the same, in less memory
    "offload_activations": {SAVED},
    # the task cuts the text by them; the model, how far a step looks back
    "tokens_per_sample": {STEPS},
    "max_target_positions": {STEPS},
}
# Flags and others beside them, of which the documentation says that they do nothing.
XL_NOTHING = [
    ({"clamp_len": -1}, {}),
    ({"clamp_len": 0}, {}),
    ({"div_val": 1}, {}),
    ({"dropout": 0.0}, {}),
    ({"dropatt": 0.0}, {}),
    ({"same_length": False}, {}),
    ({"cutoffs": [9, 20, 100000]}, {}),
    ({"d_head": 2}, {"head_dim": 4}),
    ({"d_head": 2}, {"arch": "fixhead_transformer_xl"}),
    ({"tokens_per_sample": 4}, {"max_target_positions": 8}),
]


def of_xl(table):
    """Names and values of a table of the random draws, of their types."""
    for flag, texts in table.items():
        name = flag[2:].replace("-", "_")
        for text in texts or [""]:
            if name == "cutoffs" and text != "a":  # argparse refuses that
                yield name, [int(number) for number in text.split(",")]
            elif name != "cutoffs":
                yield name, True if not text else float(text) if name in ("dropout", "dropatt") else int(text)


def shown(value):
    return f"{value}".replace(" ", "")


def xl_effect(arch="mixhead_transformer_xl", **values):
    """What a user could notice: parameters, the log-probabilities of three windows in training and after it, the
    memory of the first, and the log-probabilities of decoding step by step."""
    model = build_xl(arch, **values)
    words = torch.randint(4, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(3))
    saved = []
    torch.manual_seed(5)  # of the dropout
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        trained = in_windows(model.train(), words, [8, 8, 8])
    state, model = {}, model.eval()
    with torch.no_grad():
        text = in_windows(model, words, [8, 8, 8])
        decoded = [model.decoder(words[:, :n], incremental_state=state) for n in range(1, words.shape[1] + 1)]
        steps = torch.cat([model.get_normalized_probs(out, log_probs=True) for out in decoded], 1)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return {PARAMETERS: parameters, TRAINING: trained.detach(), TEXT: text, STEPS: steps, SAVED: saved}


def xl_differences(left, right):
    """Which of what a user could notice differs."""

    def equal(a, b):
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(equal(value, b[name]) for name, value in a.items())
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return {part for part in left if not equal(left[part], right[part])}


def test_every_flag_of_transformer_xl_is_in_the_tables():
    ours = {f.name for f in fields(TransformerXLConfig) if not f.name.startswith("_")} - set(OPTION_NAMES)
    assert ours == set(XL_CHANGES) == {name for table in (XL_USUAL, XL_ODD) for name, _ in of_xl(table)}


@pytest.mark.parametrize("name, value", [*of_xl(XL_USUAL), ("max_target_positions", 2)], ids=shown)
def test_every_value_of_transformer_xls_flags_changes_what_it_should(name, value):
    base = {"max_target_positions": None} if name == "tokens_per_sample" else {}
    changed = xl_differences(xl_effect(**base), xl_effect(**{**base, name: value}))
    assert changed == (set() if ({name: value}, base) in XL_NOTHING else XL_CHANGES[name])


@pytest.mark.parametrize("values, beside", XL_NOTHING, ids=shown)
def test_what_is_documented_to_do_nothing_in_transformer_xl_does_nothing(values, beside):
    assert xl_differences(xl_effect(**beside), xl_effect(**beside, **values)) == set()


def test_the_length_of_a_window_is_the_size_of_a_fixhead():
    changed = xl_differences(*(xl_effect("fixhead_transformer_xl", tokens_per_sample=n) for n in (4, 8)))
    assert changed == ALL_OF_IT


@pytest.mark.parametrize("name, value", list(of_xl(XL_ODD)), ids=shown)
def test_odd_values_of_transformer_xls_flags_are_refused_or_change_something(name, value):
    base = {"max_target_positions": None} if name == "tokens_per_sample" else {}
    try:
        found = xl_effect(**{**base, name: value})
    except OptionError as refused:
        assert str(refused).startswith(f"{option_name(name)} ")
    else:
        assert xl_differences(xl_effect(**base), found) == XL_CHANGES[name]


# ---- weights of the penalties ----------------------------------------------------------------------------------------


def losses(stock, name, weight, **values):
    """Of a batch in training and in validation; without a `name` by fairseq's own criterion."""
    made, sample = regularized_model(stock, **values), CASES[stock].batch()
    others = {f"{other}_weight": 0.0 for other in PENALTIES}
    kind = criterion(f"orthogonal_{stock}", **{**others, f"{name}_weight": weight}) if name else criterion(stock)
    found = []
    for training in (True, False):
        made.train(training), kind.train(training)
        found.append(kind(made, sample)[0].sum().item())
    return found


@pytest.mark.parametrize("mixing", HEAD_MIXINGS)
@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("stock", CASES)
def test_every_weight_of_a_penalty_changes_the_loss_of_training_alone_or_is_refused(stock, name, mixing):
    training, validation = losses(stock, None, 0, head_mixing=mixing)
    seen = []
    for weight in map(float, flags.PENALTY[f"--{name}-weight"]):
        try:
            found = losses(stock, name, weight, head_mixing=mixing)
        except OptionError as refused:
            assert PENALTIES[name].on_mixing and not HEAD_MIXINGS[mixing].trained and weight > 0
            assert str(refused).startswith(f"--{name}-weight {weight}: nothing to act on in this model; use ")
            continue
        assert found[1] == validation, "in training alone"
        if weight == 0:
            assert found[0] == training, "0 is off"
        seen.append(found[0])
    assert len(set(seen)) == len(seen) == (3 if not PENALTIES[name].on_mixing or HEAD_MIXINGS[mixing].trained else 1)


@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_on_one_head_changes_the_loss_or_is_refused(name):
    one = {"head_mixing": "position-wise", "decoder_attention_heads": 1}
    if PENALTIES[name].on_mixing:  # its one number is not 1
        assert losses("cross_entropy", name, 1.0, **one)[0] != losses("cross_entropy", name, 0.0, **one)[0]
    else:
        with pytest.raises(OptionError, match=f"--{name}-weight 1.0: nothing to act on .* two heads or more"):
            losses("cross_entropy", name, 1.0, **one)


@pytest.mark.parametrize("flag, text", [(flag, text) for flag, texts in flags.ODD_PENALTY.items() for text in texts])
def test_odd_weights_of_a_penalty_are_refused(flag, text):
    line = re.escape(f"{flag} {float(text)}: must be a finite number, 0 (off) or more")
    with pytest.raises(OptionError, match=f"^{line}$"):
        criterion("orthogonal_cross_entropy", **{flag[2:].replace("-", "_"): float(text)})
