"""Provide data, an environment and a web server to the tests of the examples."""

import gzip
import os
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

# The variables that the recipes read, without those of launchers.
VARIABLES = "ARCHIVES AVERAGE BREAKS CHECKPOINT DATA DRY_RUN EARLY GPUS METRIC".split()
VARIABLES += "MIRROR MODEL PRECISION SAVE SELECT VARIANT".split()


@pytest.fixture(scope="session")
def pairs():
    """Return 2,900 German-English pairs of the demo's corpus, of about equal length."""
    folder = Path(__file__).parents[2] / "examples" / "demo" / "corpus"
    sides = [
        gzip.decompress((folder / f"{side}.gz").read_bytes()).decode().splitlines()
        for side in ("de", "en")
    ]
    return [(de, en) for de, en in zip(*sides) if 0.75 < len(de.split()) / len(en.split()) < 1.33][
        :2900
    ]


@pytest.fixture
def plain_environment(monkeypatch):
    """Remove the variables that the recipes read.

    Put the programs of this interpreter first on the PATH.
    """
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return monkeypatch


class Server:
    """Serve the files of a folder on loopback as an ordinary web server does: Range, 206, 416.

    Attributes:
        url: of the folder
        folder: the files
        requests: path and Range of every request so far
        faults: what goes wrong with the next requests, one each: "drop" sends half of what was
            asked for and closes; "no-range" sends everything from the start
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.requests = []
        self.faults = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked = self.headers.get("Range")
                outer.requests.append((self.path, asked))
                fault = outer.faults.pop(0) if outer.faults else None
                path = outer.folder / self.path.lstrip("/")
                if not path.is_file():
                    self.send_error(404)
                    return
                content = path.read_bytes()
                start = (
                    int(asked.removeprefix("bytes=").rstrip("-"))
                    if asked and fault != "no-range"
                    else 0
                )
                if asked and start >= len(content):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(content)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206 if start else 200)
                if start:
                    self.send_header(
                        "Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}"
                    )
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                rest = content[start:]
                self.wfile.write(rest[: len(rest) // 2] if fault == "drop" else rest)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server(tmp_path):
    """Yield a web server on loopback for the files of a fresh folder; see Server."""
    folder = tmp_path / "served"
    folder.mkdir()
    server = Server(folder)
    yield server
    server.close()
    shutil.rmtree(folder)
