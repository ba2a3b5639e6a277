"""nn.Modules that keep fairseq's contracts."""
