"""Prepare WikiText-103; `examples/wikitext103/prepare.sh` runs this."""

from common.archives import Archive
from common.prepare import start
from common.wikitext import WikiText, main

WIKITEXT103 = WikiText(
    name="wikitext-103",
    archive=Archive(
        "wikitext-103-v1.zip",
        (
            "https://wikitext.smerity.com/wikitext-103-v1.zip",
            "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip",
        ),
        "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    ),
    counts={
        "train": {"lines": 1_801_350, "tokens": 103_227_021, "types": 267_735},
        "valid": {"lines": 3_760, "tokens": 217_646},
        "test": {"lines": 4_358, "tokens": 245_569},
    },
)

if __name__ == "__main__":
    start(main, WIKITEXT103)
