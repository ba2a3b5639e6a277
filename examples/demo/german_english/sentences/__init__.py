"""The sorts of sentence, each drawn by a function that takes the dice."""
