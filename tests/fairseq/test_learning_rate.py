"""Test the factor on the learning rate of the mixing."""

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.dataclass.configs import FairseqConfig

# It registers the configs of the optimizers.
from fairseq.dataclass.utils import convert_namespace_to_omegaconf  # noqa: F401
from fairseq.optim import OPTIMIZER_REGISTRY, build_optimizer
from fairseq.optim.fp16_optimizer import FP16Optimizer
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from mixhead_plugin.fairseq.learning_rate import scale_steps
from tests.helpers import build, task, tokens

OPTIMIZERS = {
    "adam": {
        "adam_betas": "(0.9, 0.98)",
        "adam_eps": 1e-8,
        "weight_decay": 0.01,
        "use_old_adam": True,
        "fp16_adam_stats": False,
        "tpu": False,
    },
    "sgd": {"momentum": 0.9, "weight_decay": 0.01},
}


def optimizer_config(name, lr):
    config = getattr(OPTIMIZER_REGISTRY[name], "__dataclass", None)
    defaults = {} if config is None else vars(config())
    defaults = {k: v for k, v in defaults.items() if not str(v).startswith("${")}
    values = {**defaults, **OPTIMIZERS[name], "lr": [lr], "_name": name}
    return OmegaConf.create(values)


def train(name, factor, lr, updates=1):
    """Return the parameters after some updates of fairseq's optimizer."""
    model = build("mixhead_transformer_lm", mixing_lr_scale=factor).train()
    optimizer = build_optimizer(optimizer_config(name, lr), list(model.parameters()))
    scale_steps(optimizer.optimizer)
    torch.manual_seed(2)
    for _ in range(updates):
        optimizer.zero_grad()
        model(tokens())[0].log_softmax(-1)[..., 5].mean().neg().backward()
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_step_moves_the_mixing_by_the_factor_and_nothing_else(name):
    start = train(name, 1, 0.01, updates=0)
    plain = train(name, 1, 0.01)
    scaled = train(name, 5, 0.01)
    for key, value in start.items():
        factor = 5 if ".head_mixing." in key else 1
        torch.testing.assert_close(
            scaled[key] - value, factor * (plain[key] - value), rtol=1e-4, atol=1e-6, msg=key
        )
        assert ".head_mixing." not in key or (plain[key] - value).abs().max() > 1e-5


def in_bfloat16(model):
    """Return fairseq's optimizer with float32 copies of the parameters."""
    common = {"bf16": True, "fp16_no_flatten_grads": True, "fp16_scale_window": 1}
    config = OmegaConf.create({"common": common, "optimizer": optimizer_config("sgd", 0.01)})
    return FP16Optimizer.build_optimizer(config, list(model.parameters()))


def test_the_float32_copies_of_half_precision_training_are_scaled_too():
    deltas = []
    for factor in (1, 5):
        model = build("mixhead_transformer_lm", mixing_lr_scale=factor).bfloat16().train()
        optimizer = in_bfloat16(model)
        scale_steps(optimizer.optimizer)
        named = dict(zip(dict(model.named_parameters()), optimizer.fp32_params, strict=True))
        before = {key: value.detach().clone() for key, value in named.items()}
        torch.manual_seed(2)
        optimizer.backward(model(tokens())[0].float().log_softmax(-1)[..., 5].mean().neg())
        optimizer.step()
        deltas.append({key: named[key].detach() - value for key, value in before.items()})
    for key, delta in deltas[0].items():
        factor = 5 if ".head_mixing." in key else 1
        torch.testing.assert_close(deltas[1][key], factor * delta, rtol=1e-3, atol=1e-7, msg=key)


def test_fairseqs_trainer_scales_the_steps_of_its_optimizer():
    model = build("mixhead_transformer_lm", mixing_lr_scale=3)
    cfg = OmegaConf.structured(FairseqConfig)
    OmegaConf.set_struct(cfg, False)
    cfg.common.cpu = True
    cfg.model = {"_name": "mixhead_transformer_lm", "mixing_lr_scale": 3}
    cfg.criterion = {"_name": "cross_entropy"}
    cfg.optimizer = {**optimizer_config("sgd", 0.1), "weight_decay": 0.0}
    cfg.lr_scheduler = {"_name": "fixed", "lr": [0.1]}
    trainer = Trainer(cfg, None, model, CrossEntropyCriterion(task(), sentence_avg=False))

    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    trainer.optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 3 if ".head_mixing." in name else 1
        moved = torch.full_like(parameter, -0.1 * factor)
        torch.testing.assert_close(parameter - before[name], moved, rtol=0, atol=1e-5, msg=name)
