"""Give np.float to fairseq's CRF layer.

fairseq uses np.float, which NumPy lacks since version 1.24, to train nacrf_transformer.
"""

from types import SimpleNamespace

from fairseq.modules import dynamic_crf_layer

VERSIONS = "fairseq 0.12.2 and its main branch, with NumPy >= 1.24"


def apply() -> None:
    # The layer reads nothing else of NumPy. NumPy itself stays as it is for other packages.
    dynamic_crf_layer.np = SimpleNamespace(float=float)
