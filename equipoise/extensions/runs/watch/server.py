"""WatchServer: a server of this machine alone, which answers questions for the page of runs and for reports."""

import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote_to_bytes, urlsplit

from equipoise.extensions.runs.watch.plain_files import read_below
from equipoise.extensions.runs.watch.watched_runs import WatchedRuns

__all__ = ["WatchServer"]

_HOST = "127.0.0.1"
# Names under which a browser of this machine, or at the end of a tunnel to it, asks. A page of another site that leads
# its own name to this address asks under that name.
_NAMES = {_HOST, "localhost"}
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
# Of a report, which has less than a megabyte.
_MOST_BYTES = 2**26
# A report is a file that anyone may have written: its scripts cannot read other pages of this server.
_SANDBOX = {"Content-Security-Policy": "sandbox allow-scripts"}


class WatchServer(ThreadingHTTPServer):
    """Serves the page of runs, and the reports to which it links. Nothing else can be read, and nothing written.

    Args:
        runs: The runs.
        port: The port; 0 takes any free one.

    Raises:
        OSError: If the port is taken.
    """

    daemon_threads = True

    def __init__(self, runs: WatchedRuns, port: int) -> None:
        super().__init__((_HOST, port), _Answer)
        self.runs = runs

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{_HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that has left."""


class _Answer(BaseHTTPRequestHandler):
    server: WatchServer
    server_version = "equipoise"
    sys_version = ""
    # Seconds after which a connection that says nothing ends.
    timeout = 10.0

    def do_GET(self) -> None:
        """Answer with the page, or with a report to which it links."""
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if name not in _NAMES:
            self.send_error(HTTPStatus.FORBIDDEN, explain=f"Ask for {_HOST} or localhost.")
            return
        try:
            page = self.server.runs.page()
        except Exception as error:
            # One damaged run must not end the others in silence.
            print(f"The page cannot be made: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        path = urlsplit(self.path).path
        if path == "/":
            if self.headers.get("If-None-Match") == page.version:
                self._answer(HTTPStatus.NOT_MODIFIED, b"", {"ETag": page.version})
                return
            self._answer(HTTPStatus.OK, page.html, {"ETag": page.version})
            return
        report = page.reports.get(quote(unquote_to_bytes(path)))
        try:
            if report is None:
                raise FileNotFoundError
            html = read_below(*report, _MOST_BYTES)
        except OSError:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self._answer(HTTPStatus.OK, html, _SANDBOX)

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, html: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (_HEADERS | headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(html)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(html)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line for each request."""
