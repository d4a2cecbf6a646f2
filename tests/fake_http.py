"""What the servers that tests start have in common."""

import json
from http.server import BaseHTTPRequestHandler


class QuietHandler(BaseHTTPRequestHandler):
    """Logs nothing, reads JSON bodies, answers whole ones."""

    def log_message(self, *_):
        pass

    def asked(self) -> dict:
        """The request's body."""
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def whole(self, status: int, body: str) -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
