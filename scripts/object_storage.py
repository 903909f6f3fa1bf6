"""Serve S3 and Google Cloud Storage on the loopback interface, with failing requests, for tests.

    python scripts/object_storage.py --fail=0.02 --slow=0.05

It prints shell commands that set the environment in which `train.py`, `eval.py` and the tools use these servers for
s3://bucket/ and gs://bucket/, and serves until it is stopped. Nothing is stored permanently.

The servers are those of the packages `moto` and `gcp-storage-emulator`. A proxy for each answers a share of the
requests with status 503, drops the answers of the same share, delays others, and adds conditional writes to the second
server, which does not support them.
"""

import contextlib
import http.client
import http.server
import json
import logging
import os
import random
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping

from absl import flags
from gcp_storage_emulator.server import create_server
from moto.server import ThreadedMotoServer

from dape_jax import command_line

FAIL = flags.DEFINE_float("fail", 0.0, "Share of the requests that fail, half of them after execution.")
SLOW = flags.DEFINE_float("slow", 0.0, "Share of the requests that take a second longer.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the faults.")

BUCKET = "bucket"
HOST = "127.0.0.1"
HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class Faults:
    """Shares of failing and slow requests; may be changed while the servers run."""

    def __init__(self, fail: float = 0.0, slow: float = 0.0, seed: int = 0):
        self.fail, self.slow, self.random = fail, slow, random.Random(seed)
        self.num_requests = self.num_failed = self.num_slow = 0


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def proxy(upstream: int, faults: Faults) -> http.server.ThreadingHTTPServer:
    """Start a server, in a thread, that forwards requests to another server, except for faults."""
    answers: dict[str, tuple[int, Mapping[str, str], bytes]] = {}  # answers to the parts of uploads
    writing = threading.Lock()  # makes the comparison of an object's version and the write atomic

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            body = self.read_body()
            draw, slow = faults.random.random(), faults.random.random() < faults.slow
            faults.num_requests += 1
            if slow:
                faults.num_slow += 1
                time.sleep(1)
            if draw < faults.fail:
                faults.num_failed += 1
                if draw < faults.fail / 2:
                    self.answer(503, {"Content-Type": "text/plain"}, b"a fault")
                    return
            status, headers, content = self.conditional(body)
            if "upload_id=" in self.path:  # the second server deletes an upload when it is complete
                if status == 404:
                    status, headers, content = answers.get(self.path, (status, headers, content))
                answers[self.path] = status, headers, content
            if draw < faults.fail:  # executed, but the answer is lost
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.answer(status, headers, content)

        def conditional(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
            """Return the answer, with object versions and conditional writes, which the second server lacks."""
            url = urllib.parse.urlsplit(self.path)
            query = urllib.parse.parse_qs(url.query)
            condition, is_read = query.get("ifGenerationMatch"), "media" in query.get("alt", [])
            if not is_read and (condition is None or "name" not in query):
                return self.forward(self.command, self.path, body)
            with writing:
                name = url.path.rpartition("/")[2] if is_read else urllib.parse.quote(query["name"][0], safe="")
                status, _, content = self.forward("GET", f"/storage/v1/b/{BUCKET}/o/{name}", b"")
                found = str(json.loads(content)["generation"]) if status == 200 else "0"
                if condition is not None and [found] != condition:
                    return 412, {"Content-Type": "application/json"}, b'{"error": {"message": "conditionNotMet"}}'
                status, headers, content = self.forward(self.command, self.path, body)
                return status, {**headers, "X-Goog-Generation": found} if is_read else headers, content

        def forward(self, method: str, path: str, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
            connection = http.client.HTTPConnection(HOST, upstream, timeout=60)
            with contextlib.closing(connection):
                headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_HEADERS}
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                return response.status, dict(response.getheaders()), response.read()

        def read_body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def answer(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in HOP_HEADERS:
                    self.send_header(name, value)
            length = headers.get("Content-Length", len(content)) if self.command == "HEAD" else len(content)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = handle_one

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # killed clients

    server = Server((HOST, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@contextlib.contextmanager
def servers(faults: Faults) -> Iterator[dict[str, str]]:
    """Run both servers with one bucket each; yield the environment variables that select them."""
    for name in ("werkzeug", "gcp_storage_emulator"):  # they log every request
        logging.getLogger(name).setLevel(logging.CRITICAL)
    s3 = ThreadedMotoServer(ip_address=HOST, port=0, verbose=False)
    s3.start()
    google_port = free_port()
    google = create_server(HOST, google_port, in_memory=True, default_bucket=BUCKET)
    google.start()
    s3_port = s3.get_host_and_port()[1]
    connection = http.client.HTTPConnection(HOST, s3_port)
    connection.request("PUT", f"/{BUCKET}")
    assert connection.getresponse().status == 200
    proxies = [proxy(port, faults) for port in (s3_port, google_port)]
    s3_url, google_url = (f"http://{HOST}:{each.server_address[1]}" for each in proxies)
    try:
        yield {
            "AWS_ENDPOINT_URL": s3_url,
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "STORAGE_EMULATOR_HOST": google_url,
        }
    finally:
        for each in proxies:
            each.shutdown()
        s3.stop()
        google.stop()


def main(_: list[str]) -> None:
    """Parse flags, serve, print the environment."""
    faults = Faults(FAIL.value, SLOW.value, SEED.value)
    with servers(faults) as environment:
        for name, value in environment.items():
            print(f"export {name}={value}")
        print(f"# s3://{BUCKET}/ and gs://{BUCKET}/; Ctrl-C stops them", flush=True)
        try:
            while True:
                time.sleep(3600)
        finally:
            print(f"# {faults.num_requests} requests, {faults.num_failed} failed, {faults.num_slow} slow", flush=True)
            os._exit(0)  # a server's thread would wait for its clients


if __name__ == "__main__":
    command_line.run(main)
