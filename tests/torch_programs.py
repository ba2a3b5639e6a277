"""Run programs that need torch in processes of their own, without the seconds of its import."""

import sys

from tests.launcher import Launcher

# Its forks have imported torch, but neither fairseq nor transformers, triton or the plugin.
TORCH = Launcher("torch", "torch")


def run_program(text, folder, **settings):
    """Return the CompletedProcess of a program.

    Args:
        text: of the program
        folder: where its file is written
        settings: those of `Launcher.run`
    """
    program = folder / "program.py"
    program.write_text(text)
    # It finds what this process finds.
    return TORCH.run(program, before=f"import sys; sys.path += {sys.path}", **settings)
