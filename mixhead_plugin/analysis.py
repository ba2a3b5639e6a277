"""Run a command that looks at the heads of a fairseq model.

python -m mixhead_plugin.analysis <command> ...
"""

from mixhead_plugin.fairseq.analysis.command import run_as_program

if __name__ == "__main__":
    run_as_program()
