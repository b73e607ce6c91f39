"""What `localllm serve` does with its options for access, as a process with a real engine."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.helpers import FIXTURES
from tests.server.real import HANG, real_server

TINY = FIXTURES / "architectures" / "llama-format-q4_1.gguf"
HELLO = {"prompt": "abc", "max_tokens": 3}


def refused(*options: str) -> str:
    with pytest.raises(AssertionError) as caught, real_server(TINY, *options):
        pass
    return str(caught.value)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost that signs itself, and its key."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=HANG)
    return certificate, key


def test_https_and_a_key_from_the_environment(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_API_KEY", "from-the-environment")
    files = ("--ssl-certfile", str(certificate[0]), "--ssl-keyfile", str(certificate[1]))
    with real_server(TINY, "--backend", "reference", *files) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=str(certificate[0]))
        with httpx.Client(base_url=server.url, verify=trust, timeout=HANG) as client:
            assert client.post("/v1/completions", json=HELLO).status_code == 401
            key = {"x-api-key": "from-the-environment"}
            assert client.post("/v1/completions", json=HELLO, headers=key).status_code == 200
            metrics = client.get("/metrics", headers=key).text
        assert "vllm:iteration_tokens_total_count" in metrics
        assert "from-the-environment" not in "".join(server.log) + metrics


def test_a_key_file_in_which_classes_matter(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "a"\nkey = "secret"\nclass = "batch"\nmax_concurrent = 1\n')
    options = ("--backend", "reference", "--host", "0.0.0.0", "--api-key-file", str(keys))
    with real_server(TINY, *options) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        headers = {"authorization": "Bearer secret"}
        answer = httpx.post(f"{url}/v1/completions", json=HELLO, headers=headers, timeout=HANG)
        assert answer.status_code == 200
        metrics = httpx.get(f"{url}/metrics", headers=headers, timeout=HANG).text
    assert 'localllm:request_arrivals_total{api="completions",class="batch"} 1.0' in metrics
    assert 'vllm:request_queue_time_seconds_count{class="batch"' in metrics


def test_what_cannot_be_served_is_said_in_one_line(tmp_path: Path) -> None:
    alone = refused("--host", "0.0.0.0")
    assert "Not listening on 0.0.0.0 without an API key" in alone
    assert "--insecure" in alone
    missing = tmp_path / "missing.pem"
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for file in (missing, broken):
        said = refused("--ssl-certfile", str(file), "--ssl-keyfile", str(file))
        assert "are no certificate with its key" in said
        assert "Traceback" not in said
    assert "ssl_certfile and ssl_keyfile go together" in refused("--ssl-certfile", str(missing))
    assert "No such file" in refused("--api-key-file", str(missing))
