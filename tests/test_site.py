"""The navigation names every page, and the built site shows what the pages say."""

import collections
import fcntl
import re
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"
CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
SECTIONS = ["Home", "Start", "Guides", "Evidence", "Reference", "Contribute"]


def pages_of(navigation):
    """Return the pages below an entry of the navigation."""
    found = []
    for entry in navigation:
        for target in entry.values():
            found += [target] if isinstance(target, str) else pages_of(target)
    return found


def test_the_navigation_names_every_page_of_docs_once():
    named = pages_of(CONFIG["nav"])
    assert len(named) == len(set(named))
    docs = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert docs - set(named) == set(), "add these pages to `nav` in zensical.toml"


def test_the_navigation_names_what_is_there():
    assert [page for page in pages_of(CONFIG["nav"]) if not (ROOT / page).is_file()] == []
    assert [next(iter(entry)) for entry in CONFIG["nav"]] == SECTIONS


# ---- the built site: slow; scripts/docs.sh fetches its tools once --------------------------------


@pytest.fixture(scope="module")
def site():
    """Build the site; no other process builds it until the tests that read it have ended."""
    SITE.parent.mkdir(exist_ok=True)
    with (SITE.parent / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([ROOT / "scripts" / "docs.sh"], check=True, capture_output=True)
        yield {page: Page(page) for page in sorted(SITE.rglob("*.html"))}


COUNTED = ("h1", "h2", "h3", "h4", "ul", "ol", "li", "table", "tr", "pre", "img")


class Page(HTMLParser):
    """What a page of the site has: links, anchors, and how many of each element of its text."""

    def __init__(self, path):
        super().__init__()
        self.links = []
        self.loaded = []
        self.anchors = set()
        self.elements = collections.Counter()
        self.inside = False  # the text of the page, not what stands around it
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if "id" in attributes:
            self.anchors.add(attributes["id"])
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        elif tag in ("img", "script", "source", "link"):
            given = [attributes.get(name) for name in ("src", "srcset", "href")]
            self.loaded += [address for address in given if address]
        if tag == "article":
            self.inside = True
        elif self.inside and tag in COUNTED:
            self.elements[tag] += 1

    def handle_endtag(self, tag):
        if tag == "article":
            self.inside = False


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site):
    broken = []
    for path, page in site.items():
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target = target / "index.html"
            anchors = site[target].anchors if target in site else set()
            if not target.is_file() or (parts.fragment and parts.fragment not in anchors):
                broken.append(f"{path.relative_to(SITE)}: {link}")
    assert broken == []


@pytest.mark.slow
def test_the_site_asks_no_other_host_for_anything(site):
    assert [link for page in site.values() for link in page.loaded if "//" in link] == []


def elements_in_commonmark(text):
    """Return how many of each element CommonMark makes of a page, as GitHub shows it."""
    found = collections.Counter()
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type in ("fence", "code_block"):
            found["pre"] += 1
        elif token.nesting == 1:
            found[token.tag] += 1
        found["img"] += sum(child.type == "image" for child in token.children or [])
        if token.type in ("html_block", "inline"):
            found["img"] += len(re.findall("<img ", token.content))
    return {tag: found[tag] for tag in COUNTED}


@pytest.mark.slow
def test_the_site_shows_the_lists_tables_and_programs_of_each_page(site):
    different = {}
    for path, page in site.items():
        name = path.relative_to(SITE)
        source = ROOT / name.with_suffix(".md")
        if name.name == "index.html":
            source = ROOT / name.with_name("README.md")
        if not source.is_file() or "\n::: " in source.read_text():
            continue
        expected = elements_in_commonmark(source.read_text())
        for tag in COUNTED:
            if page.elements[tag] != expected[tag]:
                different[f"{name} {tag}"] = (expected[tag], page.elements[tag])
    assert different == {}
