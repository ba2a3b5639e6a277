"""Let Hydra make its own command line under Python 3.14, by `mixhead hydra-train`.

Since version 3.14, argparse reads the help of a flag when the flag is added. The help of Hydra's
--shell-completion is no text until somebody asks for it. So fairseq-hydra-train ends with 'badly
formed help string' when it starts. fairseq imports no --user-dir before, so a command of the
plugin's own has to start it.
"""

import sys
from argparse import ArgumentParser

import hydra.main  # noqa: F401 (its attribute `main` of `hydra` is a function)
from hydra._internal import utils

from mixhead_plugin.fairseq.replace import replaces

VERSIONS = "hydra-core 1.3.2 to 1.3.8, with Python >= 3.14"
ISSUE = "https://github.com/facebookresearch/hydra/issues/3121"


@replaces(utils, "get_args_parser")
def _get_args_parser(original) -> ArgumentParser:
    """Return Hydra's parser, made while argparse does not read the help of its flags."""
    if not hasattr(ArgumentParser, "_check_help"):  # Python 3.13 or older
        return original()
    # The class inherits the check. Its own attribute hides the check as long as Hydra's parser is
    # being made; later parsers are checked again.
    ArgumentParser._check_help = lambda parser, action: None
    try:
        return original()
    finally:
        del ArgumentParser._check_help


def apply() -> None:
    # hydra.main has imported the function by its name before.
    vars(sys.modules["hydra.main"])["get_args_parser"] = utils.get_args_parser
