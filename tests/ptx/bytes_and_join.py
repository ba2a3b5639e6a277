"""Show a fault of triton 3.5 to 3.8 without the project: python -m tests.ptx.bytes_and_join

A product over 16 numbers, made by `join`, depends on a mask of bytes. For each width of the mask
and of the heads the script prints kWidth, which the compiler chose, and the error.
"""

import json
import re

import torch
import triton
import triton.language as tl

from tests.ptx.launch import launch


@triton.jit
def kernel(x, hidden, y, z, M: tl.constexpr, H: tl.constexpr):
    o_m = tl.arange(0, M)
    o_h = tl.arange(0, H)
    o_n = tl.arange(0, 16)
    b = tl.load(x + o_m[:, None] * H + o_h[None, :])
    b = tl.where(tl.load(hidden + o_m)[:, None] == 0, b, 0.0)  # [M, H]
    if H < 16:
        b = tl.reshape(tl.join(b, tl.zeros_like(b)), [M, 16])
    b_y = tl.load(y + tl.arange(0, 16)[:, None] * 16 + o_n[None, :])
    tl.store(z + o_m[:, None] * 16 + o_n[None, :], tl.dot(b, b_y))


if __name__ == "__main__":
    for heads in (8, 16):
        for dtype in (torch.uint8, torch.int32):
            x = torch.randn(64, heads).half()
            y = torch.randn(16, 16).half()
            z = torch.full((64, 16), torch.nan)
            hidden = (torch.rand(64) < 0.3).to(dtype)
            given = {"x": x, "hidden": hidden, "y": y, "z": z, "M": 64, "H": heads}
            made, _ = launch(kernel, 1, given, 4, 1)
            width = int(re.search(r"opIdx = 0.*?kWidth = (\d+)", made["ttgir"])[1])
            right = (x * (hidden[:, None] == 0)).double() @ y[:: 16 // heads].double()
            error = float((z - right).abs().max())
            print(json.dumps(dict(heads=heads, bytes=dtype.itemsize, width=width, error=error)))
