"""A plugin of pytest: write the outcome of each test, as it ends.

It writes to the file descriptor that OUTCOMES names.
"""

import json
import os
import sys

_failed = set()


def pytest_runtest_logreport(report):
    # With xdist this runs in the process that prints the results, too; only that one may write.
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when in ("setup", "teardown") and report.outcome == "passed":  # of a fixture
        return
    row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
    if report.outcome != "passed":
        if report.nodeid in _failed:  # and then its process ended: see below
            return
        _failed.add(report.nodeid)
        crash = getattr(report.longrepr, "reprcrash", None)
        row["message"] = (crash.message if crash else str(report.longrepr))[:400]
        row["where"] = where(report.longrepr)
    os.write(int(os.environ["OUTCOMES"]), (json.dumps(row) + "\n").encode())


def where(longrepr):
    """Return the lines of this project in a traceback, the last one first."""
    entries = getattr(getattr(longrepr, "reprtraceback", None), "reprentries", [])
    places = [entry.reprfileloc for entry in entries if getattr(entry, "reprfileloc", None)]
    own = [
        f"{os.path.basename(place.path)}:{place.lineno}"
        for place in places
        if "site-packages" not in place.path
    ]
    return " < ".join(reversed(own))


def pytest_runtest_logfinish(nodeid, location):
    """End a process of xdist whose CUDA is broken, so that its other tests run in a new one."""
    torch = sys.modules.get("torch")
    if "PYTEST_XDIST_WORKER" not in os.environ or torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except Exception:
        os._exit(1)
