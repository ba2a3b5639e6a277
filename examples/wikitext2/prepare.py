"""Prepare WikiText-2; `examples/wikitext2/prepare.sh` runs this."""

from common.archives import Archive
from common.prepare import start
from common.wikitext import WikiText, main

WIKITEXT2 = WikiText(
    name="wikitext-2",
    archive=Archive(
        "wikitext-2-v1.zip",
        (
            "https://wikitext.smerity.com/wikitext-2-v1.zip",
            "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
        ),
        "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    ),
    counts={
        "train": {"lines": 36_718, "tokens": 2_088_628, "types": 33_278},
        "valid": {"lines": 3_760, "tokens": 217_646},
        "test": {"lines": 4_358, "tokens": 245_569},
    },
)

if __name__ == "__main__":
    start(main, WIKITEXT2)
