"""fairseq's Transformer-XL and its task, which lie among fairseq's examples.

Importing them registers both. A fairseq without its examples has neither; then the plugin registers
no Transformer-XL.
"""

from fairseq.dataclass import FairseqDataclass

try:
    from fairseq.examples.truncated_bptt.transformer_xl_model import TransformerXLConfig
    from fairseq.examples.truncated_bptt.truncated_bptt_lm_task import TruncatedBPTTLMTask
except ModuleNotFoundError as error:
    # Examples that are there, but need a module that is not, are a fault that must be seen.
    if not (error.name or "").startswith("fairseq.examples"):
        raise
    TransformerXLConfig = FairseqDataclass
    TruncatedBPTTLMTask = None
