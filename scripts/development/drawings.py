"""Draw the pictures that explain an idea, each into docs/<name>.svg.

They have the colours of the page of `view`, follow the reader's light or dark theme, and need no
package. The numbers are made up, but what is computed from them is computed here.
"""

import argparse
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"

Matrix = Sequence[Sequence[float]]

# Paper, card, ink, soft and edge are those of heads/page.css; the heads have Okabe and Ito's
# colours, as in heads/figures.py, and lighter ones on dark paper.
STYLE = """
  svg {
    --card: #ffffff; --ink: #1d2733; --soft: #5d6875; --edge: #e0ddd6; --quiet: #f7f6f3;
    --one: #0072b2; --two: #d55e00; --three: #009e73; --four: #a8558a; --new: #fdf0e6;
  }
  @media (prefers-color-scheme: dark) {
    svg {
      --card: #181d23; --ink: #e6eaef; --soft: #98a3b0; --edge: #2c343d; --quiet: #101418;
      --one: #4aa8e0; --two: #f0883e; --three: #2fc49a; --four: #d58fbd; --new: #33251a;
    }
  }
  text {
    font: 14px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
    fill: var(--ink);
  }
  .title { font-weight: 600 }
  .soft { fill: var(--soft); font-size: 13px }
  .word { fill: var(--soft); font-size: 12px }
  .strong { fill: var(--ink); font-weight: 600; font-size: 12px }
  .card { fill: var(--card); stroke: var(--edge) }
  .quiet { fill: var(--quiet); stroke: var(--edge) }
  .new { fill: var(--new); stroke: var(--two); stroke-width: 2 }
  .line { fill: none; stroke: var(--edge); stroke-width: 1.5 }
  .arrow { fill: none; stroke: var(--soft); stroke-width: 1.5 }
  .dashed { fill: none; stroke: var(--two); stroke-width: 1.5; stroke-dasharray: 5 4 }
  .tip { fill: var(--soft) }
  .negative { fill: var(--soft) }
  .one { fill: var(--one) } .two { fill: var(--two) } .three { fill: var(--three) }
  .four { fill: var(--four) }
  .ink { fill: var(--ink) }
  .stroke { fill: none; stroke-linecap: round }
  .stroke.one { stroke: var(--one) }
  .stroke.two { stroke: var(--two) }
  .stroke.three { stroke: var(--three) }
"""

TIMES = "\N{MULTIPLICATION SIGN}"
WORDS = ("The", "dog", "that", "barked", "ran")
HEADS = ("one", "two", "three")  # the classes of their colours

# How much each head looks at each word, from each word; a word sees itself and those before it.
PATTERNS: Sequence[Matrix] = (
    (
        (1.0,),
        (0.1, 0.9),
        (0.05, 0.85, 0.1),
        (0.05, 0.75, 0.1, 0.1),
        (0.05, 0.7, 0.05, 0.1, 0.1),
    ),
    (
        (1.0,),
        (0.5, 0.5),
        (0.3, 0.3, 0.4),
        (0.1, 0.1, 0.2, 0.6),
        (0.02, 0.03, 0.05, 0.8, 0.1),
    ),
    tuple(tuple(1 / (word + 1) for _ in range(word + 1)) for word in range(len(WORDS))),
)

# M[j][i]: how much of head j is in mixed head i.
MIXING: Matrix = (
    (0.6, 0.1, 0.2),
    (0.3, 0.8, 0.1),
    (0.1, 0.1, 0.7),
)


class Drawing:
    """Collect the elements of one SVG file on a card."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.size = width, height
        self.parts = [
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="text">{escape(description)}</desc>',
            f"<style>{STYLE}</style>",
        ]
        self.box(0.5, 0.5, width - 1, height - 1, "card", 12)

    def svg(self) -> str:
        width, height = self.size
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'aria-labelledby="title text">',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def text(self, x: float, y: float, words: str, look: str = "", anchor: str = "start") -> None:
        place = f'x="{number(x)}" y="{number(y)}" text-anchor="{anchor}"'
        self.parts.append(f'<text class="{look}" {place}>{escape(words)}</text>')

    def lines(self, x: float, y: float, lines: Sequence[str], look: str = "soft") -> None:
        for count, line in enumerate(lines):
            self.text(x, y + 20 * count, line, look)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        look: str,
        radius: float = 0,
        opacity: float = 1,
    ) -> None:
        size = f'width="{number(width)}" height="{number(height)}"'
        more = f' rx="{number(radius)}"' if radius else ""
        if opacity < 1:
            more += f' fill-opacity="{opacity:.2f}"'
        place = f'x="{number(x)}" y="{number(y)}"'
        self.parts.append(f'<rect class="{look}" {place} {size}{more}/>')

    def path(self, steps: str, look: str, width: float | None = None) -> None:
        more = "" if width is None else f' stroke-width="{number(width)}"'
        self.parts.append(f'<path class="{look}" d="{steps}"{more}/>')

    def arrow(self, steps: str, end: tuple[float, float]) -> None:
        """Draw a path whose last piece goes right to `end`, and a tip there."""
        x, y = end
        self.path(steps, "arrow")
        self.path(f"M{number(x - 7)} {number(y - 4)}v8l7 -4z", "tip")

    def arrow_down(self, x: float, start: float, end: float) -> None:
        self.path(f"M{number(x)} {number(start)}V{number(end)}", "arrow")
        self.path(f"M{number(x - 4)} {number(end - 7)}h8l-4 7z", "tip")

    def heat(
        self, x: float, y: float, matrix: Matrix, cell: float, looks: Sequence[str], columns: int
    ) -> None:
        """Draw a matrix; `looks` has the colour of each row, negative numbers are grey.

        Small weights stay visible, by the same power as on the page of `view`.
        """
        self.box(x, y, columns * cell, len(matrix) * cell, "quiet")
        for row, values in enumerate(matrix):
            top = y + row * cell
            for column, value in enumerate(values):
                shade = min(1.0, abs(value)) ** 0.6
                look = looks[row] if value >= 0 else "negative"
                self.box(x + column * cell + 1, top + 1, cell - 2, cell - 2, look, 0, shade)


def number(value: float) -> str:
    """Return it with at most one decimal."""
    return f"{round(value, 1):g}"


# ---- what mixing does ----------------------------------------------------------------------------


def words_below(drawing: Drawing, x: float, y: float, step: float) -> None:
    """Write the sentence below bars; the last word is the one that looks."""
    for place, word in enumerate(WORDS):
        look = "strong" if word == WORDS[-1] else "word"
        drawing.text(x + place * step, y, word, look, "middle")


def mixing() -> Drawing:
    """Draw what three heads look at, and the sum that head 1 uses with mixing."""
    weights = [pattern[-1] for pattern in PATTERNS]
    shares = [row[0] for row in MIXING]
    says = ("head 1 finds the subject", "head 2 finds the verb before", "head 3 looks everywhere")
    given = ", ".join(f"{share} of head {head + 1}" for head, share in enumerate(shares))
    drawing = Drawing(
        760,
        430,
        "Three heads, and one that mixes them",
        f'Bars show how much three heads look at each word of "{" ".join(WORDS)}", from the word '
        f'"{WORDS[-1]}". Mixed head 1 is the sum of {given}.',
    )
    drawing.text(24, 34, f"What three heads look at, from the word “{WORDS[-1]}”", "title")

    # the three heads, one above the other
    step, bar = 46, 26
    for head, look in enumerate(HEADS):
        base = 146 + 120 * head
        drawing.text(24, base - 66, says[head], "soft")
        for place, weight in enumerate(weights[head]):
            height = 62 * weight
            drawing.box(30 + place * step, base - height, bar, height, look)
        drawing.path(f"M18 {base}h236", "line")
        words_below(drawing, 43, base + 16, step)

    # a line from each, as thick as its share
    for head, (look, share) in enumerate(zip(HEADS, shares)):
        start, end = 116 + 120 * head, 201 + 16 * head
        width = 2 + 14 * share
        curve = f"M268 {start}C358 {start} 388 {end} 478 {end}"
        drawing.path(curve, f"stroke {look}", width)
        label = (104, 224, 382)[head]
        drawing.text(322, label, f"{TIMES} {share}", f"title {look}", "middle")

    # the sum, piled up
    drawing.text(500, 82, "What head 1 uses with mixing", "title")
    drawing.text(500, 104, "the subject, and what it did before", "soft")
    for place in range(len(WORDS)):
        top = 262.0
        for head, look in enumerate(HEADS):
            height = 176 * shares[head] * weights[head][place]
            top -= height
            drawing.box(506 + place * step, top, bar, height, look)
    drawing.path("M494 262h236", "line")
    words_below(drawing, 519, 278, step)
    drawing.lines(
        500,
        320,
        (
            "Training learns the three numbers.",
            "They start as 1, 0, 0: each head uses",
            "itself, as in any Transformer. Heads",
            "2 and 3 have numbers of their own.",
        ),
    )
    return drawing


# ---- where a mixing sits -------------------------------------------------------------------------


def layer() -> Drawing:
    """Draw the way from the input to the output of an attention, with the mixing in it."""
    drawing = Drawing(
        760,
        318,
        "Where the mixing sits in an attention layer",
        "From the input to queries, keys and values; scores; softmax; then the mixing; then the "
        "sum of the values and the output projection. Mixhead B also reads the queries. Only the "
        "mixing is new.",
    )
    drawing.text(24, 34, "One attention layer, from left to right", "title")

    def stage(x: float, y: float, width: float, name: str, look: str = "quiet") -> None:
        drawing.box(x, y, width, 40, look, 8)
        strong = "title" if look == "new" else ""
        drawing.text(x + width / 2, y + 25, name, strong, "middle")

    stage(24, 136, 60, "input")
    stage(122, 76, 84, "queries")
    stage(122, 136, 84, "keys")
    stage(122, 196, 84, "values")
    stage(250, 106, 76, "scores")
    stage(362, 106, 84, "softmax")
    stage(482, 106, 84, "mixing", "new")
    stage(602, 136, 60, "sum")
    stage(690, 136, 50, "out")

    # the input to its three projections
    drawing.path("M84 156H103", "arrow")
    for y in (96, 156, 216):
        drawing.arrow(f"M103 156V{y}H122", (122, y))
    # queries and keys to the scores
    drawing.arrow("M206 96H228V118H250", (250, 118))
    drawing.arrow("M206 156H228V134H250", (250, 134))
    drawing.arrow("M326 126H362", (362, 126))
    drawing.arrow("M446 126H482", (482, 126))
    # mixed weights and values to the sum over the keys
    drawing.arrow("M566 126H584V148H602", (602, 148))
    drawing.arrow("M206 216H584V164H602", (602, 164))
    drawing.arrow("M662 156H690", (690, 156))
    # what B reads
    drawing.path("M164 76V60H524V99", "dashed")
    drawing.path("M520 99h8l-4 7z", "two")
    drawing.text(236, 54, "Mixhead B reads the queries; Mixhead A reads nothing", "soft")

    drawing.text(404, 168, "weights of", "word", "middle")
    drawing.text(404, 184, "each head", "word", "middle")
    drawing.text(524, 168, "each head uses", "word", "middle")
    drawing.text(524, 184, "a mixture of all", "word", "middle")

    drawing.box(24, 262, 16, 16, "new", 4)
    drawing.text(
        48, 275, "is new: a small matrix M, which starts so that each head uses itself.", "soft"
    )
    drawing.box(24, 286, 16, 16, "quiet", 4)
    drawing.text(
        48,
        299,
        "stays as it is. “sum” adds up the values by the weights; “out” is the output projection.",
        "soft",
    )
    return drawing


# ---- what a value map is -------------------------------------------------------------------------


def value_maps() -> Drawing:
    """Draw three patterns, and through which heads each sends what it reads: one, or all."""
    drawing = Drawing(
        760,
        404,
        "The same patterns, but each says more",
        "Three patterns of attention. Without mixing each sends what it reads through the values "
        "of its own head. With Mixhead A each sends it through the values of all three heads, in "
        "amounts that M says.",
    )
    identity = [[float(row == column) for column in range(3)] for row in range(3)]
    panels = (
        (
            24,
            "Without mixing",
            identity,
            ("A pattern passes its own head alone:", "a narrow pipe, of the size of a head."),
        ),
        (
            396,
            "With Mixhead A",
            MIXING,
            ("The same patterns, but each passes", "all heads: as wide as the model."),
        ),
    )
    drawing.path("M380 24V380", "line")
    for left, title, shares, says in panels:
        drawing.text(left, 34, title, "title")
        drawing.text(left, 60, "where it looks", "soft")
        drawing.text(left + 218, 60, "what it can say", "soft")
        for head in range(len(HEADS)):
            top = 74 + 88 * head
            drawing.heat(left, top, PATTERNS[head], 14, ["ink"] * len(WORDS), len(WORDS))
            drawing.text(left + 80, top + 40, f"pattern {head + 1}", "word")
            drawing.arrow(f"M{left + 144} {top + 35}H{left + 206}", (left + 206, top + 35))
            # the value map: a pipe for each head, as thick as its share
            drawing.box(left + 218, top, 110, 70, "quiet", 6)
            for other, colour in enumerate(HEADS):
                share = shares[head][other]
                if share:
                    middle = top + 13 + 22 * other
                    pipe = f"M{left + 228} {number(middle)}h90"
                    drawing.path(pipe, f"stroke {colour}", 2 + 14 * share)
        drawing.lines(left, 358, says)
    return drawing


# ---- what B reads --------------------------------------------------------------------------------

# Queries of each word: a row for each head, as wide as a head.
QUERIES: Sequence[Matrix] = (
    ((0.2, 0.1, 0.6, 0.1), (0.5, 0.2, 0.1, 0.3), (0.1, 0.4, 0.2, 0.2)),
    ((0.9, 0.2, 0.1, 0.4), (0.1, 0.7, 0.3, 0.1), (0.3, 0.1, 0.8, 0.2)),
    ((0.1, 0.8, 0.2, 0.2), (0.6, 0.1, 0.5, 0.9), (0.2, 0.6, 0.1, 0.7)),
    ((0.3, 0.2, 0.9, 0.6), (0.8, 0.3, 0.1, 0.2), (0.6, 0.2, 0.4, 0.1)),
    ((0.7, 0.5, 0.2, 0.9), (0.2, 0.9, 0.6, 0.3), (0.8, 0.1, 0.3, 0.6)),
)
READING: Matrix = (  # W, the same for all heads and words
    (0.5, -0.4, 0.3),
    (-0.3, 0.6, -0.2),
    (0.4, -0.5, 0.5),
    (-0.4, 0.3, -0.3),
)


def read_mixing(queries: Matrix) -> list[list[float]]:
    """Return M of one word: row j is the query of head j times W, and row j of b."""
    rows = []
    for query, start in zip(queries, MIXING):
        row = list(start)
        for value, weights in zip(query, READING):
            row = [so_far + value * weight for so_far, weight in zip(row, weights)]
        rows.append(row)
    return rows


def reads() -> Drawing:
    """Draw how Mixhead A has one M for all words, and how Mixhead B makes one from the queries."""
    drawing = Drawing(
        760,
        362,
        "What Mixhead B reads",
        "Mixhead A has one matrix M for all words. Mixhead B computes a matrix for each word: the "
        "queries of that word times W, plus b.",
    )
    drawing.text(24, 34, "Mixhead A: one M for all words", "title")
    drawing.text(312, 34, "Mixhead B: each word makes its own M", "title")
    drawing.path("M290 24V338", "line")

    # A
    drawing.heat(96, 84, MIXING, 30, HEADS, 3)
    drawing.text(141, 70, "M", "strong", "middle")
    for place, word in enumerate(WORDS):
        x = 40 + 50 * place
        drawing.path(f"M{x} 252C{x} 216 141 226 141 184", "line")
        drawing.text(x, 270, word, "word", "middle")
    drawing.lines(24, 318, ("Training learns M.", "It is the same wherever a head looks."))

    # B, one word in full
    word = len(WORDS) - 1
    queries = QUERIES[word]
    drawing.text(312, 62, f"queries of “{WORDS[word]}”", "strong")
    drawing.heat(312, 84, queries, 24, HEADS, 4)
    drawing.text(422, 126, TIMES, "title", "middle")
    drawing.text(472, 62, "W", "strong", "middle")
    drawing.heat(436, 72, READING, 24, ["four"] * 4, 3)
    drawing.text(524, 126, "+", "title", "middle")
    drawing.text(574, 62, "b", "strong", "middle")
    drawing.heat(538, 84, MIXING, 24, HEADS, 3)
    drawing.text(626, 126, "=", "title", "middle")
    drawing.text(676, 62, f"M of “{WORDS[word]}”", "strong", "middle")
    drawing.heat(640, 84, read_mixing(queries), 24, HEADS, 3)

    # and the matrices of all words
    for place, name in enumerate(WORDS):
        x = 312 + 90 * place
        drawing.heat(x, 206, read_mixing(QUERIES[place]), 20, HEADS, 3)
        look = "strong" if place == word else "word"
        drawing.text(x + 30, 284, name, look, "middle")
    drawing.lines(
        312,
        318,
        (
            "A row is a head: its query makes its row of M. Grey is below 0.",
            "Training learns W and b. At the start, M is 1 on the diagonal.",
        ),
    )
    return drawing


# ---- the matrix M --------------------------------------------------------------------------------


def mixed(head: int) -> list[list[list[float]]]:
    """Return what each source head gives to the cells of a mixed head, [Nq][Nk][H]."""
    rows = []
    for word in range(len(WORDS)):
        cells = []
        for seen in range(word + 1):
            cells.append([PATTERNS[j][word][seen] * MIXING[j][head] for j in range(len(HEADS))])
        rows.append(cells)
    return rows


def mixing_matrices() -> Drawing:
    """Draw source heads beside the rows of M, and below each column the head that it mixes."""
    drawing = Drawing(
        760,
        446,
        "Three source heads are mixed by a matrix M",
        "Row j of M belongs to source head j, column i to mixed head i. A mixed head is the sum of "
        "the source heads, each times its number in the column.",
    )
    side, cell = 70, 14
    drawing.text(24, 34, "source heads P", "title")
    drawing.text(180, 34, "M", "title")
    for row, look in enumerate(HEADS):
        top = 52 + 86 * row
        drawing.heat(56, top, PATTERNS[row], cell, [look] * len(WORDS), len(WORDS))
        drawing.text(40, top + 40, str(row + 1), f"title {look}", "end")
        for column in range(len(HEADS)):
            left = 180 + 100 * column
            share = MIXING[row][column]
            drawing.box(left, top, side, side, "quiet", 6)
            drawing.box(left, top, side, side, look, 6, share**0.6)
            drawing.text(left + side / 2, top + 40, str(share), "title", "middle")

    # below each column the head that it makes: a layer of colour for each source head
    for column in range(len(HEADS)):
        left = 180 + 100 * column
        drawing.arrow_down(left + side / 2, 300, 324)
        drawing.box(left, 332, side, side, "quiet")
        for word, cells in enumerate(mixed(column)):
            for seen, given in enumerate(cells):
                for look, part in zip(HEADS, given):
                    place = left + seen * cell + 1, 332 + word * cell + 1
                    drawing.box(*place, cell - 2, cell - 2, look, 0, part**0.6)
        drawing.text(left + side / 2, 422, str(column + 1), "title", "middle")
    drawing.text(24, 372, "mixed heads", "title")
    drawing.text(24, 392, "P\u0304", "title")

    drawing.lines(
        500,
        74,
        (
            "A row of M is a source head,",
            "a column is a mixed head.",
            "",
            "A column says how much of each",
            "source head goes into the mixed",
            "head below it.",
            "",
            "Without mixing, M is 1 on the",
            "diagonal and 0 elsewhere.",
        ),
    )
    return drawing


# ---- the penalty that keeps mixed heads apart ----------------------------------------------------

# Two mixings of three heads. The columns of the first one are almost the same; those of the second
# one have length 1, and are at right angles.
ALIKE: Matrix = ((0.6, 0.5, 0.5), (0.5, 0.6, 0.4), (0.4, 0.4, 0.6))
APART: Matrix = ((2 / 3, -1 / 3, 2 / 3), (2 / 3, 2 / 3, -1 / 3), (-1 / 3, 2 / 3, 2 / 3))


def products_of_columns(matrix: Matrix) -> list[list[float]]:
    """Return M^T M: the product of each two columns, and of each with itself."""
    columns = list(zip(*matrix))
    products = []
    for one in columns:
        products.append([product(one, two) for two in columns])
    return products


def product(one: Sequence[float], two: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, two))


def penalty(matrix: Matrix) -> float:
    """Return the squared Frobenius norm of M^T M - I."""
    norm = 0.0
    for row, values in enumerate(products_of_columns(matrix)):
        for column, value in enumerate(values):
            identity = 1 if row == column else 0
            norm += (value - identity) ** 2
    return norm


def orthogonality() -> Drawing:
    """Draw two mixings, the products of their columns, and the penalty that these give."""
    drawing = Drawing(
        760,
        424,
        "The penalty is large where mixed heads are alike",
        "A mixing M has a column for each mixed head. M^T M has the product of each two columns. "
        f"Columns that are alike have a penalty of {penalty(ALIKE):.2f}, columns of length 1 at "
        f"right angles have {penalty(APART):.2f}.",
    )
    drawing.text(36, 34, "M", "title")
    drawing.text(270, 34, "MᵀM", "title")
    drawing.text(500, 34, "penalty", "title")
    says = (
        ("The columns are almost the same,", "so mixed heads are alike."),
        ("The columns have length 1,", "and are at right angles."),
    )
    cell = 52
    for count, matrix in enumerate((ALIKE, APART)):
        top = 52 + 188 * count
        drawing.heat(36, top, matrix, cell, HEADS, len(HEADS))
        products = products_of_columns(matrix)
        paler = [[value / 2 for value in row] for row in products]  # numbers stay readable on it
        drawing.heat(270, top, paler, cell, ["four"] * len(HEADS), len(HEADS))
        for left, values in ((36, matrix), (270, products)):
            for row, numbers in enumerate(values):
                for column, value in enumerate(numbers):
                    x, y = left + (column + 0.5) * cell, top + (row + 0.5) * cell + 5
                    drawing.text(x, y, f"{value:.2f}", "strong", "middle")
        drawing.arrow(f"M206 {top + 78}H254", (254, top + 78))
        drawing.arrow(f"M440 {top + 78}H484", (484, top + 78))
        drawing.text(500, top + 60, f"{penalty(matrix):.2f}", "title")
        drawing.lines(500, top + 84, says[count])
    return drawing


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "mixing": mixing,
    "mixing_matrices": mixing_matrices,
    "layer": layer,
    "value_maps": value_maps,
    "reads": reads,
    "orthogonality": orthogonality,
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for name, draw in DRAWINGS.items():
        (DOCS / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
