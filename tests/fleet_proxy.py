"""What stands for nginx where it is not installed."""

import http.client
import posixpath
import re
import ssl
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit


def handler(text: str, authority: Path) -> type[BaseHTTPRequestHandler]:
    """What answers as nginx does for the locations of a configuration: the longest prefix counts."""
    blocks = dict(re.findall(r"location (\S+) \{(.*?)\n    \}", text, flags=re.DOTALL))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = posixpath.normpath(unquote(urlsplit(self.path).path))
            block = blocks[max((prefix for prefix in blocks if path.startswith(prefix)), key=len)]
            refusal = re.search(r"return (\d+);", block)
            if refusal:
                self._answer(int(refusal[1]), [], b"")
                return
            [target] = re.findall(r"proxy_pass https://(\S+);", block)
            trusted = ssl.create_default_context(cafile=str(authority))
            upstream = http.client.HTTPSConnection(target, context=trusted)
            try:
                upstream.request("POST", self.path, content, {**self.headers, "Connection": "close"})
                answer = upstream.getresponse()
                self._answer(answer.status, answer.getheaders(), answer.read())
            except OSError:
                self._answer(502, [], b"")
            finally:
                upstream.close()

        do_GET = do_POST

        def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is logged."""

    return Handler
