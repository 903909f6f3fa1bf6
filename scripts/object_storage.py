"""Emulate S3 and Google Cloud Storage (GCS) on the loopback interface, with injected faults, for tests.

    python scripts/object_storage.py --fail=0.02 --slow=0.05

The script prints shell commands that set environment variables, with which `train.py`, `eval.py` and the tools use
these servers for s3://bucket/ and gs://bucket/. It serves until it is stopped. All objects are in memory. Needs the
extra `dev`.

The servers are those of the packages `moto` and `gcp-storage-emulator`. A proxy in front of each injects faults: of the
share `--fail` of all requests, it answers half with status 503 and executes the others without returning the answer. It
delays the share `--slow` by a second. It also adds conditional writes to the GCS emulator, which lacks them.
"""

import contextlib
import http.client
import http.server
import json
import logging
import os
import random
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping

from absl import flags
from gcp_storage_emulator.server import create_server
from moto.server import ThreadedMotoServer

from dape_jax import command_line

FAIL = flags.DEFINE_float(
    "fail", 0.0, "Share of requests that fail; half of them are executed, and their answers dropped."
)
SLOW = flags.DEFINE_float("slow", 0.0, "Share of requests that are delayed by a second.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the faults.")

BUCKET = "bucket"
HOST = "127.0.0.1"
HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class Faults:
    """Shares of failing and slow requests; may be changed while the servers run.

    The next request "METHOD PATH" that matches the regular expression `lose_next` is executed, and its answer dropped.
    """

    def __init__(self, fail: float = 0.0, slow: float = 0.0, seed: int = 0):
        self.fail, self.slow, self.random, self.lose_next = fail, slow, random.Random(seed), ""
        self.num_requests = self.num_failed = self.num_slow = 0


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def proxy(upstream: int, faults: Faults) -> http.server.ThreadingHTTPServer:
    """Start a proxy, in a thread, that forwards requests to the server at port `upstream` and injects faults."""
    answers: dict[str, tuple[int, Mapping[str, str], bytes]] = {}  # last answers to requests of multi-part uploads
    writing = threading.Lock()  # makes the comparison of an object's version and the write one atomic operation

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            body = self.read_body()
            draw, slow = faults.random.random(), faults.random.random() < faults.slow
            refused, lost = draw < faults.fail / 2, faults.fail / 2 <= draw < faults.fail
            if faults.lose_next and re.search(faults.lose_next, f"{self.command} {self.path}"):
                refused, lost, faults.lose_next = False, True, ""
            faults.num_requests += 1
            faults.num_failed += refused or lost
            if slow:
                faults.num_slow += 1
                time.sleep(1)
            if refused:
                self.answer(503, {"Content-Type": "text/plain"}, b"injected fault")
                return
            status, headers, content = self.conditional(body)
            if "upload_id=" in self.path:  # the GCS emulator forgets an upload once complete
                if status == 404:
                    status, headers, content = answers.get(self.path, (status, headers, content))
                answers[self.path] = status, headers, content
            if lost:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.answer(status, headers, content)

        def conditional(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
            """Return the answer, with object versions and conditional writes, which the GCS emulator lacks."""
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
        """Server that closes the connections of its clients, which keep them open, when it is closed."""

        daemon_threads = True

        def __init__(self) -> None:
            super().__init__((HOST, 0), Handler)
            self.open: set[socket.socket] = set()

        def process_request(self, request: socket.socket, client_address: object) -> None:
            self.open.add(request)
            super().process_request(request, client_address)

        def shutdown_request(self, request: socket.socket) -> None:
            super().shutdown_request(request)
            self.open.discard(request)

        def server_close(self) -> None:
            super().server_close()
            for request in tuple(self.open):
                with contextlib.suppress(OSError):  # closed already
                    request.shutdown(socket.SHUT_RDWR)

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client was killed

    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@contextlib.contextmanager
def servers(faults: Faults) -> Iterator[dict[str, str]]:
    """Run both servers and their proxies, with a bucket in each; yield the environment variables that select them."""
    for name in ("werkzeug", "gcp_storage_emulator"):  # they log every request
        logging.getLogger(name).setLevel(logging.CRITICAL)
    s3 = ThreadedMotoServer(ip_address=HOST, port=0, verbose=False)
    s3.start()
    google_port = free_port()
    google = create_server(HOST, google_port, in_memory=True, default_bucket=BUCKET)
    google.start()
    s3_port = s3.get_host_and_port()[1]
    with contextlib.closing(http.client.HTTPConnection(HOST, s3_port)) as connection:
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
            each.server_close()
        s3.stop()
        google.stop()


def main(_: list[str]) -> None:
    """Start the servers, print the environment, and serve until interrupted."""
    faults = Faults(FAIL.value, SLOW.value, SEED.value)
    with servers(faults) as environment:
        for name, value in environment.items():
            print(f"export {name}={value}")
        print(f"# s3://{BUCKET}/ and gs://{BUCKET}/; Ctrl-C stops the servers", flush=True)
        try:
            while True:
                time.sleep(3600)
        finally:
            print(f"# {faults.num_requests} requests, {faults.num_failed} failed, {faults.num_slow} slow", flush=True)
            os._exit(0)  # a normal exit would wait for the servers' threads, which wait for their clients


if __name__ == "__main__":
    command_line.run(main)
