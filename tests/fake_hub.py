"""A small HTTP server that takes a model as the hub does: makes the repository, is asked how files are sent, takes one
commit.
"""

import base64
import json
from dataclasses import dataclass, field
from typing import Any

from tests.fake_http import QuietHandler, Serving

COMMIT = "1" * 40


class _Handler(QuietHandler):
    fake: "FakeHub"

    def do_HEAD(self):
        self.whole(200, "")

    def do_GET(self):
        self._note()
        if not self.fake.exists:
            self.whole(404, json.dumps({"error": "Repository not found"}))
            return
        self._answer({"id": "me/draft", "private": self.fake.private, "siblings": [], "tags": [], "sha": COMMIT})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._note()
        if self.fake.refusal and self.path.startswith(self.fake.refusal[0]):
            self.whole(self.fake.refusal[1], json.dumps({"error": "not for you"}))
        elif self.path == "/api/repos/create":
            self.fake.made.append(json.loads(body))
            self._answer({"url": f"{self.fake.url}/me/draft", "name": "me/draft"})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            self._answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]}
            )
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            sent = [line["value"] for line in lines if line["key"] == "file"]
            self.fake.files |= {file["path"]: base64.b64decode(file["content"]) for file in sent}
            url = f"{self.fake.url}/me/draft/commit/{COMMIT}"
            self._answer({"success": True, "commitOid": COMMIT, "commitUrl": url})
        else:
            self.whole(404, json.dumps({"error": f"{self.path} is not known here"}))

    def _note(self) -> None:
        self.fake.calls.append(self.path)
        self.fake.tokens.add(self.headers.get("Authorization"))

    def _answer(self, value: Any) -> None:
        self.whole(200, json.dumps(value))


@dataclass
class FakeHub(Serving):
    """exists, private: of the repository, before anything is sent; refusal: (beginning of a path, status) of what is
    refused. made: bodies of the requests for a repository; files: bytes by name of the commit; calls: every path;
    tokens: the bearer tokens.
    """

    exists: bool = True
    private: bool = False
    refusal: tuple[str, int] | None = None
    made: list[dict] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    handler = _Handler
