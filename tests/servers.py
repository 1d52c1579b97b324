"""Servers for tests, each in a process of its own on a free loopback port, ended with the test run even when that is killed."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# Ends at the end of its input, which comes when the parent closes the pipe or dies.
_MOTO = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
from moto.server import main
main(["-H", "127.0.0.1", "-p", sys.argv[1]])
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """An S3 (moto, in memory, no buckets yet: see `create_bucket`). Yields the AWS_* settings to put into the environment."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", _MOTO, str(port)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(port, process, seconds=60)
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        process.terminate()
        process.communicate(timeout=30)


def create_bucket(environment: Mapping[str, str], name: str) -> None:
    """Makes a bucket on the server that `s3_server` yielded; no error when it is there."""
    import boto3.session

    session = boto3.session.Session(
        environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"], region_name=environment["AWS_DEFAULT_REGION"]
    )
    session.client("s3", endpoint_url=environment["AWS_ENDPOINT_URL"]).create_bucket(Bucket=name)


def _wait_for(port: int, process: subprocess.Popen[bytes], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the S3 server ended with {process.returncode} before it listened on port {port}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the S3 server does not listen on port {port} after {seconds} s")
