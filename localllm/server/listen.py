"""The server's socket, bound before anything that takes long."""

from __future__ import annotations

import errno
import ipaddress
import socket

from localllm.errors import LocalLLMError


def bind(host: str, port: int) -> socket.socket:
    """A listening-to-be socket; LocalLLMError in one line when it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise LocalLLMError(f"Unknown host {host!r}: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise LocalLLMError(_bind_failure(error, host, port)) from error
    return listener


def _bind_failure(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is already in use; choose another with --port"
    return f"Cannot listen on {host}:{port}: {error.strerror}"


def check_exposure(listener: socket.socket, *, has_keys: bool, insecure: bool) -> None:
    """LocalLLMError when other machines could use the server without a key."""
    host = listener.getsockname()[0]
    if has_keys or insecure or ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        return
    raise LocalLLMError(
        f"Not listening on {host} without an API key: whoever reaches this machine could use the "
        "model. Set one with LOCALLLM_API_KEY, --api-key or --api-key-file, or say --insecure"
    )


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
