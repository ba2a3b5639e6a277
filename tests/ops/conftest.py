"""The fixture of the tests that run the fused kernels."""

import pytest


@pytest.fixture
def kernels(monkeypatch):
    """Let the kernels run on a CPU, too.

    They read NaN where they read memory that they have not written.
    """
    # imports triton, which test_triton_compile.py must not find interpreted
    from tests.ops import triton_cases

    monkeypatch.setattr(triton_cases.tuning, "_chosen", {})
    # test_triton_verify.py tests it
    monkeypatch.setattr("mixhead_plugin.ops.triton.support.trial_fault", lambda inputs: "")
    triton_cases.fill_unwritten_memory_with_nan(monkeypatch)
    if not triton_cases.ON_GPU:
        triton_cases.interpret(monkeypatch)
        triton_cases.use_few_large_tiles(monkeypatch)
