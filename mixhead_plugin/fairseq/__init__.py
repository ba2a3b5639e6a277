"""The door for fairseq: what --user-dir registers, and the commands that study its models."""
