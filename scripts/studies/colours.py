"""The colours of variants: each has the same one in all pictures of the studies."""

VARIANTS = {
    "softmax": "#000000",
    "fairseq": "#000000",
    "A": "#0072B2",
    "B": "#D55E00",
    "sigsoftmax": "#009E73",
    "A + sigsoftmax": "#56B4E9",
    "B + sigsoftmax": "#E69F00",
    "B orthogonal": "#E69F00",
    "fixhead": "#CC79A7",
    "l2": "#56B4E9",
    "random": "#CC79A7",
    "average": "#999999",
}
