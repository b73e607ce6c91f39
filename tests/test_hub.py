"""Which files a spec means, and the real hub library against a hub on this machine."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.errors import DownloadError
from localllm.hub import pull, select

PLAIN = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-Q8_0.gguf", "m.imatrix.gguf"]
SHARDED = [
    "BF16/m-BF16-00002-of-00002.gguf",
    "BF16/m-BF16-00001-of-00002.gguf",
    "Q4_K_M/m-00001-of-00001.gguf",
    "m-UD-Q4_K_XL.gguf",
    "m-UD-Q2_K.gguf",
    "m-Q2_K.gguf",
]
TWO_MODELS = ["a.q4_0.gguf", "b.q4_0.gguf", "b.q8_0.gguf"]


@pytest.mark.parametrize(
    ("files", "wanted", "expected"),
    [
        (PLAIN, "Q8_0", ["m-Q8_0.gguf"]),
        (PLAIN, "q4_k_m", ["m-Q4_K_M.gguf"]),
        (PLAIN, None, ["m-Q4_K_M.gguf"]),
        (["only.Q3_K_S.gguf"], None, ["only.Q3_K_S.gguf"]),
        (SHARDED, "bf16", ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]),
        (SHARDED, None, ["Q4_K_M/m-00001-of-00001.gguf"]),
        (SHARDED, "Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        (SHARDED, "UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        (SHARDED, "Q2_K", ["m-Q2_K.gguf"]),
        (TWO_MODELS, "b.q4_0.gguf", ["b.q4_0.gguf"]),
        (TWO_MODELS, "Q8_0", ["b.q8_0.gguf"]),
    ],
)
def test_select(files: list[str], wanted: str | None, expected: list[str]) -> None:
    assert select(files, wanted, "o/r") == expected


@pytest.mark.parametrize(
    ("files", "wanted", "message"),
    [
        (["README.md"], "Q4_0", "o/r has no GGUF models"),
        (PLAIN, "Q9_K", "o/r has no Q9_K; it has Q4_K_M, Q8_0"),
        (PLAIN, "Q4", "o/r has no Q4; it has Q4_K_M, Q8_0"),
        (TWO_MODELS, None, "o/r has no Q4_K_M, say which; it has q4_0, q8_0"),
        (TWO_MODELS, "Q4_0", "o/r has several models of Q4_0; name one: a.q4_0.gguf, b.q4_0.gguf"),
        (SHARDED[:1], "BF16", "o/r has only 1 of 2 shards"),
    ],
)
def test_select_refuses(files: list[str], wanted: str | None, message: str) -> None:
    with pytest.raises(DownloadError, match=f"^{re.escape(message)}$"):
        select(files, wanted, "o/r")


@pytest.mark.parametrize("spec", ["", "model", "model.gguf", "a/b/c", "owner/repo:", "/repo:Q4_0"])
def test_what_is_no_spec_is_refused(spec: str) -> None:
    with pytest.raises(DownloadError, match="is not of the form owner/repo:Q4_K_M"):
        pull(spec)


REVISION = "a" * 40
SHARD_NAMES = [f"m-Q4_K_M-0000{number}-of-00002.gguf" for number in (1, 2)]
HUB_FILES = {
    SHARD_NAMES[0]: bytes(range(256)) * 50_000,  # longer than a chunk of the library's
    SHARD_NAMES[1]: b"second",
    "m-Q8_0.gguf": b"other",
}


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's interface as a download needs; breaks off the first long answer."""

    protocol_version = "HTTP/1.1"
    requests: list[str]
    interruptions: int

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/o/r"):
            siblings = [{"rfilename": file} for file in HUB_FILES]
            body = json.dumps({"id": "o/r", "sha": REVISION, "siblings": siblings}).encode()
            self.answer(200, body, {"Content-Type": "application/json"})
        elif "/o/r/resolve/" in path and name in HUB_FILES:
            self.send_file(name)
        else:
            code = "GatedRepo" if "gated" in path else "RepoNotFound"
            self.answer(403 if code == "GatedRepo" else 404, b"", {"X-Error-Code": code})

    def send_file(self, name: str) -> None:
        content, wanted = HUB_FILES[name], self.headers.get("Range")
        headers = {"ETag": f'"{name}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
        if not wanted:
            return self.answer(200, content, headers)
        start = int(wanted.removeprefix("bytes=").split("-")[0])
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self.answer(206, content[start:], headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.requests.append(f"{self.command} {self.path} {self.headers.get('Range')}")
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.interruptions and len(body) > 11_000_000:
            type(self).interruptions -= 1
            body, self.close_connection = body[:11_000_000], True
        self.wfile.write(body)


@pytest.fixture
def hub_url() -> Iterator[str]:
    Hub.requests, Hub.interruptions = [], 1
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def run_pull(spec: str, url: str, home: Path) -> str:
    """What `pull` returns or why it refuses, in a process of its own with its own cache."""
    code = (
        "import sys; from localllm.hub import pull; from localllm.errors import DownloadError\n"
        "try: print(pull(sys.argv[1]))\n"
        "except DownloadError as error: print('refused:', error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, spec],
        env={**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    return result.stdout.decode().strip()


def test_pull_resumes_and_then_lives_in_the_cache(hub_url: str, tmp_path: Path) -> None:
    path = Path(run_pull("o/r:q4_k_m", hub_url, tmp_path))
    assert path.name == SHARD_NAMES[0]
    for name in SHARD_NAMES:
        assert path.with_name(name).read_bytes() == HUB_FILES[name]
    assert not path.with_name("m-Q8_0.gguf").exists()
    assert Hub.interruptions == 0
    continued = [r for r in Hub.requests if re.search(r"^GET .*-00001-of.* bytes=[1-9]", r)]
    assert continued, Hub.requests

    away = "http://127.0.0.1:9"
    assert Path(run_pull("o/r:q4_k_m", away, tmp_path)) == path
    assert run_pull("o/r:q8_0", away, tmp_path) == "refused: o/r has no q8_0; it has Q4_K_M"
    assert run_pull("o/other", away, tmp_path).startswith("refused: cannot fetch o/other from")


def test_pull_explains_refusals(hub_url: str, tmp_path: Path) -> None:
    absent = run_pull("o/absent:Q4_0", hub_url, tmp_path)
    assert absent == "refused: o/absent is not on the hub, or is private"
    gated = run_pull("o/gated:Q4_0", hub_url, tmp_path)
    assert gated.startswith("refused: o/gated is gated")
