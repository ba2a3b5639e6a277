"""A small stand-in for the pretrained MiniLM, which needs 83 MB from the network."""

import re
from pathlib import Path

import torch

README = (Path(__file__).parents[1] / "README.md").read_text()


def save_small_sentence_encoder(folder):
    """Save a random BERT with MiniLM's 6 layers of 12 heads, and a tokenizer.

    The tokenizer knows the words of README.md.
    """
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir()
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *sorted(set(re.findall(r"[a-z]+|[.?]", README.lower()))),
    ]
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(words))
    BertTokenizerFast(vocab=str(vocabulary)).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = dict(num_hidden_layers=6, num_attention_heads=12, hidden_size=48, intermediate_size=96)
    # With the default range, a few steps of training would not show.
    config = BertConfig(vocab_size=len(words), initializer_range=0.5, **sizes)
    BertModel(config).save_pretrained(folder)
