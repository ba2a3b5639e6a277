"""Read the numbers of a page back."""

import base64
import json
import re
import zlib

import numpy as np


def read_page(path):
    """Return the sentences of a page; source, mixed and mixing are arrays."""
    (data,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"), re.S
    )
    data = json.loads(data)
    blob = zlib.decompress(base64.b64decode(data["blob"]), -zlib.MAX_WBITS)

    def array(place, kind=np.float32):
        flat = np.frombuffer(blob, kind, count=int(np.prod(place["shape"])), offset=place["at"])
        return flat.reshape(place["shape"])

    def weights(place):
        step, zero = (array(place[name])[..., None].astype(float) for name in ("step", "zero"))
        return (array(place, np.uint8) - zero) * step

    for sentence in data["sentences"]:
        for found in sentence["attentions"]:
            found["source"] = weights(found["source"])
            if "mixing" in found:
                found.update(mixing=array(found["mixing"]), mixed=weights(found["mixed"]))
    return data["sentences"]


def assert_shows(found, source, mixing, mixed):
    """Assert that an attention of a page has these weights [H, Nq, Nk], and this M.

    The weights may differ by half a step of 8 bits.
    """
    for shown, expected in {"source": source, "mixed": mixed}.items():
        expected = expected.double().numpy()
        low = expected.min(2).clip(max=0)
        high = expected.max(2).clip(min=0)
        # Half a step: 255 steps hold weights from 0 up, and 254 hold those of both signs.
        bound = np.where(low < 0, (high - low) / (2 * 254), high / (2 * 255))
        error = np.abs(found.get(shown, found["source"]) - expected).max(2)
        assert (error <= bound + 1e-6 * high).all(), (shown, error / bound)
        assert (found.get(shown, found["source"])[expected == 0] == 0).all()
    if mixing is None:
        assert "mixing" not in found
    else:
        np.testing.assert_allclose(found["mixing"], mixing.numpy(), rtol=1e-6, atol=1e-7)
