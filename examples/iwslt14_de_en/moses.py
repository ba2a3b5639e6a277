"""Moses' tokenizer.perl, lowercase.perl and clean-corpus-n.perl as the published IWSLT14 preparation calls them."""

import re

import regex
from sacremoses import MosesTokenizer

# What the two tokenizers call a letter, a digit or a mark of a word; sacremoses' own tables lack CJK and much of newer
# Unicode unless it is told that the language is Chinese.
ALPHA, NUMBER = r"\p{Alphabetic}", r"\p{N}"
ALNUM = ALPHA + r"\p{Nd}"
# Control characters that are white space to Python alone; Perl removes them.
SEPARATORS = dict.fromkeys(range(0x1C, 0x20))


class Tokenizer(MosesTokenizer):
    """sacremoses, following `tokenizer.perl -l LANGUAGE` also where it departs from it.

    Departures: its character tables, and the full stop that ends a line, which tokenizer.perl splits off whatever
    precedes it since November 2018 ("am I." is "am I .").
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
        """Split the full stop off every word but an abbreviation; a step of `tokenize`."""
        words = text.split()
        for i, word in enumerate(words):
            stem = word[:-1]
            if not stem or not word.endswith("."):
                continue
            following = words[i + 1] if i + 1 < len(words) else None
            if following is not None and (
                ("." in stem and regex.search(ALPHA, stem))
                or stem in self._prefixes
                or regex.match(r"\p{Lowercase}", following)
                or (stem in self._numeric_only and "0" <= following[0] <= "9")
            ):
                continue
            words[i] = f"{stem} ."
        return " ".join(words)

    def __call__(self, line: str) -> str:
        """The tokens of `line`, XML-escaped, one space between them."""
        return " ".join(self.tokenize(line.translate(SEPARATORS), escape=True, return_str=True).split())


def lowercase(line: str) -> str:
    """Perl's `lc`, which knows no final sigma."""
    return line.replace("\N{GREEK CAPITAL LETTER SIGMA}", "\N{GREEK SMALL LETTER SIGMA}").lower()


def is_clean(source: str, target: str, longest: int = 175, ratio: float = 1.5) -> bool:
    """Return True if `clean-corpus-n.perl -ratio RATIO ... 1 LONGEST` keeps this pair of tokenised lines."""
    lengths = [len(source.split()), len(target.split())]
    if min(lengths) < 1 or max(lengths) > longest or max(lengths) > ratio * min(lengths):
        return False
    return not any(re.search(r"\S{1001}", line) for line in (source, target))
