"""A Hugging Face hub for uploads on this machine: the requests of a commit, with git LFS for safetensors."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass
class Hub:
    """Its state.

    Attributes:
        files: (repository, branch) → path → content.
        private: repository → whether it was created as a private one.
        tokens: every Authorization header that was received.
        objects: of git LFS, by their SHA-256.
        refused: repositories whose commits get status 403.
    """

    address: str = ""
    files: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool | None] = field(default_factory=dict)
    tokens: set[str | None] = field(default_factory=set)
    objects: dict[str, bytes] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def create(self, body: dict) -> dict:
        repo = f"{body.get('organization') or 'me'}/{body['name']}"
        private = body.get("private", {"private": True, "public": False}.get(body.get("visibility")))
        self.private.setdefault(repo, private)
        self.files.setdefault((repo, "main"), {})
        return {"url": f"{self.address}/{repo}", "name": repo}

    def commit(self, repo: str, branch: str, lines: list[dict]) -> dict:
        files = self.files[repo, branch]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        return {"commitUrl": f"{self.address}/{repo}/commit/1", "commitOid": "1" * 40, "pullRequestUrl": None}

    def batch(self, body: dict) -> dict:
        objects = [
            {"oid": entry["oid"], "size": entry["size"],
             "actions": {"upload": {"href": f"{self.address}/lfs/{entry['oid']}"}}} for entry in body["objects"]
        ]  # fmt: skip
        return {"transfer": "basic", "objects": objects}


def preupload(body: dict) -> dict:
    modes = {True: "lfs", False: "regular"}
    return {"files": [{"path": file["path"], "uploadMode": modes[file["path"].endswith(".safetensors")],
                       "shouldIgnore": False} for file in body["files"]]}  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _answer(self, value: object, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/(.+/.+)/tree/(.+)", path):
            files = self.hub.files[match[1], match[2]]
            self._answer([{"type": "file", "path": name, "size": 1, "oid": "0"} for name in files])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            branch = (match[2] or "/revision/main").rpartition("/")[2]
            siblings = [{"rfilename": name} for name in self.hub.files[match[1], branch]]
            self._answer({"id": match[1], "siblings": siblings, "sha": "1" * 40})
        else:
            self._answer({"error": f"no such page: {path}"}, 404)

    def do_PUT(self) -> None:
        content = self._body()
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.objects[oid] = content
        self._answer({})

    def do_POST(self) -> None:
        path, content, hub = self.path.partition("?")[0], self._body(), self.hub
        hub.tokens.add(self.headers.get("Authorization"))
        if match := re.fullmatch(r"/api/models/(.+/.+)/commit/(.+)", path):
            if match[1] in hub.refused:
                self._answer({"error": "this token may not write"}, 403)
                return
            lines = [json.loads(line) for line in content.splitlines()]
            self._answer(hub.commit(match[1], match[2], lines))
        elif path == "/api/repos/create":
            self._answer(hub.create(json.loads(content)))
        elif match := re.fullmatch(r"/api/models/(.+/.+)/branch/(.+)", path):
            hub.files.setdefault((match[1], match[2]), dict(hub.files[match[1], "main"]))
            self._answer({})
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            self._answer(preupload(json.loads(content)))
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._answer(hub.batch(json.loads(content)))
        else:
            self._answer({"error": f"no such page: {path}"}, 404)


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Run the hub at a free port, for HF_ENDPOINT = its address."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
