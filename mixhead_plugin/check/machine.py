"""Describe this machine: the versions of its packages, and its device."""

import contextlib
import importlib.metadata
import platform
import shutil
import subprocess

import torch

from mixhead_plugin.ops.triton import support

PACKAGES = (
    "mixhead_plugin",
    "torch",
    "triton",
    "transformers",
    "fairseq-fixed",
    "ve-fairseq",
    "fairseq",
    "numpy",
)


def machine_facts(device: torch.device) -> dict[str, str]:
    """Return the versions of the packages, and what is known of the device."""
    facts = {"python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    if device.type != "cuda":
        return {**facts, "device": f"{device}, {torch.get_num_threads()} threads"}
    known = torch.cuda.get_device_properties(device)
    facts["device"] = (
        f"{known.name}, compute capability {known.major}.{known.minor}, {known.total_memory >> 30} "
        "GiB"
    )
    tool = shutil.which("nvidia-smi")
    if tool:
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        printed = subprocess.run(query, capture_output=True, text=True).stdout
        facts["driver"] = printed.split("\n")[0]  # a line for each GPU
    return {**facts, "kernels": support.machine_problem() or "can run"}
