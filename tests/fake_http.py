"""What the servers that tests start have in common."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar


class QuietHandler(BaseHTTPRequestHandler):
    """Logs nothing, reads JSON bodies, answers whole ones."""

    def log_message(self, *_):
        pass

    def asked(self) -> dict:
        """The request's body."""
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, fault: Any, make) -> None:
        """What `make` gives, as JSON; or a fault to order: (status, body), or "lost" for a connection that is cut."""
        if fault == "lost":
            self.connection.close()
        elif fault is not None:
            self.whole(*fault)
        else:
            self.whole(200, json.dumps(make()))

    def whole(self, status: int, body: str) -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Serving:
    """A context manager that serves `handler` on a free port at `url`, which ends with `path`; handler.fake is this."""

    handler: ClassVar[type[QuietHandler]]
    path: ClassVar[str] = ""
    url: str

    def __enter__(self):
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (self.handler,), {"fake": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}{self.path}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """No request is answered from now on."""
        self.server.shutdown()
        self.server.server_close()
