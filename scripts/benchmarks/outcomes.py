"""A plugin of pytest: write the outcome of each test, as it ends, to the file descriptor that OUTCOMES names."""

import json
import os


def pytest_runtest_logreport(report):
    # With xdist this runs in the process that prints the results, too; only that one may write.
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when != "call" and report.outcome == "passed":  # of a fixture
        return
    message = ""
    if report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else str(report.longrepr)
    row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "message": message[:400]}
    os.write(int(os.environ["OUTCOMES"]), (json.dumps(row) + "\n").encode())
