"""Text to tokens for BERT: the WordPiece tokeniser, and the questions of SQuAD as windows and as answers."""
