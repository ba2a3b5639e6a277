"""The door for fairseq: what `--user-dir mixhead_plugin` registers, and the commands that look at
its models.
"""
