"""Tokenize, lower-case and clean as Moses' Perl scripts do in the published IWSLT14 preparation."""

import re

import regex
from sacremoses import MosesTokenizer

# tokenizer.perl's letters and digits. sacremoses' own tables lack CJK, except for Chinese, and much
# of newer Unicode.
ALPHA = r"\p{Alphabetic}"
NUMBER = r"\p{N}"
ALNUM = ALPHA + r"\p{Nd}"
# Perl removes these control characters; Python takes them for white space.
SEPARATORS = dict.fromkeys(range(0x1C, 0x20))


class Tokenizer(MosesTokenizer):
    """sacremoses, corrected where it differs from `tokenizer.perl -l LANGUAGE`.

    It has other character tables. And since November 2018 tokenizer.perl always splits off the full
    stop at the end of a line ("am I." becomes "am I .").
    """

    def __init__(self, language: str):
        super().__init__(language)
        self.PAD_NOT_ISALNUM = regex.compile(rf"([^{ALNUM}\s.'`,\-])"), r" \1 "
        self.COMMA_SEPARATE_1 = regex.compile(rf"([^{NUMBER}]),"), r"\1 , "
        self.COMMA_SEPARATE_2 = regex.compile(rf",([^{NUMBER}])"), r" , \1"
        self.COMMA_SEPARATE_3 = regex.compile(rf"([{NUMBER}]),$"), r"\1 , "
        self.ENGLISH_SPECIFIC_APOSTROPHE = [
            (regex.compile(rf"([^{ALPHA}])'([^{ALPHA}])"), r"\1 ' \2"),
            (regex.compile(rf"([^{ALPHA}{NUMBER}])'([{ALPHA}])"), r"\1 ' \2"),
            (regex.compile(rf"([{ALPHA}])'([^{ALPHA}])"), r"\1 ' \2"),
            (regex.compile(rf"([{ALPHA}])'([{ALPHA}])"), r"\1 '\2"),
            (regex.compile(rf"([{NUMBER}])'(s)"), r"\1 '\2"),
        ]
        self._numeric_only = frozenset(self.NUMERIC_ONLY_PREFIXES)
        self._prefixes = frozenset(self.NONBREAKING_PREFIXES) - self._numeric_only

    def handles_nonbreaking_prefixes(self, text: str) -> str:
        """Split the full stop off every word except abbreviations; `tokenize` calls this."""
        words = text.split()
        for i, word in enumerate(words):
            stem = word[:-1]
            if not stem or not word.endswith("."):
                continue
            is_last = i + 1 == len(words)
            if is_last or not self._is_abbreviation(stem, words[i + 1]):
                words[i] = f"{stem} ."
        return " ".join(words)

    def _is_abbreviation(self, stem: str, following: str) -> bool:
        """Tell whether a word keeps its full stop, from the rest of it and the word behind it."""
        if "." in stem and regex.search(ALPHA, stem):
            return True
        if stem in self._prefixes:
            return True
        if regex.match(r"\p{Lowercase}", following):
            return True
        return stem in self._numeric_only and "0" <= following[0] <= "9"

    def __call__(self, line: str) -> str:
        """Return the tokens of `line`, XML-escaped, with one space between them."""
        tokens = self.tokenize(line.translate(SEPARATORS), escape=True, return_str=True)
        return " ".join(tokens.split())


def lowercase(line: str) -> str:
    """Lower-case as Perl's `lc`, which has no final sigma."""
    return line.replace("\N{GREEK CAPITAL LETTER SIGMA}", "\N{GREEK SMALL LETTER SIGMA}").lower()


def is_clean(source: str, target: str, longest: int = 175, ratio: float = 1.5) -> bool:
    """Return True if Moses keeps this pair of tokenised lines.

    That is `clean-corpus-n.perl -ratio RATIO ... 1 LONGEST`.
    """
    lengths = [len(source.split()), len(target.split())]
    if min(lengths) < 1 or max(lengths) > longest or max(lengths) > ratio * min(lengths):
        return False
    return not any(re.search(r"\S{1001}", line) for line in (source, target))
